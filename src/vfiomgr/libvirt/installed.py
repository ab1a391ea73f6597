"""The versions of libvirt and QEMU that XML is written for."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from vfiomgr.errors import UsageError
from vfiomgr.version import Version

if TYPE_CHECKING:
    from collections.abc import Callable

    from vfiomgr.snapshot.source import HostSource

ASSUMED = "9.0.0"
"""What an unknown libvirt is taken for: all that it reads, later ones read too."""
_DAEMONS = ("libvirtd", "virtqemud", "virsh")
_QEMU = ("qemu-system-x86_64", "qemu-system-aarch64", "/usr/libexec/qemu-kvm")
_SECONDS = 5.0


def libvirt_version(host: HostSource, told: str | None) -> Callable[[], Version]:
    """The version of libvirt that is told, or installed; it is asked for once, when called.

    Raises:
        UsageError: what is told is no version.

    """
    known = None if told is None else Version.parse(told)

    @cache
    def version() -> Version:
        found = known or _installed(host, _DAEMONS)
        if found is None:
            host.on_note(
                f"no libvirt is installed here: this is for {ASSUMED}; --libvirt-version tells"
            )
        return found or Version.parse(ASSUMED)

    return version


def qemu_version(host: HostSource) -> Callable[[], Version | None]:
    """The version of QEMU that is installed, None where there is none; asked for when called."""
    return cache(lambda: _installed(host, _QEMU))


def _installed(host: HostSource, programs: tuple[str, ...]) -> Version | None:
    """What the first of some programs tells of itself; of another host's tree, nothing."""
    if host.snapshot is not None:
        return None
    for program in programs:
        words = (host.tree.run((program, "--version"), _SECONDS) or "").split()
        for word in words:
            if not word[:1].isdecimal():
                continue
            try:
                return Version.parse(word)
            except UsageError:
                continue
    return None
