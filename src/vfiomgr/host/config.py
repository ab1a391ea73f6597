"""The configuration space of PCI functions, and the slots that can be power-cycled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.model.path import PCI_SLOTS, pci_device
from vfiomgr.model.reset import CONFIG_SIZE, ResetCapabilities, reset_capabilities

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vfiomgr.host.tree import HostTree
    from vfiomgr.model.pci import PciAddress, PciDevice


def read_config(tree: HostTree, address: PciAddress) -> bytes:
    """The first 256 bytes, or the 64 that are not root's alone; empty where there is nothing.

    Reading wakes a function that is suspended (pci_read_config).
    """
    return tree.read_bytes(pci_device(address) / "config", CONFIG_SIZE) or b""


def read_reset_capabilities(
    tree: HostTree, devices: Iterable[PciDevice]
) -> tuple[ResetCapabilities, ...]:
    """What functions that are awake say of resets; those that sleep are left to sleep."""
    found = (
        reset_capabilities(device.address, read_config(tree, device.address))
        for device in devices
        if device.runtime_status != "suspended"
    )
    return tuple(capabilities for capabilities in found if capabilities is not None)


def slot_with_power(tree: HostTree, address: PciAddress) -> str | None:
    """The hot-plug slot whose power can be switched; its `address` has no function number."""
    wanted = str(address).rpartition(".")[0]
    for name in tree.children(PCI_SLOTS):
        slot = PCI_SLOTS / name
        if tree.read(slot / "address") == wanted and tree.exists(slot / "power"):
            return slot / "power"
    return None
