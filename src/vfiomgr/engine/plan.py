"""A plan: the steps from the current state of the host to the requested one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vfiomgr.documents.jsonable import API_VERSION, to_jsonable
from vfiomgr.documents.printable import printable
from vfiomgr.engine.step import Step
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

FIRST = 0
"""The group whose steps come before all others."""
LAST = -1
"""The group whose steps come after all others."""


class Plan(Value):
    """The steps of a request: printed by `--dry-run`, executed by a run."""

    summary: str
    steps: tuple[Step, ...]
    locks: tuple[str, ...] = ()
    """What no other process may change during the run, e.g. `group-38`."""
    notes: tuple[str, ...] = ()
    """Notes for the reader: companion functions, functions that are left alone."""
    already: tuple[str, ...] = ()
    """What already is in the desired state and is not touched."""
    resolves: tuple[str, ...] = ()
    """The functions and vGPUs that will be in the desired state, changed or not."""
    deferred: tuple[str, ...] = ()
    """What can only be planned after this plan: it concerns functions that do not exist yet."""
    parallel_groups: tuple[int, ...] = ()
    """Each step's group; groups run in parallel, after FIRST and before LAST. Empty: in order."""
    not_checked: tuple[str, ...] = ()
    """What could not be checked for the plan, and what is missing for that."""

    @property
    def is_empty(self) -> bool:
        """Whether the host already is in the desired state."""
        return not self.steps

    def lines(self) -> Iterator[str]:
        """The output of `--dry-run`: each step with its number and its shell commands."""
        yield f"plan: {self.summary}"
        yield from (f"  {text}" for text in (*self.notes, *self.already))
        if self.is_empty:
            yield "nothing to do"
        for number, step in enumerate(self.steps, start=1):
            yield f"{number:3}. {step.describe()}"
            yield from (f"       {command}" for command in step.commands())
        yield from (f"then: {text}" for text in self.deferred)

    def __str__(self) -> str:
        """The lines, escaped for a terminal, and what was not checked."""
        unseen = (f"not checked: {text}" for text in self.not_checked)
        return "\n".join(map(printable, (*self.lines(), *unseen)))

    def to_document(self) -> dict[str, Any]:
        """The plan for documents: the fields and shell commands of each step."""
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
        """The output of `--dry-run --format json`: a `Plan` document of version vfiomgr/v1."""
        import json  # noqa: PLC0415 - few plans become documents

        body = to_jsonable({**self.to_document(), "not_checked": self.not_checked})
        document = {"api_version": API_VERSION, "kind": "Plan", **body}
        return json.dumps(document, indent=2) + "\n"


def joined(summary: str, plans: Sequence[Plan]) -> Plan:
    """Several plans as one, with their steps in order and without groups."""
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
