"""Safety checks before an operation on functions, vGPUs or NVIDIA GPUs is undone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vfiomgr.diagnostic import Diagnostic, blocker
from vfiomgr.engine.registry import guards_undo
from vfiomgr.passthrough import guards
from vfiomgr.pci.model import PciDevice
from vfiomgr.vgpu.functions import kept_from_leaving

if TYPE_CHECKING:
    from vfiomgr.engine.plan import UndoScope
    from vfiomgr.snapshot.model import HostSnapshot


@guards_undo
def in_use(host: HostSnapshot, scope: UndoScope) -> Iterator[Diagnostic]:
    """Refuse to undo steps on functions and vGPUs that are in use."""
    leaving = [holder for holder in scope.leaving if isinstance(holder, PciDevice)]
    yield from guards.undoing(host, leaving)
    for holder in (*scope.leaving, *scope.removed, *scope.reduced):
        if holder not in leaving:
            yield from guards.assigned(host, holder)


@guards_undo
def other_vgpus(host: HostSnapshot, scope: UndoScope) -> Iterator[Diagnostic]:
    """Refuse to remove virtual functions with newer vGPUs, which the undo cannot restore."""
    parents = [one for one in (*scope.removed, *scope.reduced) if isinstance(one, PciDevice)]
    there = [vgpu for device in parents for vgpu in host.vgpus.of(str(device.address))]
    names = [vgpu.name for vgpu in there if vgpu not in scope.removed]
    if names:
        yield blocker(
            "newer-vgpus",
            ", ".join(names),
            f"removing virtual functions would also remove newer vGPUs: {', '.join(names)}",
            f"remove these vGPUs first: vfiomgr vgpu remove {' '.join(names)}",
        )


@guards_undo
def persistence_mode(host: HostSnapshot, scope: UndoScope) -> Iterator[Diagnostic]:
    """Refuse to unbind GPUs in persistence mode from NVIDIA's driver.

    Not needed if a step that turns the mode off can still be added.
    """
    if scope.can_add_steps:
        return
    for step in kept_from_leaving(host, scope.inverses):
        yield from guards.kept_initialised(host, host.device(step.device.address))
