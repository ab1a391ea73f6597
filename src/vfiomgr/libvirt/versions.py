"""The versions of libvirt and QEMU that XML is written for."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from vfiomgr.errors import UsageError
from vfiomgr.pci.guest_support import LIBVIRT, QEMU, installed_version
from vfiomgr.units import Version

if TYPE_CHECKING:
    from vfiomgr.snapshot.source import HostSource

ASSUMED = "9.0.0"
"""Assumed if no libvirt is known: it supports every feature, and so do later releases."""


class Versions:
    """The versions that a user gives, or else those of the host; queried once, when needed.

    A version of libvirt that a user gives means another host, so the QEMU of this one does not
    count.

    Raises:
        UsageError: a given version is invalid.

    """

    def __init__(self, host: HostSource, libvirt: str | None, qemu: str | None) -> None:
        self._host = host
        self._libvirt = _given("--libvirt-version", libvirt, "12.8")
        self._qemu = _given("--qemu-version", qemu, "11.1")
        self.is_elsewhere = libvirt is not None
        """Whether the XML is for another host."""

    @cached_property
    def known_libvirt(self) -> Version | None:
        """The version of libvirt; None if it is unknown."""
        return self._libvirt or self._of_host(LIBVIRT)

    @cached_property
    def known_qemu(self) -> Version | None:
        """The version of QEMU; None if it is unknown."""
        if self._qemu is not None or self.is_elsewhere:
            return self._qemu
        return self._of_host(QEMU)

    @cached_property
    def libvirt(self) -> Version:
        """The version of libvirt, or the assumed one with a note."""
        if self.known_libvirt is None:
            self._host.on_note(f"libvirt not found; assuming {ASSUMED} (set --libvirt-version)")
        return self.known_libvirt or Version.parse(ASSUMED)

    @cached_property
    def qemu(self) -> Version | None:
        """The version of QEMU; if it is unknown, a note says what that means."""
        if self.known_qemu is None:
            text = "the version of QEMU is unknown: what depends on it is not checked"
            self._host.on_note(f"{text} (set --qemu-version)")
        return self.known_qemu

    def _of_host(self, programs: tuple[str, ...]) -> Version | None:
        """What the first of some programs prints, or the version that a snapshot records."""
        if self._host.snapshot is None:
            return installed_version(self._host.tree, programs)
        support = self._host.scan().guest_support
        recorded = support and (support.libvirt if programs == LIBVIRT else support.qemu)
        return Version.parse(recorded) if recorded else None


def _given(option: str, text: str | None, example: str) -> Version | None:
    try:
        return None if text is None else Version.parse(text)
    except UsageError as error:
        message = f"invalid {option}: {error.message}"
        hint = f"write the major and the minor number, e.g. {option} {example}"
        raise UsageError(message, hint) from None
