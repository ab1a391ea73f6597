"""`vfiomgr libvirt domain`, defined and started by a real libvirtd: devices are where it says."""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import subprocess
import time
import xml.etree.ElementTree as ET
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Self

import libvirt
import pytest

from tests.lab import gpusim, kernel, nested
from tests.lab.command import document, vfiomgr
from tests.lab.progress import Patience

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.lab.topology import Topology

pytestmark = pytest.mark.usefixtures("libvirtd")

UUID = "f715f63c-0d00-4007-9c5a-b07b0c6c05de"
NAME = nested.NAME
EMULATED = ("--virt-type", "qemu", "--firmware", "bios", "--graphics", "none")
SMALL = ("--memory", "128M", "--vcpus", "2", *EMULATED)
_STILL, _BOOT = 120.0, 1200.0
"""Seconds in which a guest may stand still, and that it may compute until its shell is there: it is
a machine that is emulated by one that is emulated."""
_QUICKLY = (
    "console=ttyS0 quiet tsc=unstable no_timer_check mitigations=off nokaslr init_on_alloc=0 "
    "clearcpuid=297,580 audit=0 apparmor=0 selinux=0 rcupdate.rcu_expedited=1 nowatchdog "
    "random.trust_cpu=on cryptomgr.notests 8250.nr_uarts=1"
)
"""What a kernel in an emulator in an emulator can do without; 297 and 580 are erms and fsrm, the
quick string instructions, which an emulator carries out byte by byte."""
_FUNCTION = re.compile(r"Bus +(\d+), device +(\d+), function (\d+):\s+.*?PCI device (\w{4}:\w{4})")
_INIT = """\
#!/bin/busybox sh
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t sysfs sysfs /sys
/bin/busybox --install -s /bin
exec /bin/sh -i
"""


@contextmanager
def started(*options: str, is_paused: bool = False) -> Iterator[ET.Element]:
    """A domain of these options, defined and started; gone after."""
    made = vfiomgr("libvirt", "domain", NAME, *options).stdout
    file = Path("/run/lab/domain.xml")
    file.write_text(made)
    try:
        for command in (("define", str(file), "--validate"), ("start", NAME)):
            words = (*command, "--paused") if is_paused and command[0] == "start" else command
            done = nested.call("virsh", *words)
            assert done.returncode == 0, done.stderr + made
        yield ET.fromstring(made)
    finally:
        nested.call("virsh", "destroy", NAME)
        nested.call("virsh", "undefine", NAME)


def buses(domain: ET.Element) -> dict[int, int]:
    """The number that firmware gives to the bus behind each controller.

    It counts the ports of a root in their order, from 1, or from the number of an expander.
    """
    numbers: dict[int, int] = {}
    following: dict[int, int] = {0: 0}
    for controller in domain.iterfind("devices/controller[@type='pci']"):
        index = int(controller.get("index", ""))
        target, address = controller.find("target"), controller.find("address")
        if controller.get("model") == "pcie-expander-bus":
            assert target is not None
            following[index] = int(target.get("busNr", ""))
        elif controller.get("model") == "pcie-root-port":
            parent = 0 if address is None else int(address.get("bus", ""), 16)
            following[parent] += 1
            numbers[index] = following[parent]
    return numbers


def expected(domain: ET.Element) -> set[tuple[int, int, int]]:
    """Where the XML says that the devices of the host are, by numbers of the guest."""
    numbers = buses(domain)
    return {
        (
            numbers[int(address.get("bus", ""), 16)],
            int(address.get("slot", ""), 16),
            int(address.get("function", ""), 16),
        )
        for address in domain.iterfind("devices/hostdev/address")
    }


def functions() -> dict[tuple[int, int, int], str]:
    """What QEMU's monitor lists now, with identifiers."""
    listing = nested.call(*nested.MONITOR).stdout.replace("\r", "")
    found = _FUNCTION.findall(listing)
    return {(int(bus), int(slot), int(function)): ids for bus, slot, function, ids in found}


