"""GPUs that NVSwitches connect: what a guest has of them, and who drives the fabric."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from vfiomgr.errors import Refusal
from vfiomgr.pci.model import CLASS_DISPLAY, CLASS_OTHER_BRIDGE, PciDevice
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Sequence

    from vfiomgr.pci.model import PciAddress
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.vgpu.guest_device import GuestDevice

_NVIDIA = "10de"


class NvlinkShare(Value):
    """The switches and GPUs of a host, and those of them that a guest gets."""

    switches: tuple[PciDevice, ...]
    gpus: tuple[PciDevice, ...]
    own_switches: tuple[PciDevice, ...]
    own_gpus: tuple[PciDevice, ...]

    @property
    def outside(self) -> tuple[PciDevice, ...]:
        """What of the fabric the guest does not get."""
        own = {*self.own_switches, *self.own_gpus}
        return tuple(device for device in (*self.switches, *self.gpus) if device not in own)

    @property
    def is_divided(self) -> bool:
        """Whether the guest gets switches, which drive the whole of it, and not all the rest."""
        return bool(self.own_switches and self.outside)

    @property
    def needs_partition(self) -> bool:
        """Whether Fabric Manager has to join its GPUs; one alone works without."""
        return not self.own_switches and len(self.own_gpus) > 1


def fabric_share(host: HostSnapshot, inside: Container[PciAddress]) -> NvlinkShare | None:
    """What of the fabric is among some functions; None on a host without NVSwitches."""
    switches = tuple(filter(_is_switch, host.devices))
    gpus = tuple(filter(_is_gpu, host.devices))
    if not switches:
        return None
    return NvlinkShare(
        switches,
        gpus,
        tuple(device for device in switches if device.address in inside),
        tuple(device for device in gpus if device.address in inside),
    )


def fabric_notes(host: HostSnapshot, units: Sequence[GuestDevice]) -> Iterator[str]:
    """What is to be done before the start, so that CUDA finds a fabric (else error 802).

    NVIDIA's Fabric Manager knows three ways: all GPUs and all switches in one guest; GPUs in
    guests, the switches with the host, which activates partitions; vGPUs, also with partitions.

    Raises:
        Refusal: some of the switches without the others, or without all of their GPUs.

    """
    share = fabric_share(host, {f.address for unit in units for f in unit.functions})
    if share is None:
        return
    if share.is_divided:
        _refuse_division(share)
    vgpus = [unit for unit in units if _is_nvidia_vgpu(host, unit)]
    if vgpus and not share.own_switches:
        yield (
            "this host has NVSwitches: Fabric Manager (FABRIC_MODE=2) has to activate the "
            f"partition of {', '.join(unit.name for unit in vgpus)} before the guest starts"
        )
    elif share.needs_partition:
        yield (
            f"this host has NVSwitches: Fabric Manager (FABRIC_MODE=1) has to activate a partition "
            f"of these {len(share.own_gpus)} GPUs before the guest starts, and to deactivate it "
            "after"
        )


def _refuse_division(share: NvlinkShare) -> NoReturn:
    """Say what would stay outside.

    Raises:
        Refusal: always.

    """
    shown = ", ".join(str(device.address) for device in share.outside)
    message = (
        "a guest that has an NVSwitch drives the whole fabric, and these of it would stay "
        f"outside: {shown} (CUDA would fail with error 802)"
    )
    remedy = "name them too, or leave all NVSwitches to the host's Fabric Manager"
    raise Refusal(message, remedy)


def _is_switch(device: PciDevice) -> bool:
    """Whether a function is an NVSwitch."""
    return (
        device.vendor_id == _NVIDIA
        and device.class_code.startswith(CLASS_OTHER_BRIDGE)
        and not device.is_bridge
    )


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
