"""The nodes that VFIO has for single devices, on a real kernel with IOMMUFD."""

from __future__ import annotations

import os
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.lab import nested
from tests.lab.command import document, vfiomgr
from tests.lab.progress import Patience

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.lab.platforms import Platform
    from tests.lab.topology import Topology

pytestmark = [
    pytest.mark.topology("workstation"),
    pytest.mark.platforms("debian13-iommufd", "debian13-no-groups", "sid-iommufd", only=True),
]

OWNER, GROUP = 1234, 4321
IOMMU = "/dev/iommu"
_VFIO_PCI = Path("/sys/bus/pci/drivers/vfio-pci")
_KATA = ("--kata-runtime", "go", "--kata-version", "3.20")
_QEMU = ("qemu-system-x86_64", "-machine", "q35,accel=tcg", "-m", "64", "-nodefaults")
_OPENS = 60.0
"""Seconds of standing still of a QEMU that has not opened its device."""


@pytest.fixture
def gpu(topology: Topology) -> str:
    return topology.addresses["gpu"]


@pytest.fixture
def bound(gpu: str) -> Iterator[str]:
    """The GPU, for an unprivileged user."""
    vfiomgr("bind", gpu, "--owner", f"{OWNER}:{GROUP}")
    yield gpu
    vfiomgr("unbind", gpu)


def group_of(address: str) -> str:
    return f"/dev/vfio/{Path('/sys/bus/pci/devices', address, 'iommu_group').resolve().name}"


def cdev_of(address: str) -> str:
    (entry,) = Path("/sys/bus/pci/devices", address, "vfio-dev").iterdir()
    return f"/dev/vfio/devices/{entry.name}"


def nodes_of(address: str, platform: Platform) -> list[str]:
    """The nodes that this kernel has for a function."""
    return [group_of(address), cdev_of(address)] if platform.has_groups else [cdev_of(address)]


def access(node: str) -> tuple[int, int, int]:
    status = os.stat(node)
    return status.st_uid, status.st_gid, status.st_mode & 0o777


def test_a_bound_function_has_a_node_of_its_own_with_its_owner(
    bound: str, platform: Platform
) -> None:
    nodes = nodes_of(bound, platform)
    assert {access(node) for node in nodes} == {(OWNER, GROUP, 0o660)}
    assert os.path.exists(group_of(bound)) is platform.has_groups
    label = "VFIO nodes" if platform.has_groups else "VFIO node"
    assert f"yes, {label}: {', '.join(nodes)}\n" in vfiomgr("show", bound).stdout
    (listed,) = (one for one in document("list")["items"] if one["address"] == bound)
    assert (listed["vfio_cdev"], f"/dev/vfio/devices/{listed['vfio_device']}") == (True, nodes[-1])
    groups = {m["address"]: g for g in document("groups")["items"] for m in g["members"]}
    assert groups[bound]["node"] == (nodes[0] if platform.has_groups else None)


def test_the_nodes_of_a_function_go_with_its_driver(gpu: str) -> None:
    vfiomgr("bind", gpu)
    cdev = cdev_of(gpu)
    vfiomgr("unbind", gpu)
    assert not os.path.exists(cdev)


def test_a_plan_names_the_nodes_that_this_kernel_has(gpu: str, platform: Platform) -> None:
    subprocess.run(["modprobe", "vfio"], check=True)
    planned = vfiomgr("bind", gpu, "--dry-run", "--owner", f"{OWNER}:{GROUP}").stdout
    assert (group_of(gpu) in planned) is platform.has_groups
    nodes = [group_of(gpu)] if platform.has_groups else []
    nodes.append(f"/dev/vfio/devices/$(ls /sys/bus/pci/devices/{gpu}/vfio-dev)")
    assert f"chown {OWNER}:{GROUP} {' '.join(nodes)}\n" in planned


