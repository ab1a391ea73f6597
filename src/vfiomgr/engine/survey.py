"""What earlier runs left behind: interrupted runs, damaged journals; what later runs settled."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from vfiomgr.diagnostic import refuse
from vfiomgr.engine.journal import (
    DIRECTORY,
    FIRST_STEPS,
    PLANS,
    Journal,
    all_of,
    decode,
    foreign_names,
    has_ended,
    how_to_remove,
    is_locked,
    is_plan,
    last_of,
    names,
    names_planned_steps,
)
from vfiomgr.engine.registry import step_kinds
from vfiomgr.host.owners import MOST_BYTES, NotARecord, open_own
from vfiomgr.pci import drivers
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.engine.plan import Plan
    from vfiomgr.host.tree import HostTree


class CutOff(Value):
    """A run that was interrupted by a crash, a stuck kernel or a failed rollback."""

    name: str
    summary: str
    step: str
    """The step that it was in, or was about to begin."""
    locks: frozenset[str]
    subjects: frozenset[str]
    """The functions and vGPUs that it concerned."""
    is_of_this_boot: bool
    """A reboot undoes the changes to devices, but not those to files."""
    boot_id: str | None = None
    settings: frozenset[int] = frozenset()
    """The steps that changed a setting, such as autoprobe, that only this run can restore."""
    is_finished: bool = False
    """Whether `recover` finished it, as it returns what the host needs, instead of undoing it."""
    is_settled: bool = False
    """Whether later runs have settled all steps, and only the `end` record is missing."""

    @property
    def has_settings(self) -> bool:
        """Whether only this run can restore a setting that it changed."""
        return bool(self.settings)


class Damaged(Value):
    """A journal that is not intact and cannot be read; it may hold the state of devices."""

    name: str
    why: str
    locks: frozenset[str] | None = None
    """None if the plan itself cannot be read: any device may be concerned."""
    subjects: frozenset[str] | None = None


class Survey(Value):
    """What earlier runs left behind."""

    cut_off: tuple[CutOff, ...]
    damaged: tuple[Damaged, ...]
    foreign: tuple[str, ...]
    """Other names in the journal's directory."""
    settled: tuple[CutOff, ...] = ()
    """Interrupted runs without open steps, whose end can be recorded."""


def survey(tree: HostTree, boot_id: str | None) -> Survey:
    """Examine all journals of runs that are neither running nor ended."""
    found = [run for name in names(tree) if (run := _left_by(tree, name, boot_id)) is not None]
    runs = [run for run in found if isinstance(run, CutOff)]
    return Survey(
        tuple(run for run in runs if not run.is_settled),
        tuple(run for run in found if isinstance(run, Damaged)),
        tuple(foreign_names(tree)),
        tuple(run for run in runs if run.is_settled),
    )


def cut_off_runs(tree: HostTree, boot_id: str | None) -> list[CutOff]:
    """The interrupted runs that are not running, in their order."""
    return list(survey(tree, boot_id).cut_off)


def _left_by(tree: HostTree, name: str, boot_id: str | None) -> CutOff | Damaged | None:
    """What a run left behind; None if it ended, is running, or never began."""
    try:
        with os.fdopen(open_own(tree, DIRECTORY / name), "rb") as file:
            # Who holds the lock comes first: a run that ends meanwhile has its end written.
            if is_locked(file) or has_ended(file):
                return None
            file.seek(0)
            data = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        return None  # another process has removed an old one
    except NotARecord as error:
        return Damaged(name, str(error))
    contents = decode(data)
    if contents.damage or len(data) > MOST_BYTES:
        return _damaged(name, contents.damage or "it is too large", contents.records)
    if not contents.records:
        return None
    return _cut_off(name, contents.records, boot_id, settled_in(tree, contents.records))


def _damaged(name: str, why: str, records: list[dict[str, Any]]) -> Damaged:
    """What a damaged journal still shows; nothing if its first plan or a later one is lost."""
    plans = [record for record in records if record["event"] in PLANS]
    has_first = bool(records) and records[0]["event"] == "plan"
    if not has_first or not all(map(is_plan, plans)) or not names_planned_steps(records):
        return Damaged(name, why)
    return Damaged(name, why, *_touched(plans))


def _touched(records: list[dict[str, Any]]) -> tuple[frozenset[str], frozenset[str]]:
    locks, subjects = all_of(records, "locks"), all_of(records, "subjects")
    return frozenset(locks), frozenset(filter(None, subjects))


