"""Each tutorial on a real kernel, from its first command to its last: they end as they began."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
from ruamel.yaml import YAML

from tests.fakes.kubelet import Kubelet
from tests.lab import gpusim, libvirtd
from tests.lab.command import VFIOMGR, vfiomgr
from tests.lab.systemd import start_manager, start_unit, stop_unit, systemctl
from tests.lab.test_uses import await_true
from tests.unit.kata.test_config_command import RS_BASE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping

    from tests.lab.topology import Topology

    Handlers = Mapping[str, Callable[[], Awaitable[object] | object]]

TUTORIALS = Path(__file__).parents[2] / "docs/tutorials"
_BLOCK = re.compile(r"^```(console|sh)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_SECONDS = 300.0
_PLUGINS = Path("/var/lib/kubelet/device-plugins")
_POD_RESOURCES = Path("/var/lib/kubelet/pod-resources/kubelet.sock")
_WRITTEN = (
    "/etc/cdi",
    "/etc/containerd",
    "/etc/kata-containers",
    "/etc/libvirt/hooks",
    "/etc/mdevctl.d",
    "/etc/systemd/system",
    "/etc/udev/rules.d",
    "/run/cdi",
    "/run/vfiomgr/vgpus",
    "/var/lib/vfiomgr/origins",
)
"""Where vfiomgr writes what outlives a command."""
SKIPPED = {
    "systemctl daemon-reload": "the laboratory has no systemd",
    "ls /dev/input/by-id/*-event-kbd /dev/input/by-id/*-event-mouse": "it has no USB keyboard",
    "vfiomgr laptop": "its firmware has no switches",
    "vfiomgr laptop vfio": "the same",
    "vfiomgr laptop hybrid": "the same",
}
_SMALL = "--virt-type qemu --firmware bios --memory 256M --vcpus 1"
REPLACED = {
    "--os windows --secure-boot --memory 8G --vcpus 4": (
        _SMALL,
        "the laboratory has neither KVM nor OVMF, and 6 GiB of memory",
    ),
    "--os windows --desktop --looking-glass none --memory 8G --vcpus 4": (_SMALL, "the same"),
    "--os windows --desktop --looking-glass none --video none --memory 8G --vcpus 4": (
        f"{_SMALL} --video none",
        "the same",
    ),
    "--os windows --desktop --memory 8G --vcpus 4": (
        f"{_SMALL} --looking-glass 1920x1080",
        "the same",
    ),
    "--evdev /dev/input/by-id/usb-Logitech_K120-event-kbd,toggle=ctrl-ctrl "
    "--evdev /dev/input/by-id/usb-Logitech_M90-event-mouse ": ("", "it has no USB keyboard"),
    "/vm/win.qcow2,bus=virtio ": ("/vm/win.qcow2,format=raw,bus=virtio ", "it has no qemu-img"),
    "--network default,model=virtio ": ("", "the laboratory's libvirtd has no networks"),
}


class Command(NamedTuple):
    """A line of a tutorial, and the exit status that its output there shows."""

    line: str
    status: int = 0


def commands(name: str) -> Iterator[Command]:
    """All commands of a tutorial, in order."""
    for kind, text in _BLOCK.findall((TUTORIALS / f"{name}.md").read_text()):
        if kind == "sh":
            yield from map(Command, text.splitlines())
            continue
        for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            line, _, shown = part.partition("\n")
            yield Command(line, 4 if "vfiomgr: refused" in shown else "\nbroken: " in shown)


async def play(name: str, places: Mapping[str, str], handlers: Handlers) -> None:
    """Run all commands of a tutorial, with the addresses of this guest."""
    unused = {*handlers, *places}
    for line, status in commands(name):
        here = line
        for old, new in places.items():
            if old in here:
                unused.discard(old)
            here = re.sub(rf"\b{re.escape(old)}\b", new, here)
        for old, (new, _) in REPLACED.items():
            here = here.replace(old, new)
        if line in handlers:
            unused.discard(line)
            done = handlers[line]()
            if inspect.isawaitable(done):
                await done
        elif line not in SKIPPED:
            await asyncio.to_thread(_type, here, status)
    assert not unused, "of no tutorial any more"


def _type(line: str, status: int) -> None:
    words = shlex.split(line)
    if words[0] != "vfiomgr":
        environment = {**os.environ, "LIBVIRT_DEFAULT_URI": libvirtd.URI}
        command = ["sh", "-c", line]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == status, (line, done.stdout + done.stderr)
        return
    target = words.pop() if ">" in words else None
    said = vfiomgr(*(word for word in words[1:] if word != ">"), status=status).stdout
    if target is not None:
        Path(target).write_text(said)


def kept() -> dict[str, str]:
    """All files that vfiomgr may have written, and the driver of each function."""
    files = [file for place in _WRITTEN for file in Path(place).rglob("*") if file.is_file()]
    devices = Path("/sys/bus/pci/devices").iterdir()
    return {str(file): file.read_text() for file in files} | {
        device.name: os.path.basename(os.path.realpath(device / "driver")) for device in devices
    }


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_every_tutorial_is_played() -> None:
    played = {"desktop", "one-card", "laptop", "vgpu-host", "kata-node"}
    assert {file.stem for file in TUTORIALS.glob("*.md")} == played


@pytest.mark.topology("workstation")
def test_a_desktop_gives_a_card_that_its_session_shows_to_a_vm_and_gets_it_back(
    topology: Topology, libvirtd: str
) -> None:
    del libvirtd
    gpu = topology.addresses["gpu"]
    _make_images()
    before = kept()
    opened: list[int] = []

    def bind_in_a_session() -> None:
        opened.append(os.open(f"/dev/dri/by-path/pci-{gpu}-card", os.O_RDWR))
        assert f"vfiomgr bind --at-boot {gpu}" in vfiomgr("bind", gpu, status=4).stderr
        _type(f"vfiomgr bind --at-boot {gpu}", 0)

    handlers = {
        "vfiomgr bind --at-boot 02:00.0": bind_in_a_session,
        "reboot": lambda: os.close(opened.pop()) if opened else None,
        "systemctl restart libvirtd": _restart_libvirtd,
        "virsh shutdown win": lambda: _type("virsh destroy win", 0),
    }
    places = {"02:00.0": gpu.removeprefix("0000:"), "00:02.0": topology.addresses["console"]}
    asyncio.run(play("desktop", places, handlers))
    assert kept() == before


_HOLDER = """
[Service]
ExecStart=/run/lab/lightdm -c "import os, time; os.open('/dev/dri/by-path/pci-{}-card', 2); \\
time.sleep(1e6)"
Restart=always
"""
_DISPLAY_MANAGER = "display-manager.service"


@pytest.fixture
def greeter(topology: Topology) -> Iterator[str]:
    """A display manager that has the console's card open, under systemd."""
    start_manager()
    console = topology.addresses["console"]
    Path("/run/lab").mkdir(exist_ok=True)
    Path("/run/lab/lightdm").symlink_to("/usr/bin/python3")
    start_unit(_DISPLAY_MANAGER, _HOLDER.format(console))
    yield console
    stop_unit(_DISPLAY_MANAGER)
    Path("/run/lab/lightdm").unlink()


