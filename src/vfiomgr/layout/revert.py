"""Undoes an applied layout: its steps in reverse."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.engine import undo
from vfiomgr.engine.locks import device_lock
from vfiomgr.engine.plan import Plan
from vfiomgr.engine.registry import plans
from vfiomgr.layout.requests import RevertLayout
from vfiomgr.passthrough.steps import ChangeDriver, DropOriginalState
from vfiomgr.sriov.steps import SetVfCount
from vfiomgr.vgpu.mig.sriov_manage import kept_from_leaving
from vfiomgr.vgpu.mig.steps import RunSriovManage, SetPersistence

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from vfiomgr.engine.step import Step
    from vfiomgr.snapshot.model import HostSnapshot


@plans(RevertLayout)
def plan_revert(host: HostSnapshot, request: RevertLayout) -> Plan:
    """Undo all steps of a layout's runs, newest first.

    Raises:
        Refusal: a device to be moved is in use.

    """
    numbers = range(len(request.steps))
    undoing = undo.plan_undo(
        host, request.steps, numbers, request.allow, is_of_this_boot=True, can_add_steps=True
    )
    kept = [request.steps[number] for number in sorted(undoing.steps, reverse=True)]
    back = [step for done in kept if (step := done.inverse()) is not None]
    names = tuple(dict.fromkeys(filter(None, (step.subject for step in request.steps))))
    return Plan(
        summary=f"revert the layout {request.name}",
        steps=tuple(_letting_go(host, back)),
        locks=tuple(sorted({*request.locks, *_locks(host, names)})),
        notes=undoing.notes,
        resolves=names,
    )


def of_several(runs: Iterable[Iterable[Step]]) -> tuple[Step, ...]:
    """The steps of runs (oldest first) whose inverses lead to the state before all of them.

    What an earlier run changed is restored to the state before that run; the state that a later run
    found in between does not matter.
    """
    found: list[Step] = []
    changed: set[tuple[object, ...]] = set()
    makers: set[str | None] = set()
    for run in map(tuple, runs):
        not_ours = _ways_to_guests(run, makers)
        new = [step for step in run if step.topic not in changed and step not in not_ours]
        changed.update(step.topic for step in new if step.inverse() is not None)
        makers.update(s.subject for s in new if isinstance(s, RunSriovManage | SetVfCount))
        found += new
    return tuple(found)


def _letting_go(host: HostSnapshot, steps: Sequence[Step]) -> Iterator[Step]:
    """Persistence mode, which may have been enabled since, is disabled before it matters."""
    held = list(kept_from_leaving(host, steps))
    for step in steps:
        if step in held:
            yield SetPersistence(held.pop(held.index(step)).device, before=True, after=False)
        yield step


def _ways_to_guests(run: Sequence[Step], makers: set[str | None]) -> list[Step]:
    """How a run returned functions from guests that had created virtual ones before.

    Only a host driver creates virtual functions, so the function had one then, and has it again.
    Somebody passed it through between the two runs, and undoing the second one would do that again.
    """
    back = {step.subject for step in run if isinstance(step, DropOriginalState)} & makers
    moves = DropOriginalState | ChangeDriver
    return [step for step in run if isinstance(step, moves) and step.subject in back]


def _locks(host: HostSnapshot, names: Iterable[str]) -> Iterable[str]:
    for name in names:
        device = host.device_named(name)
        if device is not None:
            yield device_lock(device)
        else:
            yield f"device-{name}" if ":" in name else f"vgpu-{name}"
