"""Which functions of the host become one device of a guest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.diagnostic import refuse_if_any
from vfiomgr.errors import UnknownDevice, UsageError
from vfiomgr.guests.model import AttachOptions, DeviceRequest, GuestDevice
from vfiomgr.passthrough.guards import bridge
from vfiomgr.snapshot.named import find_device
from vfiomgr.units import is_uuid

if TYPE_CHECKING:
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.vgpu.model import Vgpu


DEVICE_APIS = ("vfio-pci", "vfio-ap", "vfio-ccw")
"""The device APIs of mediated devices that QEMU has a device for."""


def units_of(host: HostSnapshot, requests: Iterable[DeviceRequest]) -> tuple[GuestDevice, ...]:
    """Return the named devices in order, with entire slots and without duplicates.

    Raises:
        UnknownDevice: the device or vGPU is not found.
        Refusal: it is a bridge, or a vGPU that QEMU does not support.
        UsageError: it is named twice with different options.
    """
    known = tuple(requests)
    named = [_named(host, request) for request in known if not is_uuid(request.name)]
    _refuse_bridges(host, [device for device in named if device.is_bridge])
    _refuse_contradictions(host, known)
    slots: dict[object, GuestDevice] = {}
    for request in known:
        unit = _mediated(host, request) if is_uuid(request.name) else _functions(host, request)
        first = unit.functions[0] if unit.functions else None
        key: object = unit.vgpu_uuid
        if first is not None:
            place = first.address if first.physical_function else first.address.slot
            key = (place, unit.is_seen)
        slots[key] = _joined(slots[key], unit) if key in slots else unit
    return tuple(_apart(slots.values(), host, known))


def _apart(
    units: Iterable[GuestDevice], host: HostSnapshot, requests: Iterable[DeviceRequest]
) -> Iterator[GuestDevice]:
    """Place each function once: as its own entry says, or else as its slot does."""
    units = tuple(units)
    unseen = {f.address for unit in units if not unit.is_seen for f in unit.functions}
    if not unseen:
        yield from units
        return
    seen = (w for w in requests if not (w.options.is_unassigned or is_uuid(w.name)))
    unseen -= {_named(host, request).address for request in seen}
    for unit in units:
        own = tuple(f for f in unit.functions if (f.address in unseen) is not unit.is_seen)
        if own or not unit.functions:
            yield replace(unit, functions=own)


def _refuse_bridges(host: HostSnapshot, bridges: Iterable[PciDevice]) -> None:
    for device in bridges:
        refuse_if_any(bridge(host, device))


def _refuse_contradictions(host: HostSnapshot, requests: Iterable[DeviceRequest]) -> None:
    """Check that a device named twice has the same options.

    Raises:
        UsageError: the options differ.
    """
    seen: dict[str, DeviceRequest] = {}
    for request in requests:
        name = request.name.lower() if is_uuid(request.name) else str(_named(host, request).address)
        if seen.setdefault(name, request).options != request.options:
            message = f"{name} is named twice with different options"
            raise UsageError(message, "name it once")


def _named(host: HostSnapshot, request: DeviceRequest) -> PciDevice:
    if not any(mark in request.name for mark in ":._/"):  # one of which each form of address has
        message = f"{request.name!r} is neither a PCI address nor the UUID of a vGPU"
        raise UsageError(message, "list the vGPUs with: vfiomgr vgpu list; devices: vfiomgr list")
    return find_device(host, request.name)


def _functions(host: HostSnapshot, request: DeviceRequest) -> GuestDevice:
    device = _named(host, request)
    functions = (device,) if request.is_alone else host.slot(device)
    ordered = tuple(sorted(functions, key=lambda function: function.address))
    options = request.options
    has_groups = not any(_has_only_cdev(host, function) for function in ordered)
    if not has_groups and not options.is_unassigned:
        options = replace(options, has_iommufd=True)
    return GuestDevice(
        functions=ordered,
        vgpu=host.vgpus.named(str(device.address)),
        model=None,
        options=options,
        is_vendor_function=host.vgpus.is_vendor_function(device),
        numa_node=device.numa_node,
        root_complex=root_complex(device),
        iommu_group=device.iommu_group,
        has_groups=has_groups,
    )


def _has_only_cdev(host: HostSnapshot, device: PciDevice) -> bool:
    """Whether the kernel has no VFIO groups (CONFIG_VFIO_GROUP), so that QEMU needs iommufd."""
    if not device.is_on_vfio:
        return host.vfio.has_groups is False
    group = host.group(device.iommu_group)
    return device.vfio_cdev and group is not None and not group.has_node


def _mediated(host: HostSnapshot, request: DeviceRequest) -> GuestDevice:
    vgpu = host.vgpus.named(request.name)
    if vgpu is None:
        message = f"active vGPU not found: {request.name}"
        raise UnknownDevice(message, "list the active vGPUs with: vfiomgr vgpu list")
    model = device_api(host, vgpu)
    if model not in DEVICE_APIS:
        message = f"QEMU does not support the device API {model!r} of vGPU {vgpu.uuid}"
        raise UsageError(message, f"QEMU supports {', '.join(DEVICE_APIS)}")
    parent = host.device_named(vgpu.parent)
    node = vgpu.numa_node if parent is None else parent.numa_node
    return GuestDevice(
        functions=(),
        vgpu=vgpu,
        model=model,
        options=request.options,
        is_vendor_function=False,
        numa_node=node,
        root_complex=None if parent is None else root_complex(parent),
        iommu_group=vgpu.iommu_group,
        has_groups=host.vfio.has_groups is not False,
    )


def device_api(host: HostSnapshot, vgpu: Vgpu) -> str:
    """`device_api` of the vGPU's type; vfio-pci if a recorded host does not contain it."""
    for parent in host.vgpus.parents:
        for vgpu_type in parent.types:
            if (parent.name, vgpu_type.id) == (vgpu.parent, vgpu.type) and vgpu_type.device_api:
                return vgpu_type.device_api
    return "vfio-pci"


def root_complex(device: PciDevice) -> str | None:
    """The root complex, `pci0000:40`."""
    return device.bridges[0] or None


def _joined(one: GuestDevice, other: GuestDevice) -> GuestDevice:
    """Join two units of one slot; the options of the first take precedence."""
    functions = {device.address: device for device in (*one.functions, *other.functions)}
    options = one.options if one.options != AttachOptions() else other.options
    joined = tuple(functions[address] for address in sorted(functions))
    return replace(one, functions=joined, options=options)
