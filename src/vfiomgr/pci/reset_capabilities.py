"""The reset methods of a function, and what its configuration space says about them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

from vfiomgr.paths import PCI_SLOTS, pci_device
from vfiomgr.pci.model import PciAddress
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from vfiomgr.host.tree import HostTree
    from vfiomgr.pci.model import PciDevice


ResetMethod = Literal["device_specific", "acpi", "flr", "af_flr", "pm", "bus", "cxl_bus"]
"""The names in `reset_method` (pci_reset_fn_methods in drivers/pci/pci.c)."""

RESET_METHODS: tuple[ResetMethod, ...] = get_args(ResetMethod)
"""In the order in which the kernel tries them."""

COMMON_RESETS: tuple[ResetMethod, ...] = ("flr", "pm", "bus")
"""Methods that people expect for any function; the others need firmware or special hardware."""

Offer = Literal["yes", "no", "absent"]
"""The answer of a capability about a reset; `absent` if the function lacks the capability."""

CONFIG_SIZE = 256
"""Bytes of configuration space with the capabilities; only root can read more than 64."""

_COMMAND = slice(0x04, 0x06)
_STATUS, _HAS_CAPABILITIES = 0x06, 0x10
_BARS = slice(0x10, 0x28)
_FIRST_CAPABILITY = 0x34
_HEADER_END = 0x40
_MOST_CAPABILITIES = 48
_FLRESET, _TP_AND_FLR, _NO_SOFT_RESET = 0x10, 0x03, 0x08
"""Bits of the highest byte of DevCap, of the AF capabilities, of the lowest byte of PMCSR."""
_POWER_MANAGEMENT, _PCI_EXPRESS, _ADVANCED_FEATURES = 0x01, 0x10, 0x13


class ResetCapabilities(Value):
    """Reset capabilities in a function's configuration space (include/uapi/linux/pci_regs.h)."""

    address: PciAddress
    flr: Offer
    """FLReset, bit 28 of the Device Capabilities of PCI Express."""
    af_flr: Offer
    """Both TP and FLR of the Advanced Features capability of conventional PCI."""
    pm: Offer
    """`no` with No_Soft_Reset: the function keeps its state from D3hot to D0."""
    kept: str
    """What a reset must not change, as returned by `kept_by_reset`."""


def reset_capabilities(address: PciAddress, config: bytes) -> ResetCapabilities | None:
    """Read the capabilities; None if they are not readable or the function is dead."""
    if len(config) < CONFIG_SIZE or config.count(0xFF) == len(config):
        return None
    places = dict(_capabilities(config))
    express, features, power = (
        places.get(number) for number in (_PCI_EXPRESS, _ADVANCED_FEATURES, _POWER_MANAGEMENT)
    )
    return ResetCapabilities(
        address,
        flr=_offer(express, lambda at: bool(config[at + 7] & _FLRESET)),
        af_flr=_offer(features, lambda at: config[at + 3] & _TP_AND_FLR == _TP_AND_FLR),
        pm=_offer(power, lambda at: not config[at + 4] & _NO_SOFT_RESET),
        kept=kept_by_reset(config),
    )


def _offer(at: int | None, test: Callable[[int], bool]) -> Offer:
    if at is None:
        return "absent"
    return "yes" if test(at) else "no"


def _capabilities(config: bytes) -> Iterator[tuple[int, int]]:
    """Identifier and offset of each capability; a circular list ends."""
    if not config[_STATUS] & _HAS_CAPABILITIES:
        return
    at = config[_FIRST_CAPABILITY] & ~3
    for _ in range(_MOST_CAPABILITIES):
        if at < _HEADER_END or at + 8 > len(config):
            return
        yield config[at], at
        at = config[at + 1] & ~3


def kept_by_reset(config: bytes) -> str:
    """What the kernel restores after a reset, hexadecimal: the command register and the BARs."""
    return (config[_COMMAND] + config[_BARS]).hex()


def read_config(tree: HostTree, address: PciAddress) -> bytes:
    """The first 256 bytes, or the 64 that any user can read; empty if there are none.

    Reading wakes a suspended function (pci_read_config).
    """
    return tree.read_bytes(pci_device(address) / "config", CONFIG_SIZE) or b""


def read_reset_capabilities(
    tree: HostTree, devices: Iterable[PciDevice]
) -> tuple[ResetCapabilities, ...]:
    """The reset capabilities of functions that are awake; sleeping ones are not read."""
    found = (
        reset_capabilities(device.address, read_config(tree, device.address))
        for device in devices
        if device.runtime_status != "suspended"
    )
    return tuple(capabilities for capabilities in found if capabilities is not None)


def slot_with_power(tree: HostTree, address: PciAddress) -> str | None:
    """The hot-plug slot with power control; its `address` has no function number."""
    wanted = str(address).rpartition(".")[0]
    for name in tree.children(PCI_SLOTS):
        slot = PCI_SLOTS / name
        if tree.read(slot / "address") == wanted and tree.exists(slot / "power"):
            return slot / "power"
    return None
