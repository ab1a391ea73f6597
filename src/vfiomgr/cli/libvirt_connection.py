"""What the commands that talk to libvirt share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from vfiomgr.adapters.libvirt.connection import Connection

DEFAULT_URI = "qemu:///system"
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
    uri: str, *, read_only: bool = False, with_events: bool = False
) -> AbstractContextManager[Connection]:
    """A connection for a command."""
    from vfiomgr.adapters.libvirt.connection import connect  # noqa: PLC0415 - only when used

    return connect(uri, read_only=read_only, with_events=with_events)


def complete_domain(
    context: click.Context, _parameter: click.Parameter, incomplete: str
) -> list[str]:
    """Names of domains that continue what is typed."""
    uri = context.params.get("uri") or DEFAULT_URI
    with connected(uri, read_only=True) as connection:
        names = connection.domain_names()
    return [name for name in names if name.startswith(incomplete)]
