"""Disks and interfaces that the host uses where no table of its own shows it: refused, and why."""

from __future__ import annotations

import os
import subprocess
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.lab.command import vfiomgr

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.lab.topology import Topology

pytestmark = pytest.mark.topology("workstation")

_DEVICES = Path("/sys/bus/pci/devices")
_MOMENT = 60.0
"""Seconds for what a kernel under emulation does by itself."""
_PRIVATELY = ("unshare", "--mount", "--propagation", "private")
_FORMAT = ("mke2fs", "-q", "-F", "-t", "ext4")


def run(*command: str) -> None:
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)


def ip(*arguments: str) -> None:
    run("busybox", "ip", *arguments)


def await_true(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _MOMENT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def driver(address: str) -> str:
    return (_DEVICES / address / "driver").resolve().name


def refused(address: str) -> str:
    """What is said of a bind that is refused and changes nothing."""
    before = driver(address)
    said = vfiomgr("bind", address, status=4).stderr
    assert driver(address) == before
    return said


def is_taken_and_given_back(address: str) -> None:
    before = driver(address)
    vfiomgr("bind", address)
    assert driver(address) == "vfio-pci"
    vfiomgr("unbind", address)
    assert driver(address) == before


@contextmanager
def running(*command: str) -> Iterator[subprocess.Popen[str]]:
    """A program that says when it is ready and ends with its input."""
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process


@pytest.fixture
def address(topology: Topology) -> str:
    return topology.addresses["disk"]


@pytest.fixture
def node(address: str) -> str:
    """The disk's node, once udev is done with it."""
    await_true(lambda: any((_DEVICES / address).glob("nvme/nvme*/nvme*n1")))
    (disk,) = (_DEVICES / address).glob("nvme/nvme*/nvme*n1")
    run("udevadm", "settle")
    return f"/dev/{disk.name}"


def test_a_disk_mounted_in_another_namespace_is_refused_and_stays_whole(
    address: str, node: str, tmp_path: Path
) -> None:
    run(*_FORMAT, node)
    script = (
        f"mount {node} {tmp_path} && echo first >{tmp_path}/file && echo ready && read _;"
        f"echo second >>{tmp_path}/file && sync && umount {tmp_path}"
    )
    with running(*_PRIVATELY, "sh", "-c", script) as holder:
        said = refused(address)
        place = f"in the mount namespace of sh (PID {holder.pid})"
        assert f"has a disk that the host uses: {node} on {tmp_path} {place}" in said
        assert f"nsenter -t {holder.pid} -m umount {tmp_path}" in said
        holder.communicate("\n")
        assert holder.returncode == 0
    run("e2fsck", "-f", "-n", node)
    is_taken_and_given_back(address)
    await_true(Path(node).exists)
    run("mount", node, str(tmp_path))
    try:
        assert (tmp_path / "file").read_text() == "first\nsecond\n"
        assert f"{node} on {tmp_path}; " not in refused(address)
    finally:
        run("umount", str(tmp_path))


def test_a_mount_that_no_process_shows_is_refused(address: str, node: str, tmp_path: Path) -> None:
    """A namespace can be kept by a file alone, as snapd does."""
    run(*_FORMAT, node)
    run("mount", "-t", "tmpfs", "none", str(tmp_path))
    run("mount", "--make-private", str(tmp_path))
    pin, place = tmp_path / "namespace", tmp_path / "place"
    pin.touch()
    place.mkdir()
    run("unshare", f"--mount={pin}", "--propagation", "private", "mount", node, str(place))
    try:
        assert f"{node}, claimed by something without a visible mount" in refused(address)
    finally:
        run("umount", str(pin))
        run("umount", str(tmp_path))
    await_true(lambda: vfiomgr_takes(address))


def vfiomgr_takes(address: str) -> bool:
    return "claimed" not in vfiomgr("show", address).stdout


def opened_by(pid: int) -> list[str]:
    """The files that a process has open; it may close some meanwhile."""
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            found.append(os.readlink(link))
    return found


def test_the_disk_of_a_guest_is_refused_whatever_the_guest_calls_it(
    address: str, node: str, tmp_path: Path
) -> None:
    number = os.stat(node).st_rdev
    other = tmp_path / "storage"
    make = f"mknod {other} b {os.major(number)} {os.minor(number)}"
    machine = "-nodefaults -display none -machine q35 -accel tcg -m 32 -S"
    drive = f"-drive if=none,id=disk,format=raw,file={other} -device virtio-blk-pci,drive=disk"
    own = f"mount -t tmpfs none {tmp_path}"
    script = f"{own} && {make} && echo ready && exec qemu-system-x86_64 {machine} {drive}"
    with running(*_PRIVATELY, "sh", "-c", script) as guest:
        try:
            await_true(lambda: str(other) in opened_by(guest.pid))
            assert f"is in use by: qemu-system-x86 (PID {guest.pid})" in refused(address)
        finally:
            guest.kill()
    descriptor = os.open(node.replace("nvme", "ng", 1), os.O_RDONLY)
    try:
        assert f"(PID {os.getpid()}" in refused(address)
    finally:
        os.close(descriptor)
    is_taken_and_given_back(address)


@pytest.fixture
def nic(topology: Topology) -> Iterator[tuple[str, str]]:
    """The network adapter and its interface, which does nothing."""
    function = topology.addresses["nic"]
    await_true(lambda: any((_DEVICES / function).glob("net/*")))
    (interface,) = (_DEVICES / function).glob("net/*")
    yield function, interface.name
    ip("link", "set", interface.name, "down")


def test_an_interface_with_an_address_is_refused(nic: tuple[str, str]) -> None:
    function, interface = nic
    ip("link", "set", interface, "up")
    ip("address", "add", "192.0.2.1/24", "dev", interface)
    said = refused(function)
    assert f"in use by the host's network: interface {interface}: address 192.0.2.1/24" in said
    assert f"ip link set {interface} down" in said
    ip("address", "del", "192.0.2.1/24", "dev", interface)
    ip("route", "add", "198.51.100.0/24", "dev", interface, "table", "77")
    assert f"interface {interface}: route 198.51.100.0/24 in table 77" in refused(function)
    ip("link", "set", interface, "down")
    is_taken_and_given_back(function)


def test_an_interface_of_a_bridge_is_refused(nic: tuple[str, str]) -> None:
    function, interface = nic
    ip("link", "add", "br7", "type", "bridge")
    try:
        run("busybox", "brctl", "addif", "br7", interface)
        said = refused(function)
        assert f"interface {interface}: part of br7" in said
        assert f"ip link set {interface} nomaster" in said
    finally:
        ip("link", "delete", "br7")
    is_taken_and_given_back(function)


def test_an_interface_in_another_network_namespace_is_refused(nic: tuple[str, str]) -> None:
    function, interface = nic
    with running("unshare", "--net", "sh", "-c", "echo ready; read _") as pod:
        ip("link", "set", interface, "netns", str(pod.pid))
        said = refused(function)
        assert (
            f"its interface is {interface} in the network namespace of sh (PID {pod.pid})" in said
        )
        assert f"nsenter -t {pod.pid} -n ip link set {interface} netns 1" in said
        pod.communicate("\n")
    await_true(lambda: any((_DEVICES / function).glob("net/*")))
    is_taken_and_given_back(function)


def test_an_interface_below_that_of_a_container_is_refused(nic: tuple[str, str]) -> None:
    """No file of the host shows the macvlan once it is in the container."""
    function, interface = nic
    with running("unshare", "--net", "sh", "-c", "echo ready; read _") as pod:
        ip("link", "add", "link", interface, "name", "far0", "type", "macvlan")
        ip("link", "set", "far0", "netns", str(pod.pid))
        said = refused(function)
        assert f"below far0 in the network namespace of sh (PID {pod.pid})" in said
        assert f"nsenter -t {pod.pid} -n ip link delete far0" in said
        pod.communicate("\n")
    await_true(lambda: "far0" not in vfiomgr("show", function).stdout)
    is_taken_and_given_back(function)


def test_a_device_on_a_host_driver_without_reset_handlers_is_reset_only_on_vfio(
    topology: Topology,
) -> None:
    """e1000e has no reset_prepare: the kernel would reset the adapter under it."""
    nic = topology.addresses["nic"]
    said = vfiomgr("reset", nic, status=4).stderr
    assert "e1000e is not known to handle resets" in said
    log = subprocess.run(["dmesg"], check=True, capture_output=True, text=True).stdout
    assert f"e1000e {nic}: resetting" not in log
    vfiomgr("bind", nic)
    assert "was reset; its configuration space answers" in vfiomgr("reset", nic).stdout
    vfiomgr("unbind", nic)
    assert driver(nic) == "e1000e"


def test_a_disk_on_nvme_works_after_a_reset(topology: Topology) -> None:
    disk = topology.addresses["disk"]
    vfiomgr("reset", disk, "--method", "flr")
    assert driver(disk) == "nvme"
    (block,) = (_DEVICES / disk).glob("nvme/nvme*/nvme*n1")
    run("dd", f"if=/dev/{block.name}", "of=/dev/null", "bs=4096", "count=1", "iflag=direct")
