"""A plan: the steps from the host as it is to what a request wants."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vfiomgr.documents.jsonable import API_VERSION, to_jsonable
from vfiomgr.documents.printable import printable
from vfiomgr.engine.step import Step
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

FIRST = 0
"""The group whose steps come before those of all others."""
LAST = -1
"""The group whose steps come after those of all others."""


class Plan(Value):
    """What `--dry-run` prints is what a run executes."""

    summary: str
    steps: tuple[Step, ...]
    locks: tuple[str, ...] = ()
    """Names of what no other process may change meanwhile, e.g. `group-38`."""
    notes: tuple[str, ...] = ()
    """What a reader should know: companions that come along, functions that are left alone."""
    already: tuple[str, ...] = ()
    """What is in the wanted state and not touched."""
    resolves: tuple[str, ...] = ()
    """The functions and vGPUs that are as somebody wants them afterwards, moved or not."""
    deferred: tuple[str, ...] = ()
    """What can be planned only once this is done: about functions that do not exist yet."""
    parallel_groups: tuple[int, ...] = ()
    """For each step its group; they run side by side, after FIRST, before LAST. Empty: in order."""
    not_checked: tuple[str, ...] = ()
    """What could not be looked at before it was made, and what is missing for that."""

    @property
    def is_empty(self) -> bool:
        """Whether the host is as wanted already."""
        return not self.steps

    def lines(self) -> Iterator[str]:
        """What `--dry-run` prints: each step with its number and its shell commands."""
        yield f"plan: {self.summary}"
        yield from (f"  {text}" for text in (*self.notes, *self.already))
        if self.is_empty:
            yield "nothing to do"
        for number, step in enumerate(self.steps, start=1):
            yield f"{number:3}. {step.describe()}"
            yield from (f"       {command}" for command in step.commands())
        yield from (f"then: {text}" for text in self.deferred)

    def __str__(self) -> str:
        """The lines, harmless for a terminal; then what was not checked."""
        unseen = (f"not checked: {text}" for text in self.not_checked)
        return "\n".join(map(printable, (*self.lines(), *unseen)))

    def to_document(self) -> dict[str, Any]:
        """The plan as documents have it: of each step its fields and its shell commands."""
        return {
            "summary": self.summary,
            "notes": self.notes,
            "already": self.already,
            "locks": self.locks,
            "steps": [
                {
                    "description": step.describe(),
                    "commands": step.commands(),
                    **to_jsonable(step),
                }
                for step in self.steps
            ],
        }

    def to_json(self) -> str:
        """What `--dry-run --format json` prints: a `Plan` of the version vfiomgr/v1."""
        import json  # noqa: PLC0415 - few plans become documents

        body = to_jsonable({**self.to_document(), "not_checked": self.not_checked})
        document = {"api_version": API_VERSION, "kind": "Plan", **body}
        return json.dumps(document, indent=2) + "\n"


def joined(summary: str, plans: Sequence[Plan]) -> Plan:
    """One plan of several, whose steps are taken in their order, without groups."""
    return Plan(
        summary,
        tuple(step for plan in plans for step in plan.steps),
        locks=tuple(sorted({lock for plan in plans for lock in plan.locks})),
        notes=_distinct(note for plan in plans for note in plan.notes),
        already=_distinct(text for plan in plans for text in plan.already),
        resolves=_distinct(name for plan in plans for name in plan.resolves),
        deferred=_distinct(text for plan in plans for text in plan.deferred),
    )


def _distinct(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(texts))
