"""libvirt's XML, an element a template of templates/libvirt (libvirt.org/formatdomain.html)."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING

from vfiomgr.adapters.resources import resource_directory

if TYPE_CHECKING:
    from jinja2 import Environment

    from vfiomgr.model.hostdev import GuestHostdev


def hostdev(planned: GuestHostdev) -> str:
    """The element of one function or mediated device."""
    return _render(f"hostdev-{planned.device.kind}", device=planned.device, title=planned.title)


def _render(name: str, **values: object) -> str:
    return _environment().get_template(f"{name}.xml.j2").render(values)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # noqa: PLC0415 - slow

    environment = Environment(
        loader=FileSystemLoader(resource_directory("templates") / "libvirt"),
        undefined=StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["comment"] = _comment
    return environment


def _comment(text: str) -> str:
    """The text as a comment may hold it: no two hyphens in a row, nothing unprintable."""
    return "".join(c for c in re.sub(r"-(?=-)", "- ", text) if c.isprintable()).rstrip("-")
