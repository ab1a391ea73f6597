"""An SMMUv3 of ARM on a real kernel, whose functions get their groups with their drivers."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.lab.command import document, vfiomgr
from vfiomgr.pci.iommu import HARMLESS_DRIVERS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.lab.topology import Topology

pytestmark = [
    pytest.mark.topology("plain"),
    pytest.mark.platforms("debian13-arm64", only=True),
]

OWNER, GROUP = 1234, 4321
_DEVICES = Path("/sys/bus/pci/devices")
_GROUPS = Path("/sys/kernel/iommu_groups")
_VFIO_PCI = Path("/sys/bus/pci/drivers/vfio-pci")


@pytest.fixture
def nic(topology: Topology) -> str:
    return topology.addresses["nic"]


@pytest.fixture
def lone(topology: Topology) -> Iterator[str]:
    """A function that never had a driver; taken off the bus after, since it keeps its group."""
    address = topology.addresses["lone"]
    assert (driver_of(address), group_of(address)) == (None, None)
    yield address
    vfiomgr("unbind", address, "--forget")
    (_DEVICES / address / "remove").write_text("1")
    Path("/sys/bus/pci/rescan").write_text("1")


def driver_of(address: str) -> str | None:
    link = _DEVICES / address / "driver"
    return link.readlink().name if link.is_symlink() else None


def group_of(address: str) -> int | None:
    link = _DEVICES / address / "iommu_group"
    return int(link.readlink().name) if link.is_symlink() else None


def members(group: int) -> set[str]:
    return {entry.name for entry in (_GROUPS / str(group) / "devices").iterdir()}


def access(group: int) -> tuple[int, int, int]:
    status = Path("/dev/vfio", str(group)).stat()
    return status.st_uid, status.st_gid, status.st_mode & 0o777


def test_the_smmu_is_the_iommu() -> None:
    (unit,) = (entry.name for entry in Path("/sys/class/iommu").iterdir())
    assert unit.startswith("smmu3.")
    found = {one["id"]: one for one in document("check")["items"]}
    iommu = found["iommu"]
    assert iommu["severity"] == "ok"
    assert f"/sys/class/iommu: {unit}" in iommu["evidence"]
    assert not [one for one in found.values() if one["severity"] == "blocker"]


def test_groups_are_those_of_the_kernel(topology: Topology, nic: str) -> None:
    numbers = {int(entry.name) for entry in _GROUPS.iterdir()}
    listed = {g["number"]: g for g in document("groups", "--all")["items"]}
    assert listed.keys() == numbers
    for number, group in listed.items():
        assert {member["address"] for member in group["members"]} == members(number)
    for one in document("list", "--all")["items"]:
        assert one["iommu_group"] == group_of(one["address"])
    port = topology.addresses["gpu"], topology.addresses["gpu_audio"]
    assert group_of(port[0]) == group_of(port[1]) != group_of(nic)
    assert f"IOMMU group      {group_of(nic)}\n" in vfiomgr("show", nic).stdout


def test_a_root_bus_is_one_also_below_a_device_tree(topology: Topology) -> None:
    place = (_DEVICES / topology.addresses["console"]).resolve()
    assert place.parts[3] == "platform"
    assert "bus: a root bus cannot be reset" in vfiomgr("show", place.name).stdout


def test_a_device_goes_to_vfio_pci_with_its_node_and_back(nic: str) -> None:
    number = group_of(nic)
    assert number is not None
    assert not Path("/dev/vfio", str(number)).exists()
    told = vfiomgr("bind", nic, "--owner", f"{OWNER}:{GROUP}").stdout
    try:
        assert f"{nic} is on vfio-pci, VFIO node: /dev/vfio/{number}\n" in told
        assert driver_of(nic) == "vfio-pci"
        assert access(number) == (OWNER, GROUP, 0o660)
        (bound,) = (g for g in document("groups")["items"] if g["number"] == number)
        assert bound["is_viable"]
    finally:
        vfiomgr("unbind", nic)
    assert driver_of(nic) == "e1000e"
    assert not Path("/dev/vfio", str(number)).exists()


def test_udev_gives_a_persisted_device_its_owner(nic: str) -> None:
    number = group_of(nic)
    assert number is not None
    vfiomgr("bind", nic, "--persist", "--owner", f"{OWNER}:{GROUP}")
    try:
        (_VFIO_PCI / "unbind").write_text(nic)
        (_VFIO_PCI / "bind").write_text(nic)
        subprocess.run(["udevadm", "settle"], check=True)
        assert access(number) == (OWNER, GROUP, 0o660)
    finally:
        vfiomgr("unbind", nic, "--forget")
    assert driver_of(nic) == "e1000e"


def test_a_function_gets_its_group_with_its_driver(lone: str) -> None:
    planned = vfiomgr("bind", lone, "--dry-run")
    late = f"not checked: the IOMMU group of {lone}: this kernel assigns it to bound functions"
    assert late in planned.stderr
    assert f"{lone}: wait for its VFIO node" in planned.stdout
    vfiomgr("bind", lone, "--owner", f"{OWNER}:{GROUP}")
    number = group_of(lone)
    assert number is not None
    assert access(number) == (OWNER, GROUP, 0o660)
    assert {driver_of(name) for name in members(number)} <= {"vfio-pci", *HARMLESS_DRIVERS}
    assert f"yes, VFIO node: /dev/vfio/{number}\n" in vfiomgr("show", lone).stdout
    vfiomgr("unbind", lone)
    assert (driver_of(lone), group_of(lone)) == (None, number)
    again = vfiomgr("bind", lone, "--dry-run")
    assert "not checked" not in again.stderr
    assert f"{lone}: wait for /dev/vfio/{number}" in again.stdout


def test_a_late_group_with_a_member_on_a_host_driver_is_left_again(topology: Topology) -> None:
    """Root ports of one slot without ACS have one group, with all that is behind them."""
    joining, neighbour = topology.addresses["joining"], topology.addresses["neighbour"]
    number = group_of(neighbour)
    assert (driver_of(joining), group_of(joining)) == (None, None)
    failed = vfiomgr("bind", joining, status=1).stderr
    found = f"IOMMU group {number}, which the kernel assigned to {joining}, also holds {neighbour}"
    assert f"{found} on e1000e; everything is as it was before\n" in failed
    assert (driver_of(joining), group_of(joining)) == (None, number)
    again = vfiomgr("bind", joining, status=4).stderr
    assert f"IOMMU group {number} also holds {neighbour}" in again
    vfiomgr("bind", joining, "--with-group")
    assert (driver_of(joining), driver_of(neighbour)) == ("vfio-pci", "vfio-pci")
    vfiomgr("unbind", joining, "--with-group")
    assert (driver_of(joining), driver_of(neighbour)) == (None, "e1000e")


def test_functions_that_share_a_stream_have_no_group(topology: Topology) -> None:
    """A bridge to PCI gives all of them its own ID, and the SMMU knows one device for each."""
    first, *others = (topology.addresses[name] for name in ("peer", "peer2", "edu"))
    assert group_of(first) == group_of(topology.addresses["bridge"])
    usb, edu = others
    assert (driver_of(usb), group_of(usb)) == ("ohci-pci", None)
    assert f"{usb} " in vfiomgr("bind", usb, status=4).stderr
    refused = vfiomgr("bind", edu, status=1).stderr
    assert "the driver rejects it" in refused
    assert "everything is as it was before" in refused
    assert (driver_of(edu), group_of(edu)) == (None, None)
