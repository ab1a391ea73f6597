"""The versions of libvirt and QEMU that XML is written for."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from vfiomgr.guests.versions import QEMU_EXAMPLE, given_version, version_of_host
from vfiomgr.pci.guest_support import LIBVIRT, QEMU
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
        self._libvirt = given_version("--libvirt-version", libvirt, "12.8")
        self._qemu = given_version("--qemu-version", qemu, QEMU_EXAMPLE)
        self.is_elsewhere = libvirt is not None
        """Whether the XML is for another host."""

    @cached_property
    def known_libvirt(self) -> Version | None:
        """The version of libvirt; None if it is unknown."""
        return self._libvirt or version_of_host(self._host, LIBVIRT)

    @cached_property
    def known_qemu(self) -> Version | None:
        """The version of QEMU; None if it is unknown."""
        if self._qemu is not None or self.is_elsewhere:
            return self._qemu
        return version_of_host(self._host, QEMU)

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
