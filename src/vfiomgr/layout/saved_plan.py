"""A plan for a layout that was written down to be looked at, and is applied later."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vfiomgr.documents.jsonable import API_VERSION
from vfiomgr.documents.reader import first_error
from vfiomgr.engine.step import Step
from vfiomgr.errors import InvalidDocument
from vfiomgr.layout.requests import ApplyLayout

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic import TypeAdapter

KIND = "LayoutPlan"
_FOR_PEOPLE = frozenset({"description", "commands"})
_REMEDY = "make it anew with: vfiomgr plan FILE --out PLAN"


@dataclass(frozen=True, slots=True)
class ReviewedPlan:
    """What was to be done, and the steps that it took on the host as it was."""

    intent: ApplyLayout
    steps: tuple[Step, ...]


def is_plan(document: object) -> bool:
    """Whether a document is one of these, and no layout file."""
    return isinstance(document, dict) and document.get("kind") == KIND


def read_plan(document: Mapping[str, Any], source: str) -> ReviewedPlan:
    """Read what `vfiomgr plan --out` wrote.

    Raises:
        InvalidDocument: another version wrote it, or it is damaged.

    """
    from pydantic import ValidationError  # noqa: PLC0415 - documents only

    adapt_intent, adapt_steps = _adapters()
    if document.get("api_version") != API_VERSION:
        message = f"{source}: api_version is {document.get('api_version')!r}, not {API_VERSION!r}"
        raise InvalidDocument(message, _REMEDY)
    try:
        intent = adapt_intent.validate_python(document.get("intent"))
        told = document.get("steps")
        steps = adapt_steps.validate_python(
            [_inert(step) for step in told] if isinstance(told, list) else told
        )
    except ValidationError as error:
        message = f"{source}: not a plan of this version: {first_error(error)}"
        raise InvalidDocument(message, _REMEDY) from None
    return ReviewedPlan(intent, steps)


@functools.cache
def _adapters() -> tuple[TypeAdapter[ApplyLayout], TypeAdapter[tuple[Step, ...]]]:
    from pydantic import TypeAdapter  # noqa: PLC0415 - documents only

    # pydantic looks for the names of fields' types among those of this function.
    from vfiomgr.layout.model import Layout  # noqa: F401, PLC0415

    return TypeAdapter(ApplyLayout), TypeAdapter(tuple[Step, ...])


def _inert(step: object) -> object:
    """A step without what it says to people."""
    if not isinstance(step, dict):
        return step
    return {key: value for key, value in step.items() if key not in _FOR_PEOPLE}
