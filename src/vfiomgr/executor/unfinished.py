"""A run that was cut off, as its journal describes it: what it was to do, and how far it came."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from vfiomgr.errors import InvalidDocument
from vfiomgr.executor.journal import read_journal
from vfiomgr.executor.journal_files import DIRECTORY
from vfiomgr.executor.records import all_of
from vfiomgr.model.intent import ApplyLayout, InstallLayout, Intent
from vfiomgr.model.step import Step

if TYPE_CHECKING:
    from pydantic import TypeAdapter

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
    from vfiomgr.model.step import Step  # noqa: F401, PLC0415

    if kind in (ApplyLayout, InstallLayout):
        from vfiomgr.model.layout import Layout  # noqa: F401, PLC0415 - slow to import
    return TypeAdapter(kind)
