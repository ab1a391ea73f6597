"""NVLink on hosts with NVSwitches: which GPUs and switches of the fabric a guest gets.

A guest with NVSwitches drives the entire fabric, so it needs all switches and all GPUs. Otherwise
the switches stay with the host, whose Fabric Manager activates a partition for each guest that gets
several GPUs, or vGPUs.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import TYPE_CHECKING, NoReturn

from vfiomgr.diagnostic import refuse
from vfiomgr.pci.model import CLASS_DISPLAY, PciAddress, PciDevice
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.guests.model import GuestDevice
    from vfiomgr.snapshot.model import HostSnapshot

_NVIDIA = "10de"


class NvlinkShare(Value):
    """The switches and GPUs of a host, and those that a guest gets."""

    switches: tuple[PciDevice, ...]
    gpus: tuple[PciDevice, ...]
    own_switches: tuple[PciDevice, ...]
    own_gpus: tuple[PciDevice, ...]

    @property
    def outside(self) -> tuple[PciDevice, ...]:
        """The part of the fabric that the guest does not get."""
        own = {*self.own_switches, *self.own_gpus}
        return tuple(device for device in (*self.switches, *self.gpus) if device not in own)

    @property
    def is_divided(self) -> bool:
        """Whether the guest gets switches, which drive the entire fabric, but not the rest."""
        return bool(self.own_switches and self.outside)

    @property
    def needs_partition(self) -> bool:
        """Whether the Fabric Manager has to join the GPUs; a single GPU works without."""
        return not self.own_switches and len(self.own_gpus) > 1


def nvlink_share(host: HostSnapshot, inside: Container[PciAddress]) -> NvlinkShare | None:
    """The functions that belong to the fabric; None on a host without NVSwitches."""
    switches = host.nvswitches
    if not switches:
        return None
    gpus = tuple(filter(_is_gpu, host.devices))
    return NvlinkShare(
        switches,
        gpus,
        tuple(device for device in switches if device.address in inside),
        tuple(device for device in gpus if device.address in inside),
    )


def nvlink_notes(host: HostSnapshot, units: Sequence[GuestDevice]) -> Iterator[str]:
    """What to do before the start so that CUDA finds a fabric (otherwise error 802).

    NVIDIA's Fabric Manager supports three modes: all GPUs and all switches in one guest; GPUs in
    guests, with the switches on the host, which activates partitions; vGPUs, also with partitions.

    Raises:
        Refusal: some switches without the others, or without all of their GPUs.
    """
    share = nvlink_share(host, {f.address for unit in units for f in unit.functions})
    if share is None:
        return
    if share.is_divided:
        _refuse_division(share)
    vgpus = [unit for unit in units if _is_nvidia_vgpu(host, unit)]
    if vgpus and not share.own_switches:
        yield (
            "NVSwitch host: before the guest starts, the Fabric Manager (FABRIC_MODE=2) must "
            f"activate the partition of {', '.join(unit.name for unit in vgpus)}"
        )
    elif share.needs_partition:
        yield (
            "NVSwitch host: before the guest starts, the Fabric Manager (FABRIC_MODE=1) must "
            f"activate a partition of these {len(share.own_gpus)} GPUs, and deactivate it after "
            "the guest ends"
        )


def _refuse_division(share: NvlinkShare) -> NoReturn:
    """Refuse the request, and list what would stay outside."""
    shown = ", ".join(str(device.address) for device in share.outside)
    message = (
        f"a guest with an NVSwitch drives the entire fabric, but would not get {shown} (CUDA "
        "would fail with error 802)"
    )
    remedy = "add these devices, or leave all NVSwitches to the host's Fabric Manager"
    refuse("fabric-divided", "", message, remedy)


def _is_gpu(device: PciDevice) -> bool:
    return (
        device.vendor_id == _NVIDIA
        and device.class_code.startswith(CLASS_DISPLAY)
        and device.physical_function is None
    )


def _is_nvidia_vgpu(host: HostSnapshot, unit: GuestDevice) -> bool:
    if unit.vgpu is None:
        return False
    parent = host.device_named(unit.vgpu.parent)
    return parent is not None and parent.vendor_id == _NVIDIA
