"""Runs that applied layouts, as the journals record them, and their steps in reverse."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from vfiomgr.diagnostic import Override, refuse
from vfiomgr.engine import unfinished
from vfiomgr.engine.journal import names, read_journal
from vfiomgr.engine.locks import device_lock
from vfiomgr.engine.plan import Plan, Step
from vfiomgr.engine.registry import checks, plans
from vfiomgr.engine.unfinished import read_unfinished
from vfiomgr.layout.requests import ApplyLayout, RevertLayout
from vfiomgr.passthrough.steps import ChangeDriver, DropOriginalState
from vfiomgr.paths import BOOT_ID
from vfiomgr.sriov.steps import SetVfCount
from vfiomgr.value import Value
from vfiomgr.vgpu.functions import kept_from_leaving
from vfiomgr.vgpu.steps import RunSriovManage, SetPersistence

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree
    from vfiomgr.snapshot.model import HostSnapshot


@plans(RevertLayout)
def plan_revert(host: HostSnapshot, request: RevertLayout) -> Plan:
    """Undo all steps of a layout's runs, newest first.

    Raises:
        Refusal: a device to be moved is in use.
    """
    numbers = range(len(request.steps))
    undoing = unfinished.plan_undo(
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


_DONE = frozenset({"done", "superseded"})
"""An interrupted run counts if a later run finished it."""


class _Run(Value):
    """A completed run."""

    name: str
    request: dict[str, Any]
    boot_id: str | None
    locks: frozenset[str]

    @property
    def layout(self) -> tuple[object, object]:
        """The layout that it applied."""
        return self.request["name"], self.request["layout"]


def reversion(tree: HostTree, boot_id: str | None, allow: frozenset[Override]) -> RevertLayout:
    """The request that undoes the last applied layout, with all its later corrections.

    Raises:
        Refusal: no layout was applied since boot, or it is already reverted.
    """
    runs = _last_application(tree, boot_id)
    if not runs:
        message = "no layout was applied since this host booted, or it is already reverted"
        remedy = "undo other changes with vfiomgr unbind, sriov set and vgpu remove"
        refuse("no-layout-applied", "layout", message, remedy)
    steps = of_several(_taken(tree, run) for run in runs)
    name = str(runs[0].request["name"])
    locks = sorted({lock for run in runs for lock in run.locks})
    return RevertLayout(name, steps, tuple(run.name for run in runs), allow, tuple(locks))


@checks(RevertLayout)
def refuse_other_reversion(request: RevertLayout, tree: HostTree) -> None:
    """Require that the layout to be reverted still is the last applied one.

    Raises:
        Refusal: another process applied or reverted a layout in the meantime.
    """
    if not request.is_same_as(reversion(tree, tree.read(BOOT_ID), request.allow)):
        message = "another vfiomgr applied or reverted a layout in the meantime"
        refuse(
            "layout-changed-meanwhile",
            request.name,
            message,
            "check vfiomgr layout revert --dry-run, then run the command again",
        )


def _taken(tree: HostTree, run: _Run) -> Iterator[Step]:
    """The steps that a run took; only some of them if another run finished it."""
    told = read_unfinished(tree, run.name)
    return (told.steps[number] for number in told.begun)


def _last_application(tree: HostTree, boot_id: str | None) -> list[_Run]:
    """The newest runs of one layout that are not reverted, the oldest first."""
    reverted: set[str] = set()
    found: list[_Run] = []
    for run in _ended(tree):
        if run.request["kind"] == RevertLayout.kind:
            reverted.update(run.request["runs"])
        elif run.boot_id != boot_id or (found and run.layout != found[0].layout):
            break
        elif run.name not in reverted:
            found.append(run)
    return found[::-1]


def _ended(tree: HostTree) -> Iterator[_Run]:
    """All completed runs about layouts, the newest first."""
    for name in reversed(names(tree)):
        records = read_journal(tree, name)
        if not records:
            continue
        request = records[0]["request"]
        last = records[-1]
        is_done = last.get("event") == "end" and last.get("outcome") in _DONE
        if request.get("kind") in {ApplyLayout.kind, RevertLayout.kind} and is_done:
            locks = frozenset(lock for record in records for lock in record.get("locks", ()))
            yield _Run(name, request, records[0]["boot_id"], locks)
