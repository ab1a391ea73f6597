"""What the commands that use libvirt share."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import click
from click.shell_completion import CompletionItem

from vfiomgr.cli.options import Options, complete_file
from vfiomgr.errors import VfiomgrError
from vfiomgr.libvirt.client.binding import DEADLINE
from vfiomgr.libvirt.client.connection import Connection, connect

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager

_Named = TypeVar("_Named")

DEFAULT_URI = "qemu:///system"
_COMPLETION = 2.0
"""Seconds to wait for names after Tab is pressed."""
_VARIABLES = ["VFIOMGR_CONNECT", "LIBVIRT_DEFAULT_URI"]

_URIS = (DEFAULT_URI, "qemu:///session", "qemu+ssh://")


def _complete_uri(
    _context: click.Context, _parameter: click.Parameter, incomplete: str
) -> list[str]:
    """How URIs of QEMU begin."""
    return [uri for uri in _URIS if uri.startswith(incomplete)]


connect_option = click.option(
    "--connect",
    "-c",
    "uri",
    metavar="URI",
    default=DEFAULT_URI,
    show_default=True,
    envvar=_VARIABLES,
    show_envvar=True,
    shell_complete=_complete_uri,
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
    """Names of domains that continue what is typed; none where libvirt does not answer."""
    names = _asked(context, Connection.domain_names)
    return [name for name in names if name.startswith(incomplete)]


def complete_domain_or_file(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    """Names of domains, beside files."""
    domains = complete_domain(context, parameter, incomplete)
    files = complete_file(context, parameter, incomplete)
    return [*files, *(CompletionItem(name) for name in domains)]


def complete_nodedev(
    context: click.Context, _parameter: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    """UUIDs of the mediated devices that libvirt has; none where it does not answer."""
    mdevs = _asked(context, Connection.mdevs)
    return [
        CompletionItem(mdev.uuid, help=f"{mdev.type} on {mdev.parent}, {mdev.state}")
        for mdev in mdevs
        if mdev.uuid.startswith(incomplete)
    ]


def _asked(context: click.Context, ask: Callable[[Connection], Iterable[_Named]]) -> list[_Named]:
    """What libvirt answers, where it does so at once."""
    uri = context.params.get("uri") or DEFAULT_URI
    try:
        with connected(uri, read_only=True, deadline=_COMPLETION) as connection:
            return list(ask(connection))
    except VfiomgrError:
        return []
