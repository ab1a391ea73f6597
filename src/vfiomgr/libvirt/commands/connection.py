"""What the commands that talk to libvirt share."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import click

from vfiomgr.cli.output import note
from vfiomgr.cli.session import Session
from vfiomgr.errors import UsageError, VfiomgrError

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from vfiomgr.libvirt.client.connection import Connection
    from vfiomgr.version import Version


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
    uri: str,
    *,
    read_only: bool = False,
    with_events: bool = False,
    deadline: float | None = None,
) -> AbstractContextManager[Connection]:
    """A connection for a command, whose --deadline is for each answer, too.

    Where events are heard that is what a guest has, which may be less than libvirt needs.
    """
    from vfiomgr.libvirt.client.connection import connect  # noqa: PLC0415 - only when used
    from vfiomgr.libvirt.client.deadline import DEADLINE  # noqa: PLC0415

    seconds = deadline or _deadline_of_command() or DEADLINE
    seconds = max(seconds, DEADLINE) if with_events else seconds
    return connect(uri, read_only=read_only, with_events=with_events, deadline=seconds)


def _deadline_of_command() -> float | None:
    context = click.get_current_context(silent=True)
    session = context.find_object(Session) if context else None
    return session.deadline if session else None


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


ASSUMED = "9.0.0"
"""What an unknown libvirt is taken for: all that it reads, later ones read too."""
_DAEMONS = ("libvirtd", "virtqemud", "virsh")
_QEMU = ("qemu-system-x86_64", "qemu-system-aarch64", "/usr/libexec/qemu-kvm")
_SECONDS = 5.0


def version_option(function: Any) -> Any:  # noqa: ANN401 - click decorates untyped functions
    """The option that tells the version of libvirt."""
    return click.option(
        "--libvirt-version",
        metavar="VERSION",
        help="Write for this libvirt, e.g. 10.0; by default for the one that is installed.",
    )(function)


def libvirt_version(session: Session, told: str | None) -> Callable[[], Version]:
    """The version of libvirt that is told, or installed; it is asked for once, when called.

    Raises:
        UsageError: what is told is no version.

    """
    known = None if told is None else _parsed(told)

    @cache
    def version() -> Version:
        found = known or _installed(session, _DAEMONS)
        if found is None:
            note(f"no libvirt is installed here: this is for {ASSUMED}; --libvirt-version tells")
        return found or _parsed(ASSUMED)

    return version


def qemu_version(session: Session) -> Callable[[], Version | None]:
    """The version of QEMU that is installed, None where there is none; asked for when called."""
    return cache(lambda: _installed(session, _QEMU))


def _installed(session: Session, programs: tuple[str, ...]) -> Version | None:
    """What the first of some programs tells of itself; of another host's tree, nothing."""
    if session.snapshot is not None:
        return None
    for program in programs:
        words = (session.tree.run((program, "--version"), _SECONDS) or "").split()
        for word in words:
            if not word[:1].isdecimal():
                continue
            try:
                return _parsed(word)
            except UsageError:
                continue
    return None


def _parsed(text: str) -> Version:
    from vfiomgr.version import Version  # noqa: PLC0415 - few devices ask

    return Version.parse(text)
