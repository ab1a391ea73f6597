"""Address translation services of a function: ATS and PASID (include/uapi/linux/pci_regs.h).

ATS lets a device cache translations of the IOMMU; PASID lets it use several address spaces, which
shared virtual addressing and accelerated virtual IOMMUs need. The kernel enables ATS if the IOMMU
supports it, and PASID if a driver uses it (drivers/pci/ats.c).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from vfiomgr.pci.extended import CONFIG_END, extended_capabilities, word
from vfiomgr.pci.model import PciAddress, pci_device
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vfiomgr.host.tree import HostTree
    from vfiomgr.pci.model import PciDevice

Service = Literal["on", "off", "absent"]
"""The state of a service; `absent` if the function lacks its capability."""
_ATS, _PASID = 0x0F, 0x1B
_CAPABILITY, _CONTROL = 4, 6
_ATS_ON, _PASID_ON = 1 << 15, 1 << 0
_WIDTH, _WIDTH_BITS = 8, 0x1F
_ASLEEP = "suspended"


class Translation(Value):
    """ATS and PASID of a function that has at least one of them."""

    address: PciAddress
    ats: Service
    """Whether the device may cache translations."""
    pasid: Service
    """Whether the device may use several address spaces."""
    pasid_bits: int = 0
    """The width of a PASID that the function supports; 0 without PASID."""


def read_translations(tree: HostTree, devices: Iterable[PciDevice]) -> tuple[Translation, ...]:
    """The services of functions that are awake; only root can read the registers."""
    found = (
        translation_in(
            device.address,
            tree.read_bytes(pci_device(device.address) / "config", CONFIG_END) or b"",
        )
        for device in devices
        if not device.is_bridge and device.runtime_status != _ASLEEP and device.stuck is None
    )
    return tuple(each for each in found if each is not None)


def translation_in(address: PciAddress, config: bytes) -> Translation | None:
    """Read the services in a configuration space; None if it has neither."""
    places = dict(reversed(list(extended_capabilities(config))))
    ats, pasid = places.get(_ATS), places.get(_PASID)
    if ats is None and pasid is None:
        return None
    width = 0 if pasid is None else word(config, pasid + _CAPABILITY) >> _WIDTH & _WIDTH_BITS
    return Translation(
        address, _state(config, ats, _ATS_ON), _state(config, pasid, _PASID_ON), width
    )


def _state(config: bytes, at: int | None, enabled: int) -> Service:
    if at is None:
        return "absent"
    return "on" if word(config, at + _CONTROL) & enabled else "off"
