"""The templates of the picture, and the colours of IOMMU groups."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from vfiomgr.documents.resources import resource_directory

if TYPE_CHECKING:
    from collections.abc import Iterable

    from jinja2 import Environment

    from vfiomgr.topology.view import Row

HUES = tuple(number * 150 % 360 for number in range(12))
"""Degrees; neighbours in the list differ much. Groups beyond the twelfth share colours."""


def colours_of(rows: Iterable[Row]) -> dict[int, int]:
    """The colour of each IOMMU group as a place in `HUES`, in the order in which they appear."""
    groups = (row.item.group for row in rows if row.item.group is not None)
    return {group: place % len(HUES) for place, group in enumerate(dict.fromkeys(groups))}


def render(name: str, **values: object) -> str:
    """A template of templates/topology; every value is escaped."""
    return _environment().get_template(name).render(values)


def asset(name: str) -> str:
    """A file that stands in a document as it is."""
    with open(f"{_directory()}/{name}", encoding="utf-8") as file:
        return file.read()


def _directory() -> str:
    return f"{resource_directory('templates')}/topology"


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # noqa: PLC0415 - slow

    return Environment(
        loader=FileSystemLoader(_directory()),
        undefined=StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
