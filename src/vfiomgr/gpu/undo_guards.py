"""Safety checks before an operation that unbinds NVIDIA GPUs is undone."""

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
    """Refuse to unbind GPUs in persistence mode from NVIDIA's driver.

    Not needed if a step that turns the mode off can still be added.
    """
    if scope.can_add_steps:
        return
    for step in kept_from_leaving(host, scope.inverses):
        yield from guards.kept_initialised(host, host.device(step.device.address))