def _cut_off(
    name: str,
    records: list[dict[str, Any]],
    boot_id: str | None,
    settled: frozenset[int] | None,
) -> CutOff:
    plan = records[0]
    begun = [record["step"] for record in records if "step" in record]
    planned = all_of(records, "steps")
    descriptions = all_of(records, "descriptions")
    last = begun[-1] if begun else 0
    is_of_this_boot = plan["boot_id"] == boot_id
    has_lost_some = not is_of_this_boot and _may_have_lost_some(planned, begun)
    left = set(begun) - (settled or set())
    settings = {number for number in left if _is_restored_later(planned, number)}
    return CutOff(
        name,
        plan["summary"],
        descriptions[last] + (", or a later one" if has_lost_some else ""),
        *_touched(records),
        is_of_this_boot,
        plan["boot_id"],
        frozenset(settings if is_of_this_boot else ()),
        is_settled=settled is not None and not left,
    )


def _may_have_lost_some(steps: Sequence[dict[str, Any]], begun: Iterable[int]) -> bool:
    """Whether further steps may have begun, whose beginnings a power cut has lost."""
    if not FIRST_STEPS <= len(set(begun)) < len(steps):
        return False
    kinds = [step_kinds().get(step["kind"]) for step in steps]
    return not any(kind is not None and kind.outlasts_reboot for kind in kinds)


def _is_restored_later(steps: Sequence[dict[str, Any]], number: int) -> bool:
    """Whether a later step of the run restores what this step changes; True for unknown kinds."""
    kind = step_kinds().get(steps[number]["kind"])
    return kind is None or kind.is_restored_later(steps[number], steps[number + 1 :])


def settled_in(tree: HostTree, records: Iterable[Mapping[str, Any]]) -> frozenset[int] | None:
    """The steps of a run that later runs have settled; None if none has recorded any.

    A later run records it before its own end, so that a kill between the two changes nothing.
    """
    found = [r["settled"] for r in records if r["event"] == "settled" and _is_done(tree, r["by"])]
    return frozenset(step for steps in found for step in steps) if found else None


def _is_done(tree: HostTree, name: str | None) -> bool:
    """Whether a run that settled another run has ended; a run without steps has no name."""
    if name is None:
        return True
    try:
        with os.fdopen(open_own(tree, DIRECTORY / name), "rb") as file:
            last = last_of(file)
    except FileNotFoundError:
        return True  # only ended runs are removed
    except NotARecord:
        return False
    return last is not None and (last["event"], last.get("outcome")) == ("end", "done")


def settle(
    tree: HostTree,
    run: CutOff,
    steps: Iterable[int],
    by: str | None,
    on_wait: Callable[[str], None],
) -> None:
    """Record that the run `by`, or one without steps, settles steps of an interrupted run."""
    _add(tree, run, "settled", {"settled": sorted(steps), "by": by}, on_wait)


def _add(
    tree: HostTree,
    run: CutOff,
    event: str,
    details: Mapping[str, object],
    on_wait: Callable[[str], None],
) -> None:
    """Add a record to the journal of an interrupted run, unless it was ended in the meantime."""
    try:
        journal = Journal.resume(tree, run.name, on_wait)
    except FileNotFoundError:
        return  # only ended runs are removed
    with journal, os.fdopen(os.dup(journal.descriptor), "rb") as file:
        if not has_ended(file):
            journal.record(event, details)


def supersede(tree: HostTree, run: CutOff, on_wait: Callable[[str], None]) -> None:
    """Close the journal of an interrupted run after a later run has settled its devices."""
    _add(tree, run, "end", {"outcome": "superseded"}, on_wait)


def unusable(left: Survey) -> Iterator[str]:
    """The ignored and damaged files in the journal's directory."""
    for name in left.foreign:
        yield f"ignoring {DIRECTORY / name}: not a journal of vfiomgr"
    for journal in left.damaged:
        about = f" (about {', '.join(sorted(journal.subjects))})" if journal.subjects else ""
        yield f"cannot read {DIRECTORY / journal.name}{about}: {journal.why}"


def refuse_lost_state(plan: Plan, left: Survey, tree: HostTree) -> None:
    """Refuse to change devices whose original state may be in an unreadable record.

    Raises:
        Refusal: a device may be concerned; the record is named.
    """
    if plan.is_empty:
        return
    touched = {*plan.resolves, *filter(None, (step.subject for step in plan.steps))}
    for journal in left.damaged:
        if _may_be_about(journal, touched, set(plan.locks)):
            file = DIRECTORY / journal.name
            _refuse(sorted(journal.subjects or ()), file, journal.why)
    for address, why in drivers.unreadable_origins(tree).items():
        if address in touched:
            _refuse([address], drivers.origin_file(address), why)


def _may_be_about(journal: Damaged, touched: set[str], locks: set[str]) -> bool:
    if journal.subjects is None or journal.locks is None:
        return True
    return not (journal.subjects.isdisjoint(touched) and journal.locks.isdisjoint(locks))


def _refuse(devices: list[str], file: str, why: str) -> NoReturn:
    of = ", ".join(devices) or "devices (which ones is not known)"
    refuse(
        "journal-unreadable",
        file,
        f"{file} cannot be read and may contain the original state of {of}: {why}",
        how_to_remove(file),
    )