def test_udev_gives_a_persisted_function_its_owner(gpu: str, platform: Platform) -> None:
    vfiomgr("bind", gpu, "--persist", "--owner", f"{OWNER}:{GROUP}")
    try:
        before = cdev_of(gpu)
        (_VFIO_PCI / "unbind").write_text(gpu)
        assert not os.path.exists(before)
        (_VFIO_PCI / "bind").write_text(gpu)
        subprocess.run(["udevadm", "settle"], check=True)
        assert {access(node) for node in nodes_of(gpu, platform)} == {(OWNER, GROUP, 0o660)}
    finally:
        vfiomgr("unbind", gpu, "--forget")


def test_cdi_and_kata_name_the_nodes_that_exist(
    bound: str, topology: Topology, platform: Platform
) -> None:
    def generated(*more: str) -> list[str]:
        (device,) = document("cdi", "generate", bound, *more)["devices"]
        return [node["path"] for node in device["containerEdits"]["deviceNodes"]]

    def run(*more: str) -> list[str]:
        words = vfiomgr("kata", "run-command", bound, *_KATA, *more).stdout.split()
        return [words[at + 1] for at, word in enumerate(words) if word == "--device"]

    cdevs = [cdev_of(bound), cdev_of(topology.addresses["gpu_audio"])]
    usual = [group_of(bound)] if platform.has_groups else cdevs
    assert (generated(), run()) == (usual, usual)
    assert (generated("--node", "cdev"), run("--node", "cdev")) == (cdevs, cdevs)


def opened(process: int) -> set[str]:
    """The nodes of VFIO and IOMMUFD that a process has open, as lsof lists them."""
    links = Path(f"/proc/{process}/fd").iterdir()
    return {name for link in links if (name := os.readlink(link)).startswith(("/dev/vfio", IOMMU))}


