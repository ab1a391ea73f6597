"""What speaks against undoing an operation on GPUs that carry vGPUs."""

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
    """vGPUs that would go with their virtual functions, and that undoing does not make again."""  # noqa: D403
    parents = (*scope.removed, *scope.reduced)
    there = [vgpu for device in parents for vgpu in host.vgpus_of(str(device.address))]
    names = [vgpu.name for vgpu in there if vgpu not in scope.made]
    if names:
        yield blocker(
            "newer-vgpus",
            ", ".join(names),
            f"vGPUs that came since would go with their virtual functions: {', '.join(names)}",
            f"remove them first, if nobody needs them: vfiomgr vgpu remove {' '.join(names)}",
        )
