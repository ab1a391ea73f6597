"""What the commands that use libvirt share."""

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
"""Seconds to wait for names after Tab is pressed."""
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
    help="Connect to this libvirt.",
)


def connected(
    uri: str, *, read_only: bool = False, with_events: bool = False, deadline: float | None = None
) -> AbstractContextManager[Connection]:
    """A connection for a command; --timeout also limits each answer.

    For commands that receive events, --timeout is for the guest; libvirt may need more time.
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
    """Names of domains that start with the typed text; none if libvirt does not answer.

    A name with control characters is omitted, because shells use candidates unchanged.
    """
    uri = context.params.get("uri") or DEFAULT_URI
    try:
        with connected(uri, read_only=True, deadline=_COMPLETION) as connection:
            names = connection.domain_names()
    except VfiomgrError:
        return []
    return [name for name in names if name.startswith(incomplete) and name.isprintable()]
