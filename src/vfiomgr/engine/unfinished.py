"""A run that was cut off, as its journal describes it: what it was to do, and how far it came."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from vfiomgr.engine.journal import read_journal
from vfiomgr.engine.journal_files import DIRECTORY
from vfiomgr.engine.journal_records import all_of
from vfiomgr.engine.requests import Intent
from vfiomgr.engine.steps import Step
from vfiomgr.engine.topics import covered
from vfiomgr.errors import InvalidDocument
from vfiomgr.layout.requests import ApplyLayout, InstallLayout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pydantic import TypeAdapter

    from vfiomgr.engine.journal import CutOff, Journal
    from vfiomgr.host.tree import HostTree


@dataclass(frozen=True, slots=True)
class Unfinished:
    """What a journal that was cut off still holds: the wish, the steps, those that were begun."""

    intent: Intent
    steps: tuple[Step, ...]
    begun: tuple[int, ...]


def read_unfinished(tree: HostTree, name: str) -> Unfinished:
    """Read a run that was cut off, so that it can be ended.

    Raises:
        InvalidDocument: another version of vfiomgr wrote it, or it is damaged.

    """
    from pydantic import ValidationError  # noqa: PLC0415 - documents only

    records = read_journal(tree, name)
    try:
        intent = _read_intent(records[0]["intent"])
        steps = _steps_adapter().validate_python(all_of(records, "steps"))
    except (ValidationError, KeyError, TypeError) as error:
        message = f"{DIRECTORY / name} cannot be read by this vfiomgr: {error}"
        raise InvalidDocument(
            " ".join(message.split())[:300],
            "end it with the vfiomgr that wrote it, or look at the devices and remove the file",
        ) from None
    begun = [record["step"] for record in records if record["event"] == "begin"]
    undone = {record["step"] for record in records if record["event"] == "undo-done"}
    return Unfinished(intent, steps, tuple(step for step in begun if step not in undone))


def _read_intent(data: dict[str, Any]) -> Intent:
    """An intent as a journal holds it.

    Raises:
        ValidationError: it is none.
        KeyError: of a kind that this version does not know.

    """
    kinds = {kind.__dataclass_fields__["kind"].default: kind for kind in get_args(Intent)}
    intent: Intent = _intent_adapter(kinds[data["kind"]]).validate_python(data)
    return intent


@functools.cache
def _steps_adapter() -> TypeAdapter[tuple[Step, ...]]:
    """What reads steps; to make it takes longer than all else of a recovery."""
    from pydantic import TypeAdapter  # noqa: PLC0415 - documents only

    return TypeAdapter(tuple[Step, ...])


@functools.cache
def _intent_adapter(kind: type[Intent]) -> TypeAdapter[Intent]:
    """What reads intents of a kind."""
    from pydantic import TypeAdapter  # noqa: PLC0415 - documents only

    # pydantic looks for the names of fields' types among those of this function.
    from vfiomgr.engine.steps import Step  # noqa: F401, PLC0415

    if kind in (ApplyLayout, InstallLayout):
        from vfiomgr.layout.model import Layout  # noqa: F401, PLC0415 - slow to import
    return TypeAdapter(kind)


def overlapping(runs: Sequence[CutOff]) -> list[tuple[CutOff, ...]]:
    """Runs of one boot that touched the same, each group oldest first; the newest group first.

    A reboot ends what a run did to devices, so a run of another boot is undone by itself.
    """
    groups: list[tuple[CutOff, ...]] = []
    for run in runs:
        joined = [group for group in groups if any(_overlap(run, other) for other in group)]
        groups = [group for group in groups if group not in joined]
        groups.append((*(other for group in joined for other in group), run))
    order = {run: number for number, run in enumerate(runs)}
    return [tuple(sorted(group, key=order.__getitem__)) for group in reversed(groups)]


def _overlap(one: CutOff, other: CutOff) -> bool:
    if one.boot_id != other.boot_id:
        return False
    return bool(one.locks & other.locks or one.subjects & other.subjects)


@dataclass(frozen=True, slots=True)
class Sequel:
    """The steps of several runs in their order, numbered from 0 through all of them."""

    steps: tuple[Step, ...]
    firsts: tuple[int, ...]
    """The number of the first step of each run."""
    begun: tuple[int, ...]
    """The steps to undo: those that no earlier run leads back from."""
    covered: Mapping[int, int]
    """Each other step that was begun, with the one that leads back from it."""


def sequel(runs: Sequence[Unfinished]) -> Sequel:
    """Runs as one, the oldest first."""
    steps: list[Step] = []
    firsts: list[int] = []
    begun: list[list[tuple[int, Step]]] = []
    for run in runs:
        firsts.append(len(steps))
        begun.append([(len(steps) + number, run.steps[number]) for number in run.begun])
        steps += run.steps
    left_out = covered(begun)
    numbers = (number for run in begun for number, _ in run)
    return Sequel(
        tuple(steps), tuple(firsts), tuple(n for n in numbers if n not in left_out), left_out
    )


class Journals:
    """The journals of such runs, written as one: each gets what is about its own steps."""

    def __init__(self, journals: Sequence[Journal], runs: Sequel) -> None:
        self._journals = journals
        self._runs = runs

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The open files."""
        return tuple(one for journal in self._journals for one in journal.descriptors)

    def record(
        self, event: str, details: Mapping[str, object] | None = None, *, durable: bool = True
    ) -> None:
        """Append a record; an end is that of all runs, the newest first.

        A step that an earlier run leads back from is undone with that one, and recorded before it:
        whoever is interrupted here never finds a later run alone.
        """
        number = (details or {}).get("step")
        if not isinstance(number, int):
            for journal in reversed(self._journals):
                journal.record(event, details, durable=durable)
            return
        alike = [step for step, by in self._runs.covered.items() if by == number]
        for step in (*(alike if event == "undo-done" else ()), number):
            run = max(n for n, first in enumerate(self._runs.firsts) if first <= step)
            own = step - self._runs.firsts[run]
            self._journals[run].record(event, {**(details or {}), "step": own}, durable=durable)
