"""Which libvirt and which QEMU what we print is for: told, asked of the machine, or assumed."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import click

from vfiomgr.cli.output import note
from vfiomgr.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from vfiomgr.cli.session import Session
    from vfiomgr.model.version import Version

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
    from vfiomgr.model.version import Version  # noqa: PLC0415 - few devices ask

    return Version.parse(text)
