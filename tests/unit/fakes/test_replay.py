"""A recording, here of the fake workstation, comes to life with the same facts."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from tests import api
from tests.fakes.hosts import without_iommu, workstation
from tests.fakes.replay import replay
from vfiomgr.errors import Refusal
from vfiomgr.host.tree import HostTree
from vfiomgr.passthrough.steps import Bind, Unbind
from vfiomgr.pci.model import PciAddress, pci_device

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel
    from vfiomgr.pci.model import PciDevice

GPU, NIC = PciAddress.parse("0000:01:00.0"), PciAddress.parse("0000:05:00.0")


def recording_of(kernel: FakeKernel, where: Path) -> HostTree:
    """Its /sys alone, as recordings are."""
    shutil.copytree(f"{kernel.root}/sys", where / "sys", symlinks=True)
    return HostTree(where)


def essence(device: PciDevice) -> tuple[object, ...]:
    identity, driver = device.identity, device.driver
    return (identity, driver, device.physical_function, device.is_boot_display, device.is_bridge)


def test_all_functions_come_back_on_their_drivers_with_their_virtual_ones(tmp_path: Path) -> None:
    original = workstation(tmp_path / "original")
    original.write(pci_device(NIC) / "sriov_numvfs", "3")
    recording = recording_of(original, tmp_path / "recording")
    first = [essence(device) for device in api.scan(recording).devices]
    again = [essence(device) for device in api.scan(replay(recording, tmp_path / "new")).devices]
    assert again == first
    assert len(first) > 20


def test_a_replayed_host_reacts(tmp_path: Path) -> None:
    recording = recording_of(workstation(tmp_path / "original"), tmp_path / "recording")
    kernel = replay(recording, tmp_path / "new")
    before = kernel.state(modules=False)
    api.apply(Bind((GPU,)), tree=kernel)
    assert kernel.driver_of(str(GPU)) == "vfio-pci"
    api.apply(Unbind((GPU,)), tree=kernel)
    assert kernel.state(modules=False) == before


def test_a_replayed_host_without_an_iommu_has_none(tmp_path: Path) -> None:
    recording = recording_of(without_iommu(tmp_path / "original"), tmp_path / "recording")
    kernel = replay(recording, tmp_path / "new")
    with pytest.raises(Refusal, match="the IOMMU is off"):
        api.apply(Bind((GPU,)), tree=kernel)