def await_places(domain: ET.Element, identifiers: set[str]) -> None:
    """The firmware has numbered the buses, and the devices are in their places."""
    places = expected(domain)
    patience = Patience(_STILL, nested.pid())
    while {functions().get(place) for place in places} != identifiers:
        assert not patience.is_over, (places, nested.call(*nested.MONITOR).stdout)
        time.sleep(0.5)


@pytest.fixture
def bound(topology: Topology) -> Iterator[Topology]:
    """The GPU on vfio-pci, and back after."""
    vfiomgr("bind", topology.addresses["gpu"])
    yield topology
    vfiomgr("unbind", topology.addresses["gpu"])


@pytest.mark.thorough
@pytest.mark.topology("workstation")
def test_a_gpu_with_audio_is_one_device_of_a_booted_guest(bound: Topology, tmp_path: Path) -> None:
    """A kernel of the guest sees both functions in the slot that the domain says."""
    boot = ("--kernel", str(kernel.provide().image), "--initrd", str(initramfs(tmp_path)))
    arguments = ("--kernel-arguments", _QUICKLY)
    device = ("--device", bound.addresses["gpu"])
    with started(*SMALL, "--vcpus", "1", *boot, *arguments, *device, is_paused=True) as domain:
        places = sorted(expected(domain))
        assert [function for _, _, function in places] == [0, 1]
        with Console() as console:
            assert nested.call("virsh", "resume", NAME).returncode == 0
            console.await_text("# ")
            console.type("cd /sys/bus/pci/devices; for d in *; do echo $d $(cat $d/class); done")
            console.type("echo fin''ished")
            listed = console.await_text("finished")
        for (bus, slot, function), code in zip(places, ("0x038000", "0x040300"), strict=True):
            assert f"0000:{bus:02x}:{slot:02x}.{function} {code}" in listed
        await_places(domain, {"1234:1111", "8086:2668"})


def initramfs(directory: Path) -> Path:
    """A busybox whose first process is a shell."""
    root = directory / "root"
    for name in ("bin", "proc", "sys", "dev"):
        (root / name).mkdir(parents=True)
    shutil.copy("/bin/busybox", root / "bin")
    (root / "init").write_text(_INIT)
    (root / "init").chmod(0o755)
    names = "\n".join(str(path.relative_to(root)) for path in sorted(root.rglob("*")))
    archive = Path("/run/lab/guest.cpio")
    with archive.open("wb") as file:
        subprocess.run(
            ["cpio", "--create", "--format=newc", "--quiet"],
            cwd=root,
            input=names.encode(),
            stdout=file,
            check=True,
        )
    return archive


class Console:
    """The guest's serial line."""

    def __enter__(self) -> Self:
        """Open it before there is anything to read: QEMU keeps nothing for later."""
        place = nested.call("virsh", "ttyconsole", NAME).stdout.strip()
        self._descriptor = os.open(place, os.O_RDWR | os.O_NOCTTY)
        self._text = ""
        subprocess.run(["stty", "-F", place, "raw", "-echo"], check=True)
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        os.close(self._descriptor)

    def type(self, line: str) -> None:
        """Type a line."""
        os.write(self._descriptor, f"{line}\n".encode())

    def await_text(self, text: str) -> str:
        """All that came until the text did."""
        patience = Patience(_STILL, nested.pid(), most=_BOOT)
        while text not in self._text:
            assert not patience.is_over, self._text
            if select.select([self._descriptor], [], [], 1)[0]:
                patience.restart()
                self._text += os.read(self._descriptor, 4096).decode(errors="replace")
        said, self._text = self._text, ""
        return said


@pytest.mark.topology("sriov")
def test_a_virtual_function(topology: Topology) -> None:
    physical = topology.addresses["nvme"]
    vfiomgr("sriov", "set", physical, "2")
    (function, *_) = document("show", physical)["virtual_functions"]
    try:
        vfiomgr("bind", function)
        with started(*SMALL, "--device", function) as domain:
            await_places(domain, {"1b36:0010"})
    finally:
        vfiomgr("unbind", function)
        vfiomgr("sriov", "set", physical, "0")


