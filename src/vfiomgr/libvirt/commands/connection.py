"""What the commands that talk to libvirt share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from vfiomgr.cli.options import Options
from vfiomgr.errors import VfiomgrError
from vfiomgr.libvirt.client.binding import DEADLINE
from vfiomgr.libvirt.client.connection import connect

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from vfiomgr.libvirt.client.connection import Connection


DEFAULT_URI = "qemu:///system"
_COMPLETION = 2.0
"""Seconds that a person waits for names after pressing Tab."""
_VARIABLES = ["VFIOMGR_CONNECT", "LIBVIRT_DEFAULT_URI"]

connect_option = click.option(
    "--connect",
    "-c",
    "uri",
    metavar="URI",
    default=DEFAULT_URI,
    show_default=True,
    envvar=_VARIABLES,
    show_envvar=True,
    help="Which libvirt.",
)


def connected(
    uri: str, *, read_only: bool = False, with_events: bool = False, deadline: float | None = None
) -> AbstractContextManager[Connection]:
    """A connection for a command, whose --timeout is for each answer, too.

    Where events are heard that is what a guest has, which may be less than libvirt needs.
    """
    seconds = deadline or _deadline_of_command() or DEADLINE
    seconds = max(seconds, DEADLINE) if with_events else seconds
    return connect(uri, read_only=read_only, with_events=with_events, deadline=seconds)


def _deadline_of_command() -> float | None:
    context = click.get_current_context(silent=True)
    options = context.find_object(Options) if context else None
    return options.timeout if options else None


def complete_domain(
    context: click.Context, _parameter: click.Parameter, incomplete: str
) -> list[str]:
    """Names of domains that continue what is typed; none where libvirt does not answer.

    A name that a terminal would act on is left out: a shell takes a candidate as it is.
    """
    uri = context.params.get("uri") or DEFAULT_URI
    try:
        with connected(uri, read_only=True, deadline=_COMPLETION) as connection:
            names = connection.domain_names()
    except VfiomgrError:
        return []
    return [name for name in names if name.startswith(incomplete) and name.isprintable()]
