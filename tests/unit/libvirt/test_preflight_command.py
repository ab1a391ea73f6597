"""`vfiomgr check domain` of files: what it prints, with which status, and without libvirt."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import api
from tests.unit.libvirt.preflight.situations import BOTH, pci_element, xml
from vfiomgr.libvirt.commands.preflight import preflight
from vfiomgr.snapshot.document import write_snapshot

if TYPE_CHECKING:
    from tests.fakes.kernel import FakeKernel
    from tests.unit.conftest import Matches, Run

GPU = "0000:01:00.0"


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the user is, so that messages name files as they were typed."""
    place = tmp_path / "domains"
    place.mkdir()
    monkeypatch.chdir(place)
    return place


@pytest.fixture
def broken(directory: Path) -> str:
    """A domain with a GPU on its host driver, a function that is missing and a lonely one."""
    lonely = pci_element("0000:02:00.1", managed="yes").replace(
        "    </hostdev>",
        "      <address type='pci' bus='0x02' slot='0x00' function='0x1'/></hostdev>",
    )
    devices = BOTH + pci_element("0000:77:00.0") + lonely
    (directory / "gpu.xml").write_text(xml(devices, before=""))
    return "gpu.xml"


@pytest.fixture
def sound(directory: Path) -> str:
    """A domain that starts once the GPU is bound."""
    (directory / "good.xml").write_text(xml(before=""))
    return "good.xml"


@pytest.mark.usefixtures("kernel")
def test_golden(run: Run, matches: Matches, broken: str) -> None:
    answer = run("check", "domain", broken)
    matches("libvirt-preflight.txt", answer.stdout)
    assert answer.status == 1
    assert "not checked: other domains" in answer.stderr
    assert "libvirt was not queried: the facts are those of another machine" in answer.stderr
    matches("libvirt-preflight.json", run("check", "domain", broken, "--format", "json").stdout)


def test_following_the_remedy_leaves_nothing_that_blocks(
    run: Run, kernel: FakeKernel, sound: str
) -> None:
    before = run("check", "domain", sound)
    assert before.status == 1
    assert "  remedy    vfiomgr bind 0000:01:00.0\n" in before.stdout
    assert kernel.operations == []
    assert run("bind", GPU).status == 0
    after = run("check", "domain", sound)
    assert after.status == 0
    assert "good.xml: unknown: whether interrupts are remapped: 2 infos" in after.stdout


