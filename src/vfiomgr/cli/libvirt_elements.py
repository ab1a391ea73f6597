"""What devices of the host become in a domain: slots, vGPUs, and who may bind them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from vfiomgr.errors import Refusal, UnknownDevice
from vfiomgr.planner.guards import bridge, refuse_if_any, taking

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vfiomgr.model.pci import PciDevice
    from vfiomgr.model.snapshot import HostSnapshot
    from vfiomgr.model.vgpu import Vgpu

_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)


def is_uuid(text: str) -> bool:
    """Whether a device is named as mediated devices are."""
    return _UUID.fullmatch(text) is not None


def require_manageable(host: HostSnapshot, functions: Sequence[PciDevice]) -> None:
    """Make sure that libvirt may bind functions itself.

    A vGPU of a vendor's driver, unbound from that, is lost until all are made anew.

    Raises:
        Refusal: it may not; or the host needs a function.

    """
    own = [device for device in functions if host.is_vendor_function(device)]
    for device in own:
        message = f"{device} is a vGPU of its driver {device.driver}, which libvirt must not unbind"
        raise Refusal(message, "leave out --managed")
    waiting = [device for device in functions if not device.is_on_vfio]
    refuse_if_any(taking(host, waiting), frozenset())


def slots_of(
    host: HostSnapshot, texts: Sequence[str], *, only: bool
) -> list[tuple[PciDevice, ...]]:
    """The named functions by slot, each slot whole unless `only`, in the order of naming.

    Raises:
        UnknownDevice: the host has no such function.
        Refusal: one is a bridge.

    """
    named = [host.device(host.parse_address(text)) for text in texts]
    refuse_if_any([o for device in named for o in bridge(host, device)], frozenset())
    slots: dict[object, dict[object, PciDevice]] = {}
    for device in named:
        key = device.address if device.physical_function else device.address.slot
        functions = (device,) if only else host.slot(device)
        slots.setdefault(key, {}).update({d.address: d for d in functions})
    return [tuple(functions.values()) for functions in slots.values()]


def vgpu_named(host: HostSnapshot, uuid: str) -> Vgpu:
    """The active vGPU with a UUID.

    Raises:
        UnknownDevice: there is none.

    """
    found = host.vgpu(uuid)
    if found is None:
        message = f"there is no active vGPU {uuid}"
        raise UnknownDevice(message, "vfiomgr vgpu list shows the active ones")
    return found


def device_api(host: HostSnapshot, vgpu: Vgpu) -> str:
    """`device_api` of the vGPU's type; a recorded host may not tell, GPUs have vfio-pci."""
    for parent in host.vgpu_parents:
        for vgpu_type in parent.types:
            if (parent.name, vgpu_type.id) == (vgpu.parent, vgpu.type) and vgpu_type.device_api:
                return vgpu_type.device_api
    return "vfio-pci"
