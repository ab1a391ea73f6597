"""Scans of the fake kernel's trees: what a recorded host must not lose."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from tests.fakes.hosts import without_iommu, workstation
from vfiomgr.api import scan
from vfiomgr.host.tree import HostTree
from vfiomgr.model.path import HostPath, pci_device
from vfiomgr.model.pci import PciAddress

if TYPE_CHECKING:
    from pathlib import Path

UUID = "f715f63c-0d00-4007-9c5a-b07b0c6c05de"


def test_a_workstation(tmp_path: Path) -> None:
    host = scan(workstation(tmp_path))
    gpu = host.device(PciAddress.parse("0000:01:00.0"))
    assert (gpu.driver, gpu.iommu_group, gpu.numa_node) == ("nvidia", 10, None)
    assert gpu.bridge_path == "pci0000:00/0000:00:01.0"
    assert gpu.drm_nodes == ("/dev/dri/card1", "/dev/dri/renderD129")
    assert [str(d.address) for d in host.devices if d.is_boot_display] == ["0000:00:02.0"]
    disk = host.device(PciAddress.parse("10000:01:00.0"))
    assert disk.bridge_path.endswith("0000:00:0e.0/pci10000:00/10000:00:06.0")
    assert host.devices[-1] is disk
    assert {(use.kind, str(use.address)) for use in host.host_uses} == {
        ("mounted-disk", "0000:04:01.0"),
        ("default-route", "0000:04:00.0"),
    }


def test_virtual_functions_are_linked_both_ways_and_alive(tmp_path: Path) -> None:
    kernel = workstation(tmp_path)
    physical = PciAddress.parse("0000:05:00.0")
    kernel.write(kernel_path(kernel, physical, "sriov_numvfs"), "3")
    host = scan(kernel)
    functions = host.device(physical).virtual_functions
    assert len(functions) == 3
    for address in functions:
        virtual = host.device(address)
        assert virtual.physical_function == physical
        assert virtual.is_responsive  # though its vendor reads as ones


def test_a_device_that_fell_off_the_bus_is_seen(tmp_path: Path) -> None:
    kernel = workstation(tmp_path)
    kernel.fall_off_bus("0000:02:00.0")
    assert not scan(kernel).device(PciAddress.parse("0000:02:00.0")).is_responsive


def test_without_an_iommu_vgpus_make_no_iommu(tmp_path: Path) -> None:
    kernel = without_iommu(tmp_path)
    assert not scan(kernel).iommu.is_on
    other = workstation(tmp_path / "other")
    create = "/sys/devices/virtual/mbochs/mbochs/mdev_supported_types/mbochs-small/create"
    other.write(HostPath(create), UUID)
    (group,) = [g for g in scan(other).groups if UUID in g.members]
    assert not group.is_noiommu


def test_a_recording_without_the_class_of_parents_still_shows_them(tmp_path: Path) -> None:
    kernel = workstation(tmp_path)
    create = "/sys/devices/virtual/mbochs/mbochs/mdev_supported_types/mbochs-small/create"
    kernel.write(HostPath(create), UUID)
    shutil.rmtree(f"{kernel.root}/sys/class/mdev_bus")
    host = scan(HostTree(kernel.root))
    assert [parent.name for parent in host.vgpu_parents] == ["0000:06:00.0", "mbochs"]
    assert [vgpu.parent for vgpu in host.vgpus] == ["mbochs"]


def kernel_path(kernel: HostTree, address: PciAddress, name: str) -> HostPath:
    path = pci_device(address) / name
    assert kernel.exists(path)
    return path
