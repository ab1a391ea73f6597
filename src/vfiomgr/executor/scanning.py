"""Scans a host for a change: all that its plan is made of, and no more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.host.scan import scan
from vfiomgr.model.intent import named_functions, wants_gpu_modes, wants_resets, wished_layout
from vfiomgr.model.path import PCI_DEVICES
from vfiomgr.model.pci import PciAddress, is_address

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree
    from vfiomgr.model.intent import Intent
    from vfiomgr.model.snapshot import HostSnapshot


def scan_for(intent: Intent | None, tree: HostTree, machine: HostTree | None) -> HostSnapshot:
    """The host with its users, and with what else an intent is planned on."""
    return scan(
        tree,
        machine or tree,
        with_users=True,
        with_resets=intent is not None and wants_resets(intent),
        with_gpu_modes=intent is not None and wants_gpu_modes(intent),
        serials_of=frozenset() if intent is None else slots_with_serials(tree, intent),
    )


def slots_with_serials(tree: HostTree, intent: Intent) -> frozenset[tuple[int, int, int]]:
    """The slots whose serial numbers an intent needs: those that it names, or all."""
    wish = wished_layout(intent)
    if wish is not None and wish.layout.selects_by_serial:
        names = filter(is_address, tree.children(PCI_DEVICES))
        return frozenset(PciAddress.parse(name).slot for name in names)
    return frozenset(address.slot for address in named_functions(intent))
