"""What speaks against undoing an operation that takes a GPU from NVIDIA's driver."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.engine.registry import guards_undo
from vfiomgr.passthrough import guards
from vfiomgr.vgpu.mig.sriov_manage import kept_from_leaving

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.diagnostic import Diagnostic
    from vfiomgr.engine.undo import UndoScope
    from vfiomgr.snapshot.model import HostSnapshot


@guards_undo
def persistence_mode(host: HostSnapshot, scope: UndoScope) -> Iterator[Diagnostic]:
    """GPUs that would have to leave NVIDIA's driver in persistence mode.

    Whoever can still add a step that ends the mode has no need of this.
    """
    if scope.can_add_steps:
        return
    for step in kept_from_leaving(host, scope.inverses):
        yield from guards.kept_initialised(host, host.device(step.device.address))