@contextmanager
def guest(*arguments: str, descriptors: Sequence[int] = ()) -> Iterator[subprocess.Popen[bytes]]:
    """A guest of this guest, halted at its first instruction, with its devices."""
    command = [*_QEMU, "-display", "none", "-S", "-name", "guest=inner", *arguments]
    process = subprocess.Popen(command, pass_fds=descriptors, stderr=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def await_opened(process: subprocess.Popen[bytes], expected: set[str]) -> None:
    patience = Patience(_OPENS, process.pid)
    while opened(process.pid) != expected:
        assert process.poll() is None, process.communicate()[1]
        assert not patience.is_over, opened(process.pid)
        time.sleep(0.2)


def test_a_guest_with_the_cdev_of_a_function_is_recognised(bound: str) -> None:
    used = {IOMMU, cdev_of(bound)}
    with guest("-object", "iommufd,id=i", "-device", f"vfio-pci,host={bound},iommufd=i") as process:
        await_opened(process, used)
        user = f"guest inner (qemu-system-x86, PID {process.pid})"
        assert user in vfiomgr("show", bound).stdout
        assert user in vfiomgr("unbind", bound, status=4).stderr
        assert os.path.exists(cdev_of(bound))
        assert opened(process.pid) == used
        (listed,) = (one for one in document("list")["items"] if one["address"] == bound)
        assert listed["state"] == "in-use"


def test_a_forced_unbind_names_the_guest_whose_cdev_lost_its_name(bound: str) -> None:
    node = cdev_of(bound)
    with guest("-object", "iommufd,id=i", "-device", f"vfio-pci,host={bound},iommufd=i") as process:
        await_opened(process, {IOMMU, node})
        forced = vfiomgr("unbind", bound, "--allow", "in-use", "--yes", "--timeout", "3", status=5)
        assert f"in use by guest inner (qemu-system-x86, PID {process.pid})" in forced.stderr
        assert opened(process.pid) == {IOMMU, f"{node} (deleted)"}
    assert "undone: unbind" in vfiomgr("recover").stdout


@pytest.mark.platforms("debian13-iommufd", "debian13-no-groups", only=True)
def test_a_guest_that_receives_open_nodes_is_recognised(bound: str) -> None:
    """QEMU itself has no access to the nodes; sid's 11.1.3 crashes with these arguments."""
    iommu, device = os.open(IOMMU, os.O_RDWR), os.open(cdev_of(bound), os.O_RDWR)
    received = ("-object", f"iommufd,id=i,fd={iommu}", "-device", f"vfio-pci,fd={device},iommufd=i")
    with guest(*received, descriptors=(iommu, device)) as process:
        os.close(iommu)
        os.close(device)
        await_opened(process, {IOMMU, cdev_of(bound)})
        refused = vfiomgr("unbind", bound, status=4).stderr
        assert f"guest inner (qemu-system-x86, PID {process.pid})" in refused


def test_libvirt_gets_iommufd_where_there_are_no_groups(bound: str, platform: Platform) -> None:
    written = vfiomgr("libvirt", "hostdev", bound, "--libvirt-version", "12.8").stdout
    assert written.count("iommufd='yes'") == (0 if platform.has_groups else 2)
    installed = vfiomgr("libvirt", "hostdev", bound, status=0 if platform.has_groups else 4)
    assert ("<driver iommufd> (libvirt 12.1.0 or later)" in installed.stderr) is not (
        platform.has_groups
    )


def test_a_function_that_is_not_bound_yet_gets_iommufd_there_too(
    gpu: str, platform: Platform
) -> None:
    subprocess.run(["modprobe", "vfio"], check=True)
    written = vfiomgr("libvirt", "hostdev", gpu, "--libvirt-version", "12.8").stdout
    assert written.count("iommufd='yes'") == (0 if platform.has_groups else 2)


@pytest.mark.platforms("sid-iommufd", only=True)
@pytest.mark.usefixtures("libvirtd")
@pytest.mark.parametrize(
    ("option", "parts"), [("--iommufd", ""), ("--no-iommufd", "<iommufd enabled='yes'/>")]
)
def test_a_guest_of_libvirt_with_iommufd_is_recognised(
    bound: str, topology: Topology, option: str, parts: str
) -> None:
    written = vfiomgr("libvirt", "hostdev", bound, option).stdout
    assert written.count("iommufd=") == (0 if parts else 2)
    assert written.count(" iommufd='yes'/>") == (0 if parts else 2)
    file = str(nested.write_domain(written, parts))
    created = nested.call("virsh", "create", file, "--validate")
    assert created.returncode == 0, created.stderr
    try:
        cdevs = {cdev_of(bound), cdev_of(topology.addresses["gpu_audio"])}
        assert opened(nested.pid()) == {IOMMU, *cdevs}
        user = f"guest {nested.NAME} (qemu-system-x86, PID {nested.pid()})"
        assert user in vfiomgr("show", bound).stdout
        assert user in vfiomgr("unbind", bound, status=4).stderr
    finally:
        nested.call("virsh", "destroy", nested.NAME)


@pytest.mark.platforms("sid-iommufd", only=True)
@pytest.mark.usefixtures("libvirtd")
def test_libvirt_starts_no_guest_whose_fdgroup_nobody_passed(bound: str) -> None:
    """`check domain` reports it as iommufd-fdgroup; only a program can pass the descriptor."""
    written = vfiomgr("libvirt", "hostdev", bound, "--no-iommufd").stdout
    file = nested.write_domain(written, "<iommufd enabled='yes' fdgroup='iommu'/>")
    assert nested.call("virsh", "define", str(file), "--validate").returncode == 0
    try:
        started = nested.call("virsh", "start", nested.NAME)
        assert started.returncode != 0
        words = "file descriptor group 'iommu' was not associated with the domain"
        assert words in started.stderr, started.stderr
    finally:
        nested.call("virsh", "destroy", nested.NAME)
        nested.call("virsh", "undefine", nested.NAME)
