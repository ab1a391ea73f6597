"""The versions of programs for which guests are written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.errors import UsageError
from vfiomgr.pci.guest_support import LIBVIRT, installed_version
from vfiomgr.units import Version

if TYPE_CHECKING:
    from vfiomgr.snapshot.source import HostSource

QEMU_EXAMPLE = "11.1"


def given_version(option: str, text: str | None, example: str) -> Version | None:
    """The version that a user gives; None for none.

    Raises:
        UsageError: it is invalid.
    """
    try:
        return None if text is None else Version.parse(text)
    except UsageError as error:
        message = f"invalid {option}: {error.message}"
        hint = f"write the major and the minor number, e.g. {option} {example}"
        raise UsageError(message, hint) from None


def version_of_host(host: HostSource, programs: tuple[str, ...]) -> Version | None:
    """What the first of some programs prints, or the version that a snapshot records."""
    if host.snapshot is None:
        return installed_version(host.tree, programs)
    support = host.scan().guest_support
    recorded = support and (support.libvirt if programs == LIBVIRT else support.qemu)
    return Version.parse(recorded) if recorded else None
