"""The tutorials: every command in them is run, and prints what they show."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.fakes.containerd import Containerd
from tests.fakes.desktop import Desktop, gnome
from tests.fakes.hosts import workstation
from tests.fakes.laptop import laptop
from tests.fakes.live_desktop import LiveDesktop
from tests.fakes.machine import RELEASE
from tests.fakes.vgpu_hosts import a40_host
from tests.unit.golden.container_cases import NODE
from tests.unit.golden.hosts import SYSTEMD
from tests.unit.golden.transcripts import as_installed
from tests.unit.host_files import put_topology
from tests.unit.kata.test_config_command import install
from tests.unit.runtimes import put
from vfiomgr.libvirt.preflight.desktop_files import FileState
from vfiomgr.pci.memory import HostTopology, NumaNode

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.fakes.kernel import FakeKernel
    from tests.unit.conftest import Run

TUTORIALS = Path(__file__).parents[3] / "docs/tutorials"
_BLOCK = re.compile(r"(?<=```console\n)(.*?)(?=```)", re.DOTALL)


def kata_node(directory: Path) -> FakeKernel:
    """A node with containerd and Kata, and a GPU that is not bound yet."""
    kernel = workstation(directory)
    install(kernel)
    Containerd("2.1.9").install(kernel)
    for path, text in NODE.items():
        put(kernel, f"/{path}", text)
    return kernel


def desktop(directory: Path) -> FakeKernel:
    """A workstation."""
    return with_cores(workstation(directory))


def one_card(directory: Path) -> FakeKernel:
    """GNOME on the only card, and an SSH server."""
    host = gnome(directory)
    host.ssh()
    return with_cores(LiveDesktop(host).kernel)


def mobile(directory: Path) -> FakeKernel:
    """A laptop with a MUX, and Plasma, which has opened both GPUs."""
    kernel = laptop(directory).kernel
    host = Desktop.of(kernel)
    host.display_manager("sddm.service", "sddm")
    host.session("3", SERVICE="sddm")
    every = ("/dev/dri/card0", "/dev/dri/card1")
    host.of_user(1200, "kwin_wayland", "plasma-kwin_wayland.service", *every)
    return with_cores(kernel)


def with_cores(kernel: FakeKernel) -> FakeKernel:
    """Four cores of two threads."""
    cores = tuple((core, core + 4) for core in range(4))
    every = tuple(range(8))
    node = NumaNode(0, every, 32 << 30, 28 << 30)
    put_topology(Path(kernel.root), HostTopology((node,), cores[0], (), None, cores, (every,)))
    return kernel


PCI_IDS = """\
8086  Intel Corporation
\t4680  AlderLake-S GT1 [UHD Graphics 770]
10de  NVIDIA Corporation
\t1eb8  TU104GL [Tesla T4]
\t2235  GA102GL [A40]
\t2684  AD102 [GeForce RTX 4090]
\t22ba  AD102 High Definition Audio Controller
C 03  Display controller
\t00  VGA compatible controller
"""


HOSTS: dict[str, Callable[[Path], FakeKernel]] = {
    "desktop": desktop,
    "one-card": one_card,
    "laptop": mobile,
    "vgpu-host": a40_host,
    "kata-node": kata_node,
}


def state_of_input(_tree: FakeKernel, path: str) -> FileState | None:
    """A keyboard and a mouse: device nodes, which only root can make."""
    return FileState(True, 0, 0, 0, 0o660) if path.startswith("/dev/input/") else None  # noqa: FBT003


@pytest.fixture
def tutorial(request: pytest.FixtureRequest) -> str:
    """Its name."""
    name: str = request.param
    return name


@pytest.fixture
def kernel(tutorial: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeKernel:
    """The host of the tutorial, and the user in an empty directory."""
    kernel = HOSTS[tutorial](tmp_path / "host")
    put(kernel, "/usr/share/misc/pci.ids", PCI_IDS)
    put(kernel, "/etc/os-release", 'ID=debian\nPRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\n')
    for file, text in SYSTEMD.items():
        put(kernel, f"/{file}", text)
    put(kernel, f"/lib/modules/{RELEASE}/modules.dep", "kernel/drivers/vfio/pci/vfio-pci.ko.xz:\n")
    put(kernel, "/sys/class/iommu/dmar0/intel-iommu/ecap", "f020df\n")
    as_installed(monkeypatch)
    monkeypatch.setattr("vfiomgr.libvirt.preflight.desktop_files._state", state_of_input)
    monkeypatch.setattr("vfiomgr.containers.runtimes.apply._stamp", lambda: "20261121T120000Z")
    monkeypatch.chdir(tmp_path)
    return kernel


def transcript(run: Run, kernel: FakeKernel, line: str) -> str:
    """What a terminal shows for a command, whose output may go to a file of the example host."""
    words = shlex.split(line)
    target = None
    if ">" in words:
        words, target = words[: words.index(">")], words[-1]
    assert words[0] == "vfiomgr"
    if "--output" in words:
        place = words.index("--output") + 1
        words[place] = f"{kernel.root}{words[place]}" if words[place][0] == "/" else words[place]
    answer = run(*words[1:])
    if target is not None:
        if target.startswith("/"):
            put(kernel, target, answer.stdout)
        else:
            Path(target).write_text(answer.stdout)
    shown = answer.stderr if target else answer.stdout + answer.stderr
    return f"$ {line}\n{shown.replace(kernel.root, '')}"


def test_every_tutorial_has_a_host() -> None:
    assert {path.stem for path in TUTORIALS.glob("*.md")} == set(HOSTS)


@pytest.mark.parametrize("tutorial", sorted(HOSTS), indirect=True)
def test_a_tutorial_shows_what_its_commands_print(
    run: Run, kernel: FakeKernel, tutorial: str, request: pytest.FixtureRequest
) -> None:
    path = TUTORIALS / f"{tutorial}.md"
    text = path.read_text()

    def played(block: re.Match[str]) -> str:
        lines = [line[2:] for line in block[0].splitlines() if line.startswith("$ ")]
        assert lines
        return "".join(transcript(run, kernel, line) for line in lines)

    now = _BLOCK.sub(played, text)
    if request.config.getoption("--update-golden"):
        path.write_text(now)
    assert now == path.read_text()
