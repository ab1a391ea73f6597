"""A recorded host on the fake kernel: what is recorded reacts as if it were running.

    kernel = replay(HostTree("recording"), tmp_path)

Functions, groups, drivers and virtual functions come from a scan of the recording, the latter with
groups of new numbers. A driver knows the identifiers of the functions that it has, and vfio-pci is
there to be loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests import api
from tests.fakes.kernel import FakeKernel
from vfiomgr.pci.iommu import HARMLESS_DRIVERS
from vfiomgr.pci.model import is_address, pci_device

if TYPE_CHECKING:
    from pathlib import Path

    from vfiomgr.host.tree import HostTree
    from vfiomgr.pci.model import PciAddress, PciDevice
    from vfiomgr.snapshot.model import HostSnapshot


def replay(recording: HostTree, tmp_path: Path) -> FakeKernel:
    """Build a kernel that has the functions of a recording, on the drivers that had them."""
    host = api.scan(recording)
    kernel = FakeKernel(tmp_path / "host", has_iommu=host.iommu.is_on)
    _add_drivers(kernel, host)
    for device in _bridges_first(host):
        _add_function(kernel, host, device)
    return kernel


def _add_drivers(kernel: FakeKernel, host: HostSnapshot) -> None:
    ids: dict[str, set[tuple[str, str]]] = {}
    modules: dict[str, str | None] = {}
    for device in host.devices:
        if device.driver is not None:
            ids.setdefault(device.driver, set()).add((device.vendor_id, device.device_id))
            modules[device.driver] = device.driver_module
    ids.pop("vfio-pci", None)
    for name, known in sorted(ids.items()):
        kernel.add_driver(
            name, module=modules[name], ids=sorted(known), manages_dma=name in HARMLESS_DRIVERS
        )
    kernel.add_driver("vfio-pci", module="vfio_pci", is_vfio=True, loaded=False)


def _bridges_first(host: HostSnapshot) -> list[PciDevice]:
    """A function after all bridges above it; virtual ones come from their physical function."""
    physical = [device for device in host.devices if device.physical_function is None]
    return sorted(physical, key=lambda d: (d.bridge_path.count("/"), d.address))


def _add_function(kernel: FakeKernel, host: HostSnapshot, device: PciDevice) -> None:
    """Declare one function, and make the virtual functions that it had."""
    above = [name for name in device.bridge_path.split("/") if is_address(name)]
    virtual = [host.device(address) for address in device.virtual_functions]
    kernel.add_pci(
        str(device.address),
        vendor=device.vendor_id,
        device=device.device_id,
        class_code=device.class_code,
        subsystem=device.subsystem_id,
        group=device.iommu_group,
        driver=None if device.driver == "vfio-pci" else device.driver,
        driver_override=device.driver_override,
        bridge=above[-1] if above else None,
        header_type=device.header_type if device.header_type is not None else 0,
        boot_vga=True if device.is_boot_display else None,
        numa_node=-1 if device.numa_node is None else device.numa_node,
        reset_methods=" ".join(device.reset_method),
        total_vfs=device.sriov_totalvfs or 0,
        vf_device=virtual[0].device_id if virtual else "",
        vf_offset=_distance(device, virtual[0]) if virtual else 0x80,
        vf_stride=_distance(virtual[0], virtual[1]) if len(virtual) > 1 else 4,
    )
    if virtual:
        kernel.sriov.set_number(pci_device(device.address), str(len(virtual)))


def _distance(one: PciDevice, other: PciDevice) -> int:
    """Between the routing ids of two functions (PCI Express 5.0, 9.2.1.2)."""
    return _routing_id(other.address) - _routing_id(one.address)


def _routing_id(address: PciAddress) -> int:
    return address.bus << 8 | address.device << 3 | address.function
