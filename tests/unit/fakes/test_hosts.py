"""The ready-made hosts, as vfiomgr's own scan reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.fakes.hosts import without_iommu
from tests.unit.fakes.deeds import NETWORK_ADAPTER, attribute
from vfiomgr.pci.model import PciAddress
from vfiomgr.snapshot.scan import scan

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel


def test_the_workstation_is_read_as_it_was_built(kernel: FakeKernel) -> None:
    host = scan(kernel, kernel)
    devices = {str(device.address): device for device in host.devices}
    assert [a for a, device in devices.items() if device.is_boot_display] == ["0000:00:02.0"]
    assert devices["0000:01:00.0"].driver == "nvidia"
    assert devices["0000:01:00.0"].nodes[:2] == ("/dev/dri/card1", "/dev/dri/renderD129")
    assert devices["0000:04:02.0"].driver_module == "xhci_pci"
    assert devices["0000:05:00.0"].sriov_totalvfs == 4
    assert devices["10000:01:00.0"].iommu_group == 13
    assert devices["0000:03:00.0"].is_bridge
    uses = {(use.kind, str(use.address)) for use in host.users.host_uses or ()}
    assert {("mounted-disk", "0000:04:01.0"), ("default-route", "0000:04:00.0")} <= uses
    assert [parent.name for parent in host.vgpus.parents] == ["0000:06:00.0", "mbochs"]
    assert host.iommu.is_on


def test_virtual_functions_are_read(kernel: FakeKernel) -> None:
    kernel.write(attribute(NETWORK_ADAPTER, "sriov_numvfs"), "2")
    host = scan(kernel, kernel)
    parent = next(d for d in host.devices if str(d.address) == NETWORK_ADAPTER)
    assert parent.virtual_functions == (
        PciAddress.parse("0000:05:10.0"),
        PciAddress.parse("0000:05:10.4"),
    )


def test_without_iommu_there_are_no_groups(tmp_path: Path) -> None:
    kernel = without_iommu(tmp_path)
    host = scan(kernel, kernel)
    assert not host.iommu.is_on
    assert host.groups == ()
    assert {device.iommu_group for device in host.devices} == {None}