@pytest.mark.thorough
@pytest.mark.topology("workstation")
def test_a_vgpu_with_ramfb() -> None:
    kind = document("vgpu", "list", "--types", "--parent", "mdpy")["items"][0]["id"]
    vfiomgr("vgpu", "create", "--parent", "mdpy", "--type", kind, UUID)
    try:
        shown = (*SMALL, "--graphics", "vnc", "--device", f"{UUID},display,ramfb")
        with started(*shown) as domain:
            await_places(domain, {"1b36:000f"})
            running = (
                Path(f"/proc/{nested.pid()}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            )
            device = next(
                json.loads(found)
                for found in re.findall(r"-device (\{[^}]*\})", running)
                if "vfio-pci" in found
            )
            assert device["driver"] == "vfio-pci-nohotplug"
            assert (device["display"], device["ramfb"]) == ("on", True)
    finally:
        vfiomgr("vgpu", "remove", UUID)


@pytest.mark.topology("sriov")
def test_a_vgpu_of_the_vendors_driver_waits_for_a_libvirt_that_knows_it(libvirtd: str) -> None:
    with libvirt.open(libvirtd) as connection:
        number = connection.getLibVersion()  # 9000000 for 9.0.0
    running = f"{number // 1_000_000}.{number // 1000 % 1000}.{number % 1000}"
    is_old = number < 9_007_000
    gpusim.load(family="vendor")
    function, *_ = gpusim.enable(1)
    try:
        vfiomgr("vgpu", "create", "--type", "L40S-2Q", "--parent", function)
        answer = vfiomgr(
            "libvirt", "domain", NAME, *SMALL, "--device", function, status=4 if is_old else 0
        )
        assert (f"(libvirt 9.7.0 or later); this is {running}" in answer.stderr) == is_old
        older = ("--libvirt-version", "9.6", "--device", function)
        refused = vfiomgr("libvirt", "domain", NAME, *SMALL, *older, status=4).stderr
        assert "(libvirt 9.7.0 or later); this is 9.6.0" in refused
        newer = ("--libvirt-version", "9.7", "--device", function)
        made = vfiomgr("libvirt", "domain", NAME, *SMALL, *newer).stdout
        assert "<hostdev mode='subsystem' type='pci' managed='no'>" in made
        managed = ("--libvirt-version", "9.7", "--device", f"{function},managed")
        told = vfiomgr("libvirt", "domain", NAME, *SMALL, *managed, status=4).stderr
        assert "which libvirt must not unbind" in told
        vfiomgr("vgpu", "remove", function)
    finally:
        gpusim.unload()


@pytest.mark.thorough
@pytest.mark.topology("mixed")
def test_two_gpus_keep_their_root_complexes_and_nodes(topology: Topology) -> None:
    names = [topology.addresses[name] for name in ("gpu", "twin")]
    for name in ("gpu", "gpu_audio"):
        # QEMU says nothing of the nodes of its first root complex.
        Path("/sys/bus/pci/devices", topology.addresses[name], "numa_node").write_text("0")
    vfiomgr("bind", *names)
    try:
        devices = [word for name in names for word in ("--device", name)]
        with started(*SMALL, *devices) as domain:
            expanders = domain.findall("devices/controller[@model='pcie-expander-bus']")
            nodes = [expander.findtext("target/node") for expander in expanders]
            assert nodes == ["0", "1"]
            await_places(domain, {"1234:1111", "8086:2668"})
            roots = {bus for bus, _, _ in expected(domain)}
            assert len(roots) == 2
            maps = Path(f"/proc/{nested.pid()}/numa_maps").read_text()
            assert "bind:0" in maps
            assert "bind:1" in maps
            pins = {
                Path(task, "comm").read_text().strip(): affinity(task)
                for task in Path(f"/proc/{nested.pid()}/task").iterdir()
            }
            assert pins["CPU 0/TCG"] == "0"
            assert pins["CPU 1/TCG"] == "1"
    finally:
        vfiomgr("unbind", *names)


def affinity(task: Path) -> str:
    """The CPUs that a thread may run on."""
    status = (task / "status").read_text()
    return status.partition("Cpus_allowed_list:")[2].splitlines()[0].strip()
