"""GPUs that NVSwitches connect: what a guest has of them, and who drives the fabric."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.errors import Refusal
from vfiomgr.model.pci import CLASS_DISPLAY, CLASS_OTHER_BRIDGE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vfiomgr.model.pci import PciAddress, PciDevice
    from vfiomgr.model.snapshot import HostSnapshot
    from vfiomgr.planner.guest.units import Unit

_NVIDIA = "10de"


def fabric_notes(host: HostSnapshot, units: Sequence[Unit]) -> Iterator[str]:
    """What is to be done before the start, so that CUDA finds a fabric (else error 802).

    NVIDIA's Fabric Manager knows three ways: all GPUs and all switches in one guest; GPUs in
    guests, the switches with the host, which activates partitions; vGPUs, also with partitions.

    Raises:
        Refusal: some of the switches without the others, or without all of their GPUs.

    """
    switches = [device for device in host.devices if is_switch(device)]
    if not switches:
        return
    gpus = [device for device in host.devices if _is_gpu(device)]
    inside = {function.address for unit in units for function in unit.functions}
    named = [device for device in switches if device.address in inside]
    if named:
        _check_whole(switches, gpus, inside)
        return
    count = sum(device.address in inside for device in gpus)
    vgpus = [unit for unit in units if _is_nvidia_vgpu(host, unit)]
    if vgpus:
        yield (
            "this host has NVSwitches: Fabric Manager (FABRIC_MODE=2) has to activate the "
            f"partition of {', '.join(unit.name for unit in vgpus)} before the guest starts"
        )
    elif count > 1:
        yield (
            f"this host has NVSwitches: Fabric Manager (FABRIC_MODE=1) has to activate a partition "
            f"of these {count} GPUs before the guest starts, and to deactivate it after"
        )


def is_switch(device: PciDevice) -> bool:
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


def _is_nvidia_vgpu(host: HostSnapshot, unit: Unit) -> bool:
    if unit.vgpu is None:
        return False
    parent = host.device_named(unit.vgpu.parent)
    return parent is not None and parent.vendor_id == _NVIDIA


def _check_whole(
    switches: Sequence[PciDevice], gpus: Sequence[PciDevice], inside: set[PciAddress]
) -> None:
    missing = [device for device in (*switches, *gpus) if device.address not in inside]
    if missing:
        shown = ", ".join(str(device.address) for device in missing)
        message = (
            "a guest that has an NVSwitch drives the whole fabric, and these of it would stay "
            f"outside: {shown} (CUDA would fail with error 802)"
        )
        remedy = "name them too, or leave all NVSwitches to the host's Fabric Manager"
        raise Refusal(message, remedy)
