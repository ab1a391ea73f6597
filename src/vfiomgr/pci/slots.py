"""Which functions of a slot are one device, and which belong to the chipset or the CPU.

Functions that share a device number are not one device: those of a chipset or SoC are independent,
and so are the ports of a network card that ACS isolates (get_pci_function_alias_group in
drivers/iommu/iommu.c joins only functions without ACS). The functions of a graphics card are one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vfiomgr.pci.model import CLASS_AUDIO, CLASS_DISPLAY, PciDevice

_OF_GRAPHICS_CARD = (CLASS_DISPLAY, CLASS_AUDIO, "0c03", "0c80")
"""A second display controller, audio, USB, and the controller of USB-C (UCSI)."""
_ENCRYPTION = "1080"
_ONLY_IN_SOC = (_ENCRYPTION, "1300")
"""The security processor, and AMD's functions without any use (`Dummy Function`)."""

_SMBUS = "0c05"
_OF_CHIPSET = {
    "0c80": "a serial bus controller of the chipset (SPI flash, I2C)",
    "0580": "the power management controller of the chipset",
}
_CHIPSET_VENDORS = frozenset({"8086", "1022"})
_MAKERS = frozenset({"8086", "1022", "1002", "1d94", "1d17"})
"""Intel, AMD with its graphics, Hygon and Zhaoxin, whose functions on a root bus are of the chipset
or the CPU. A virtual machine shows cards of others on one."""
_OF_ONE_SOC = frozenset({"1002", "1022"})
"""AMD's graphics and its other functions share a slot in its processors only."""
_SECURITY_VENDORS = frozenset({"1022", "1d94"})
"""AMD, and Hygon, whose processors have the same IDs."""
_NO_SECURITY_PROCESSORS = frozenset({"1537", "1468", "1498"})
"""Engines for encryption or DMA alone: without psp_vdata in drivers/crypto/ccp/sp-pci.c, or of the
driver ptdma (drivers/dma/ptdma/ptdma-pci.c)."""


def chipset_role(device: PciDevice) -> str | None:
    """What a function of the chipset or the CPU does for the host; None for other functions.

    Through the SMBus a guest could write to the memory modules, through SPI to the firmware; the
    security processor has the firmware's TPM, and KVM needs it for SEV. Bridges are not included.
    """
    kind = device.class_code[:4]
    if device.physical_function is not None or device.is_bridge:
        return None
    if kind == _ENCRYPTION and device.vendor_id in _SECURITY_VENDORS:
        is_other = device.device_id in _NO_SECURITY_PROCESSORS
        return None if is_other else "the security processor of the CPU (PSP)"
    if not device.is_on_root_bus:
        return None
    if kind == _SMBUS:
        return "the SMBus of the chipset"
    return _OF_CHIPSET.get(kind) if device.vendor_id in _CHIPSET_VENDORS else None


def is_integrated(device: PciDevice, slot: Iterable[PciDevice]) -> bool:
    """Whether a function belongs to the chipset or the CPU; `slot` are all of its device number.

    It is on a root bus and of their makers, or its device number has functions of both of AMD's
    vendor IDs or of a kind that no card has: its processors have functions below internal bridges.
    """
    there = list(slot)
    return (
        _is_on_board(device)
        or {other.vendor_id for other in there} >= _OF_ONE_SOC
        or any(other.class_code.startswith(_ONLY_IN_SOC) for other in there)
    )


def one_device(device: PciDevice, slot: Sequence[PciDevice]) -> tuple[PciDevice, ...]:
    """The functions of a slot that are passed through with one of them, in order.

    A graphics card is one device. Other functions of a slot belong together if they are in one
    IOMMU group, except those of the chipset or the CPU. Bridges, virtual functions and what the
    host needs of the chipset are alone.
    """
    if not _may_have_others(device):
        return (device,)
    others = [other for other in slot if _may_have_others(other)]
    found, added = {device.address}, [device]
    while added:
        first = added.pop()
        joined = [o for o in others if o.address not in found and _is_joined(first, o, slot)]
        found.update(other.address for other in joined)
        added += joined
    return tuple(other for other in others if other.address in found)


def _may_have_others(device: PciDevice) -> bool:
    is_virtual = device.physical_function is not None
    return not (is_virtual or device.is_bridge or chipset_role(device) is not None)


def _is_joined(one: PciDevice, other: PciDevice, slot: Iterable[PciDevice]) -> bool:
    if _is_on_board(one):
        return False
    is_same_card = one.vendor_id == other.vendor_id and (
        (_is_display(one) and other.class_code.startswith(_OF_GRAPHICS_CARD))
        or (_is_display(other) and one.class_code.startswith(_OF_GRAPHICS_CARD))
    )
    if is_same_card:
        return True
    is_same_group = one.iommu_group is not None and one.iommu_group == other.iommu_group
    return is_same_group and not is_integrated(one, slot)


def _is_on_board(device: PciDevice) -> bool:
    return device.is_on_root_bus and device.vendor_id in _MAKERS


def _is_display(device: PciDevice) -> bool:
    return device.class_code.startswith(CLASS_DISPLAY)
