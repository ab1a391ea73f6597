"""What the commands that use libvirt share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click
from click.shell_completion import CompletionItem

from vfiomgr.cli.options import Options, complete_file, flag
from vfiomgr.errors import UsageError, VfiomgrError, forbid_together
from vfiomgr.libvirt.client.binding import DEADLINE
from vfiomgr.libvirt.client.connection import Connection, connect

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from vfiomgr.snapshot.session import Session

    _Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem[str]]]

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


def _connect_option(text: str) -> Callable[[Any], Any]:
    return click.option(
        "--connect",
        "-c",
        "uri",
        metavar="URI",
        default=DEFAULT_URI,
        show_default=True,
        envvar=_VARIABLES,
        show_envvar=True,
        shell_complete=_complete_uri,
        help=text,
    )


connect_option = _connect_option("Connect to this libvirt.")


def libvirt_options(function: Callable[..., None]) -> Callable[..., None]:
    """The options of commands that libvirt can perform too; without them `uri` is None."""

    @functools.wraps(function)
    def command(*arguments: object, **options: object) -> None:
        del options["libvirt"], options["uri"]
        function(*arguments, uri=_chosen_uri(click.get_current_context()), **options)

    with_uri = _connect_option("Use this libvirt; implies --libvirt.")(command)
    choice = flag("--libvirt", text="Use the node devices of libvirt.")
    return cast("Callable[..., None]", choice(with_uri))


def _chosen_uri(context: click.Context) -> str | None:
    """The URI if libvirt was chosen; the one from the environment does not choose it."""
    is_chosen = context.params["libvirt"] or is_uri_typed(context)
    return str(context.params["uri"]) if is_chosen else None


def is_uri_typed(context: click.Context) -> bool:
    """Whether --connect is on the command line, and not in the environment."""
    return context.get_parameter_source("uri") is click.core.ParameterSource.COMMANDLINE


def forbid_with_libvirt(**options: object) -> None:
    """Reject options that only vfiomgr's own way supports."""
    for name, value in options.items():
        if value not in (None, False, ()):
            forbid_together("--libvirt", f"--{name}", "libvirt does not support it")


def require_running_host(session: Session) -> None:
    """Require the running host to change something in libvirt; a dry run only asks a chosen one."""
    if session.is_live:
        return
    if session.dry_run:
        require_libvirt_of_host(session, "pass the --connect URI of its libvirt")
        return
    otherwise = "or pass --dry-run with --connect URI"
    session.require_live("a snapshot has no libvirt", f"omit --snapshot, {otherwise}")
    message = f"a recorded host has no libvirt: {session.tree.root}"
    raise UsageError(message, f"omit --root, {otherwise}")


def require_libvirt_of_host(session: Session, remedy: str) -> None:
    """Require the running host or a chosen libvirt: the usual one is not that of another host.

    Raises:
        UsageError: the host is a snapshot or a recording, and no libvirt was chosen.
    """
    source = click.get_current_context().get_parameter_source("uri")
    if session.is_live or source is not click.core.ParameterSource.DEFAULT:
        return
    what = "a snapshot" if session.snapshot is not None else "a recorded host"
    message = f"{what} has no libvirt"
    raise UsageError(message, remedy)


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


def complete_nodedev_or(own: _Complete) -> _Complete:
    """With --libvirt, UUIDs of the mediated devices that it has; otherwise those of `own`."""

    def complete(
        context: click.Context, parameter: click.Parameter, incomplete: str
    ) -> list[CompletionItem[str]]:
        if _chosen_uri(context) is None:
            return own(context, parameter, incomplete)
        return [
            CompletionItem(mdev.uuid, help=f"{mdev.type} on {mdev.parent}, {mdev.state}")
            for mdev in _asked(context, Connection.mdevs)
            if mdev.uuid.startswith(incomplete)
        ]

    return complete


def _asked(context: click.Context, ask: Callable[[Connection], Iterable[_Named]]) -> list[_Named]:
    """What libvirt answers, where it does so at once."""
    uri = context.params.get("uri") or DEFAULT_URI
    try:
        with connected(uri, read_only=True, deadline=_COMPLETION) as connection:
            return list(ask(connection))
    except VfiomgrError:
        return []
