"""Scans a host for a change: all that its plan is made of, and no more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.host.scan import scan
from vfiomgr.model.intent import (
    ChangeFiles,
    named_functions,
    wants_gpu_modes,
    wants_resets,
    wished_layout,
)
from vfiomgr.model.iommu import IommuState
from vfiomgr.model.path import BOOT_ID, PCI_DEVICES, HostPath
from vfiomgr.model.pci import PciAddress, is_address
from vfiomgr.model.persistence import TextFile
from vfiomgr.model.snapshot import HostSnapshot

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vfiomgr.host.tree import HostTree
    from vfiomgr.model.intent import Intent


def scan_for(
    intent: Intent | None,
    tree: HostTree,
    machine: HostTree | None,
    others: Iterable[Intent] = (),
    *,
    with_claims: bool = True,
) -> HostSnapshot:
    """The host with its users, and with what else an intent, and `others`, are planned on.

    Without one, nothing is taken from the host, and no disk is opened to see who has it.
    """
    intents = [one for one in (intent, *others) if one is not None]
    only_files = [one for one in intents if isinstance(one, ChangeFiles)]
    if intents and len(only_files) == len(intents):
        return _files_of(only_files, tree)
    return scan(
        tree,
        machine or tree,
        with_users=True,
        with_claims=with_claims and bool(intents),
        with_resets=any(map(wants_resets, intents)),
        with_gpu_modes=any(map(wants_gpu_modes, intents)),
        serials_of=frozenset(slot for one in intents for slot in slots_with_serials(tree, one)),
    )


def _files_of(intents: Iterable[ChangeFiles], tree: HostTree) -> HostSnapshot:
    """The files that intents are about, and nothing of the devices."""
    paths = dict.fromkeys(change.path for intent in intents for change in intent.changes)
    texts = ((path, tree.read_text(HostPath(path))) for path in paths)
    return HostSnapshot(
        kernel_release=None,
        kernel_command_line=None,
        boot_id=tree.read(BOOT_ID),
        cpu_vendor=None,
        iommu=IommuState((), (), has_groups=False),
        pci_drivers=(),
        devices=(),
        groups=(),
        vgpu_parents=(),
        vgpus=(),
        users=(),
        files=tuple(TextFile(path, text) for path, text in texts if text is not None),
    )


def slots_with_serials(tree: HostTree, intent: Intent) -> frozenset[tuple[int, int, int]]:
    """The slots whose serial numbers an intent needs: those that it names, or all."""
    wish = wished_layout(intent)
    if wish is not None and wish.layout.selects_by_serial:
        names = filter(is_address, tree.children(PCI_DEVICES))
        return frozenset(PciAddress.parse(name).slot for name in names)
    return frozenset(address.slot for address in named_functions(intent))
