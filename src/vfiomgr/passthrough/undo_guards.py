"""Safety checks before an operation on functions or vGPUs is undone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.engine.registry import guards_undo
from vfiomgr.passthrough import guards

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.diagnostic import Diagnostic
    from vfiomgr.engine.undo import UndoScope
    from vfiomgr.snapshot.model import HostSnapshot


@guards_undo
def in_use(host: HostSnapshot, scope: UndoScope) -> Iterator[Diagnostic]:
    """Refuse to undo steps on functions and vGPUs that are in use."""
    yield from guards.undoing(host, scope.leaving)
    for vgpu in scope.made:
        yield from guards.held_by_guest(host, vgpu)
    for function in scope.reduced:
        yield from guards.held_by_guest(host, function)
