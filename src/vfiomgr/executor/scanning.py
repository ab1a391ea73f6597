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
    from vfiomgr.host.tree import HostTree
    from vfiomgr.model.intent import Intent


def scan_for(intent: Intent | None, tree: HostTree, machine: HostTree | None) -> HostSnapshot:
    """The host with its users, and with what else an intent is planned on."""
    if isinstance(intent, ChangeFiles):
        return _files_of(intent, tree)
    return scan(
        tree,
        machine or tree,
        with_users=True,
        with_resets=intent is not None and wants_resets(intent),
        with_gpu_modes=intent is not None and wants_gpu_modes(intent),
        serials_of=frozenset() if intent is None else slots_with_serials(tree, intent),
    )


def _files_of(intent: ChangeFiles, tree: HostTree) -> HostSnapshot:
    """The files that an intent is about, and nothing of the devices."""
    paths = dict.fromkeys(change.path for change in intent.changes)
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