def test_a_pipe_and_several_files(
    run: Run, sound: str, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = Path(sound).read_bytes()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
    answer = run("check", "domain", "-", broken, "--format", "json")
    items = json.loads(answer.stdout)["items"]
    assert [item["source"] for item in items] == ["<stdin>", "gpu.xml"]
    assert [item["is_blocked"] for item in items] == [True, True]
    assert items[0]["findings"][0]["evidence"][0].startswith("<stdin>:13: ")


def test_a_snapshot_answers_for_its_host(
    run: Run, kernel: FakeKernel, directory: Path, sound: str
) -> None:
    (directory / "host.json").write_text(write_snapshot(api.scan(kernel)))
    answer = run("--snapshot", "host.json", "check", "domain", sound)
    assert answer.status == 1
    assert "driver: nvidia" in answer.stdout
    unknown = "unknown: processes that use the devices\n  evidence  requires root on the running"
    assert unknown in answer.stdout
    whole = run("-v", "--snapshot", "host.json", "check", "domain", sound).stderr
    assert "hooks of libvirt: not in the snapshot" in whole


def test_hooks_that_run_virsh_are_found(run: Run, kernel: FakeKernel, directory: Path) -> None:
    (directory / "win.xml").write_text(xml(pci_element(GPU, managed="yes"), before=""))
    hooks = Path(kernel.root, "etc/libvirt/hooks")
    begin = hooks / "qemu.d/win/prepare/begin"
    begin.mkdir(parents=True)
    script = begin / "start.sh"
    script.write_text("#!/bin/sh\n# virsh list\necho virsh list\nvirsh list &\nmodprobe vfio-pci\n")
    assert "hook-runs-virsh" not in run("check", "domain", "win.xml").stdout
    script.write_text("#!/bin/sh\nsleep 1; /usr/bin/virsh nodedev-detach pci_0000_01_00_0\n")
    script.chmod(0o644)
    assert "hook-runs-virsh" not in run("check", "domain", "win.xml").stdout, "libvirt skips it"
    script.chmod(0o755)
    told = run("check", "domain", "win.xml").stdout
    assert "/qemu.d/win/prepare/begin/start.sh:2: sleep 1; /usr/bin/virsh nodedev-detach" in told
    assert "rule      hook-runs-virsh" in told
    (hooks / "qemu.d/win").rename(hooks / "qemu.d/other")
    assert "hook-runs-virsh" not in run("check", "domain", "win.xml").stdout, "of another guest"
    (hooks / "qemu").write_text("virsh list\n")
    assert "/etc/libvirt/hooks/qemu:1: virsh list" in run("check", "domain", "win.xml").stdout


@pytest.mark.parametrize(
    ("hook", "is_found"),
    [
        (("other", "virsh nodedev-detach pci_0000_02_00_0\nmodprobe -r vfio_pci"), True),
        (("other", "echo 0000:02:00.0 > unbind\nrmmod vfio-pci vfio"), True),
        (("other", "modprobe -r vfio_pci"), False),
        (("other", "virsh nodedev-detach pci_0000_01_00_0\nmodprobe -r vfio_pci"), False),
        (("other", "virsh nodedev-detach pci_0000_02_00_0\n# modprobe -r vfio_pci"), False),
        (("other", "virsh nodedev-detach pci_0000_02_00_0\nmodprobe vfio_pci"), False),
        (("win", "modprobe -r vfio_pci"), False),
    ],
)
def test_hooks_that_remove_modules_of_other_devices_are_found(
    run: Run, kernel: FakeKernel, directory: Path, hook: tuple[str, str], *, is_found: bool
) -> None:
    guest, text = hook
    (directory / "win.xml").write_text(xml(pci_element(GPU, managed="yes"), before=""))
    assert run("bind", GPU, "--allow", "in-use", "--allow", "boot-display").status == 0
    script = Path(kernel.root, f"etc/libvirt/hooks/qemu.d/{guest}/release/end/stop.sh")
    script.parent.mkdir(parents=True)
    script.write_text(f"#!/bin/sh\n{text}\n")
    script.chmod(0o755)
    answer = run("check", "domain", "win.xml").stdout
    assert ("rule      hook-removes-module" in answer) is is_found
    assert ("removes vfio-pci, which other devices use: 0000:01:00.0" in answer) is is_found


def test_a_hook_that_removes_the_driver_of_another_gpu_is_found(
    run: Run, kernel: FakeKernel, directory: Path
) -> None:
    (directory / "win.xml").write_text(xml(pci_element("0000:02:00.0", managed="yes"), before=""))
    script = Path(kernel.root, "etc/libvirt/hooks/qemu.d/win/prepare/begin/start.sh")
    script.parent.mkdir(parents=True)
    script.write_text("#!/bin/sh\nmodprobe -r nvidia_drm nvidia\n")
    script.chmod(0o755)
    title = "removes nvidia, which other devices use: "
    assert f"{title}{GPU}" in run("check", "domain", "win.xml").stdout
    (directory / "win.xml").write_text(xml(pci_element(GPU, managed="yes"), before=""))
    assert f"{title}{GPU}" not in run("check", "domain", "win.xml").stdout, "it is the guest's"


def test_a_rom_is_looked_for_below_the_root(run: Run, kernel: FakeKernel, directory: Path) -> None:
    rom = "<rom file='/roms/gpu.rom'/>"
    (directory / "rom.xml").write_text(xml(pci_element(GPU, managed="yes", rest=rom), before=""))
    assert "no such file: /roms/gpu.rom" in run("check", "domain", "rom.xml").stdout
    (Path(kernel.root) / "roms").mkdir()
    (Path(kernel.root) / "roms/gpu.rom").write_bytes(b"U\xaa")
    assert "no such file" not in run("check", "domain", "rom.xml").stdout


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        ((), 2, "missing argument: DOMAIN or FILE"),
        (("--all", "x.xml"), 2, "--all includes every domain"),
        (("missing.xml",), 2, "cannot read domain missing.xml: No such file"),
        (("bad.xml",), 65, "bad.xml:1"),
        (("list.xml",), 65, "<list> is not a domain"),
    ],
)
def test_mistakes_are_told(
    run: Run, directory: Path, arguments: tuple[str, ...], status: int, words: str
) -> None:
    (directory / "bad.xml").write_text("<domain")
    (directory / "list.xml").write_text("<list/>")
    answer = run("check", "domain", *arguments)
    assert answer.status == status
    assert words in answer.stderr
    assert "remedy:" in answer.stderr


def test_the_help_has_examples_and_the_exit_status() -> None:
    text = preflight.help or ""
    assert "Examples:" in text
    assert "Exit status: 0 if nothing blocks" in text


@pytest.mark.parametrize(
    ("command", "remedy"),
    [
        ("check domain win", "pass the XML of a domain: virsh dumpxml --inactive DOMAIN"),
        ("check domain --all", "pass the XML of a domain: virsh dumpxml --inactive DOMAIN"),
        ("libvirt list", "run vfiomgr on that host, or pass its --connect URI"),
    ],
)
def test_a_snapshot_is_not_of_the_libvirt_of_this_machine(
    run: Run, kernel: FakeKernel, directory: Path, command: str, remedy: str
) -> None:
    (directory / "host.json").write_text(write_snapshot(api.scan(kernel)))
    answer = run("--snapshot", "host.json", *command.split())
    assert answer.status == 2
    assert answer.stderr == f"vfiomgr: error: a snapshot has no libvirt\n  remedy: {remedy}\n"
