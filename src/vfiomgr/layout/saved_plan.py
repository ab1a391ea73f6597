"""A plan for a layout that was saved for review and is applied later."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vfiomgr.documents.jsonable import API_VERSION, Misfit, from_jsonable
from vfiomgr.engine.old_journals import current
from vfiomgr.engine.request import Request
from vfiomgr.engine.step import Step
from vfiomgr.errors import InvalidDocument
from vfiomgr.layout.requests import ApplyLayout
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Mapping


KIND = "LayoutPlan"
_FOR_PEOPLE = frozenset({"description", "commands"})
_REMEDY = "create a new one: vfiomgr plan FILE --output PLAN"


class ReviewedPlan(Value):
    """A request and the steps that were planned for it."""

    request: ApplyLayout
    steps: tuple[Step, ...]


class _Written(Value):
    """The content of the document, for any request."""

    request: Request
    steps: tuple[Step, ...]


def is_plan(document: object) -> bool:
    """Whether a document is a saved plan and not a layout file."""
    return isinstance(document, dict) and document.get("kind") == KIND


def read_plan(document: Mapping[str, Any], source: str) -> ReviewedPlan:
    """Read a plan written by `vfiomgr plan --output`.

    Raises:
        InvalidDocument: another version wrote it, or it is damaged.

    """
    if document.get("api_version") != API_VERSION:
        message = (
            f"{source}: unsupported api_version {document.get('api_version')!r}, expected "
            f"{API_VERSION!r}"
        )
        raise InvalidDocument(message, _REMEDY)
    document = current(dict(document))
    told = document.get("steps")
    steps = [_inert(step) for step in told] if isinstance(told, list) else told
    try:
        plan = from_jsonable(_Written, {"request": document.get("request"), "steps": steps})
    except Misfit as error:
        message = f"{source}: not a plan of this version: {error}"
        raise InvalidDocument(message, _REMEDY) from None
    if not isinstance(plan.request, ApplyLayout):
        message = f"{source}: a plan of {plan.request.kind}, not of a layout"
        raise InvalidDocument(message, _REMEDY)
    return ReviewedPlan(plan.request, plan.steps)


def _inert(step: object) -> object:
    """A step without its descriptions for people."""
    if not isinstance(step, dict):
        return step
    return {key: value for key, value in step.items() if key not in _FOR_PEOPLE}
