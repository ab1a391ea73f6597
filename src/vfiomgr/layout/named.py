"""Requests to apply a layout: from its file, or as a plan that was saved for review."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from vfiomgr.diagnostic import Override
from vfiomgr.documents.jsonable import API_VERSION, Misfit, from_jsonable, wrong_version
from vfiomgr.documents.text import source_of, text_of
from vfiomgr.engine.plan import Request, Step
from vfiomgr.errors import InvalidDocument
from vfiomgr.host.owners import find_owner
from vfiomgr.layout import requests
from vfiomgr.layout.document import choose_layout, read_layouts
from vfiomgr.layout.requests import ApplyLayout as LayoutRequest
from vfiomgr.paths import MACHINE_ID
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree
    from vfiomgr.layout.model import Layout
    from vfiomgr.snapshot.source import HostSource


class ApplyLayout(Value):
    """Apply a layout of `file`; devices already in the desired state are left alone."""

    file: str | os.PathLike[str]
    """A layout file in YAML or JSON."""
    layout: str | None = None
    """The name of the layout, if the file has several."""
    allow: frozenset[Override] = frozenset()
    """Safety checks to override; the error message names them."""
    adopt: bool = False
    """Record vGPUs that others created and that fit the layout as vfiomgr's own."""

    def request(self, host: HostSource) -> requests.ApplyLayout:
        """The request for a host.

        Raises:
            UsageError: the file cannot be read, or an account does not exist on the host.
            InvalidDocument: the layout does not exist or is malformed.
        """
        path = os.fspath(self.file)
        text = text_of(path, "the layout file")
        found = layout_of_text(host, text, source_of(path), self.layout, self.allow)
        return replace(found, adopt=self.adopt)


def layout_of_text(
    host: HostSource, text: str, source: str, name: str | None, allow: frozenset[Override]
) -> requests.ApplyLayout:
    """The request for a layout in a text, with the facts of this host that it needs."""
    chosen, layout = choose_layout(read_layouts(text, source), name)
    tree = None if host.snapshot is not None else host.tree
    return layout_request(tree, chosen, layout, allow=allow)


def layout_request(
    tree: HostTree | None,
    name: str,
    layout: Layout,
    *,
    allow: frozenset[Override] = frozenset(),
) -> requests.ApplyLayout:
    """The request for a layout, with the facts of the host that it needs: accounts, machine ID.

    Raises:
        UsageError: an account does not exist on the host; without a tree, it is not a number.
    """
    from hashlib import sha256  # noqa: PLC0415 - slow to import

    owners = tuple(find_owner(tree, owner) for owner in layout.owners)
    machine = None if tree is None else tree.read(MACHINE_ID)
    # The identifier itself is confidential (machine-id(5)).
    seed = sha256(f"vfiomgr {machine}".encode()).hexdigest() if machine else ""
    return requests.ApplyLayout(name, layout, owners, seed, allow)


KIND = "LayoutPlan"
_FOR_PEOPLE = frozenset({"description", "commands"})
_REMEDY = "create a new one: vfiomgr plan FILE --output PLAN"


class ReviewedPlan(Value):
    """A request and the steps that were planned for it."""

    request: LayoutRequest
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
        message = f"{source}: {wrong_version(document.get('api_version'))}"
        raise InvalidDocument(message, _REMEDY)
    told = document.get("steps")
    steps = [_inert(step) for step in told] if isinstance(told, list) else told
    try:
        plan = from_jsonable(_Written, {"request": document.get("request"), "steps": steps})
    except Misfit as error:
        message = f"{source}: not a plan of this version: {error}"
        raise InvalidDocument(message, _REMEDY) from None
    if not isinstance(plan.request, LayoutRequest):
        message = f"{source}: a plan of {plan.request.kind}, not of a layout"
        raise InvalidDocument(message, _REMEDY)
    return ReviewedPlan(plan.request, plan.steps)


def _inert(step: object) -> object:
    """A step without its descriptions for people."""
    if not isinstance(step, dict):
        return step
    return {key: value for key, value in step.items() if key not in _FOR_PEOPLE}
