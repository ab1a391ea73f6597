"""Safety checks before an operation on GPUs with vGPUs is undone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.diagnostic import Diagnostic, blocker
from vfiomgr.engine.registry import guards_undo

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.engine.undo import UndoScope
    from vfiomgr.snapshot.model import HostSnapshot


@guards_undo
def other_vgpus(host: HostSnapshot, scope: UndoScope) -> Iterator[Diagnostic]:
    """Refuse to remove virtual functions with newer vGPUs, which the undo cannot restore."""
    parents = (*scope.removed, *scope.reduced)
    there = [vgpu for device in parents for vgpu in host.vgpus_of(str(device.address))]
    names = [vgpu.name for vgpu in there if vgpu not in scope.made]
    if names:
        yield blocker(
            "newer-vgpus",
            ", ".join(names),
            f"removing virtual functions would also remove newer vGPUs: {', '.join(names)}",
            f"remove these vGPUs first: vfiomgr vgpu remove {' '.join(names)}",
        )