def _has_desktop(console: str) -> bool:
    """Whether the console, its card and the display manager are as before."""
    names = [name.read_text() for name in Path("/sys/class/vtconsole").glob("*/name")]
    is_active = systemctl("is-active", _DISPLAY_MANAGER, must_work=False) == "active"
    is_open = bool(list(Path(f"/sys/bus/pci/devices/{console}/drm").glob("card*")))
    return is_active and is_open and any("frame buffer" in name for name in names)


@pytest.mark.topology("services")
@pytest.mark.thorough
def test_the_only_card_goes_to_a_vm_and_the_desktop_has_it_back(
    greeter: str, libvirtd: str
) -> None:
    del libvirtd
    _make_images()
    before = kept()

    def destroy() -> None:
        assert systemctl("is-active", _DISPLAY_MANAGER, must_work=False) != "active"
        _type("virsh destroy win", 0)
        await_true(lambda: _has_desktop(greeter))

    def release() -> None:
        _type(f"vfiomgr bind --release --yes {greeter}", 0)
        assert not _has_desktop(greeter)

    def unbind() -> None:
        _type(f"vfiomgr unbind {greeter}", 0)
        assert _has_desktop(greeter)

    handlers = {
        "systemctl restart libvirtd": _restart_libvirtd,
        "virsh shutdown win": lambda: _type("virsh destroy win", 0),
        "virsh destroy win": destroy,
        "vfiomgr bind --release --yes 01:00.0": release,
        "vfiomgr unbind 01:00.0": unbind,
    }
    asyncio.run(play("one-card", {"01:00.0": greeter.removeprefix("0000:")}, handlers))
    assert kept() == before


@pytest.mark.topology("services")
@pytest.mark.thorough
def test_a_second_gpu_is_reserved_for_a_vm_that_is_seen_in_a_window(
    topology: Topology, greeter: str, libvirtd: str
) -> None:
    del libvirtd
    gpu = topology.addresses["gpu"]
    _make_images()
    before = kept()
    handlers = {
        "reboot": lambda: None,
        "systemctl restart libvirtd": _restart_libvirtd,
        "echo 'f /dev/shm/looking-glass 0660 anna kvm -' > /etc/tmpfiles.d/looking-glass.conf": (
            lambda: Path("/etc/tmpfiles.d/looking-glass.conf").write_text("")
        ),
        "systemd-tmpfiles --create looking-glass.conf": (
            lambda: os.truncate(os.open("/dev/shm/looking-glass", os.O_CREAT | os.O_RDWR), 0)
        ),
        "virsh shutdown win": lambda: _type("virsh destroy win", 0),
    }
    asyncio.run(play("laptop", {"01:00.0": gpu.removeprefix("0000:")}, handlers))
    assert kept() == before
    assert _has_desktop(greeter)


def _make_images() -> None:
    Path("/vm").mkdir(exist_ok=True)
    for name in ("win.qcow2", "win11.iso", "virtio-win.iso"):
        Path("/vm", name).write_bytes(bytes(1 << 20))


def _restart_libvirtd() -> None:
    libvirtd.stop()
    libvirtd.start()


@pytest.mark.topology("sriov")
def test_a_host_makes_vgpus_and_is_as_before() -> None:
    gpusim.load(family="mdev")
    gpusim.enable()
    try:
        before = kept()
        asyncio.run(play("vgpu-host", {}, {}))
        assert kept() == before
    finally:
        gpusim.unload()


@pytest.mark.topology("workstation")
def test_a_pod_of_a_kata_node_gets_the_gpu_that_it_requests(topology: Topology) -> None:
    gpu = topology.addresses["gpu"]
    subprocess.run(["modprobe", "kvm_amd"], check=True)  # as each host of Kata has it
    _install_kata()
    Path("/etc/containerd").mkdir(exist_ok=True)
    Path("/etc/containerd/config.toml").write_text("version = 2\n")
    before = kept()
    asyncio.run(_as_node(gpu))
    assert kept() == before


def _install_kata() -> None:
    kata = Path("/opt/kata")
    defaults = kata / "share/defaults/kata-containers/runtime-rs/configuration.toml"
    shim = kata / "runtime-rs/bin/containerd-shim-kata-v2"
    for path, text in ((kata / "VERSION", "4.0.0\n"), (defaults, RS_BASE), (shim, "#!/bin/sh\n")):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    shim.chmod(0o755)


def _agent_command() -> list[str]:
    """What the unit of the tutorial starts."""
    unit = Path("/etc/systemd/system/vfiomgr-node.service").read_text()
    line = next(one for one in unit.splitlines() if one.startswith("ExecStart="))
    return [sys.executable, VFIOMGR, "node", "run", *shlex.split(line.partition(" node run")[2])]


def _requested() -> tuple[str, int]:
    """The resource that the pod of the tutorial requests, and how many devices of it."""
    pod = YAML(typ="safe", pure=True).load(Path("gpu.yaml"))
    limits = pod["spec"]["containers"][0]["resources"]["limits"]
    ((name, count),) = ((name, limits[name]) for name in limits if "/" in name)
    return name, int(count)


def _published() -> list[str]:
    """The kinds of CDI devices that the agent wrote."""
    return [json.loads(file.read_text())["kind"] for file in Path("/run/cdi").glob("*.json")]


async def _as_node(gpu: str) -> None:
    """Play the tutorial with a kubelet where the agent looks for it by default."""
    for directory in (_PLUGINS, _POD_RESOURCES.parent):
        directory.mkdir(parents=True)
    kubelet = Kubelet(_PLUGINS, dial=_SECONDS)
    kubelet.pod_resources = str(_POD_RESOURCES)
    await kubelet.start()
    agents: list[asyncio.subprocess.Process] = []

    async def start_agent() -> None:
        agents.append(await asyncio.create_subprocess_exec(*_agent_command()))
        await kubelet.until(lambda: kubelet.endpoints or agents[0].returncode, _SECONDS)

    async def apply() -> None:
        name, count = _requested()
        assert name in kubelet.endpoints, "nobody offers it"
        await kubelet.until_capacity(name, 1, 1)
        container = await kubelet.admit("default/gpu", name, count)
        assert [one.name for one in container.answer.cdi_devices] == [f"{name}={gpu}"]
        assert name in _published()

    async def stop_agent() -> None:
        agents[0].terminate()
        await agents[0].wait()

    def restart_containerd() -> None:
        subprocess.run(["containerd", "config", "dump"], check=True, capture_output=True)

    handlers = {
        "systemctl enable --now vfiomgr-node.service": start_agent,
        "kubectl apply -f class.yaml -f gpu.yaml": apply,
        "kubectl delete -f class.yaml -f gpu.yaml": kubelet.pods.clear,
        "systemctl disable --now vfiomgr-node.service": stop_agent,
        "systemctl restart containerd": restart_containerd,
    }
    try:
        await play("kata-node", {"02:00.0": gpu.removeprefix("0000:")}, handlers)
    finally:
        for agent in agents:
            if agent.returncode is None:
                agent.kill()
                await agent.wait()
        await kubelet.stop()
        shutil.rmtree(_PLUGINS.parent)
