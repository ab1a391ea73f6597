"""The changes that guests make to the host while they run, and the file that records them.

One file in /run has the entries of all guests: the CPUs that remain for other work, and the huge
pages that a guest added, depend on the other guests. A reboot restores all of it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from vfiomgr.documents.jsonable import from_jsonable, to_jsonable
from vfiomgr.documents.text import parse_json
from vfiomgr.errors import InvalidDocument
from vfiomgr.paths import RUNTIME
from vfiomgr.pci.model import PciAddress
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterable

TUNED = RUNTIME / "tuned.json"
"""The record."""


class AddedPages(Value):
    """Huge pages of one size that were added on a node."""

    node: int
    """The NUMA node."""
    page_bytes: int
    """The size of a page, in bytes."""
    base: int
    """How many there were without those of guests."""
    added: int
    """How many were added for the guest."""

    @property
    def pool(self) -> tuple[int, int]:
        """Identify the pool."""
        return self.node, self.page_bytes


class PlacedInterrupts(Value):
    """Interrupts of VFIO that are kept on CPUs."""

    devices: tuple[PciAddress, ...]
    """The functions."""
    cpus: tuple[int, ...]
    """The CPUs that the guest is pinned to."""


class TunedGuest(Value):
    """What is restored when a guest ends."""

    uuid: str
    """UUID of the guest."""
    name: str
    """Name of the guest."""
    cpus: tuple[int, ...] = ()
    """The CPUs that the host's processes leave to it."""
    pages: tuple[AddedPages, ...] = ()
    """The huge pages that were added."""
    why: str = ""
    """Why the host must not sleep; empty if it may."""
    interrupts: PlacedInterrupts | None = None
    """The interrupts that are kept on its CPUs."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing is restored."""
        return not (self.cpus or self.pages or self.why or self.interrupts)


class _Written(Value):
    """The document."""

    guests: tuple[TunedGuest, ...]


def parse_tuned(text: str | None) -> tuple[TunedGuest, ...]:
    """The guests in the record; none if there is no file.

    Raises:
        InvalidDocument: it is not a record.

    """
    if text is None:
        return ()
    try:
        return from_jsonable(_Written, parse_json(text)).guests
    except ValueError as error:
        message = f"{TUNED} is not a valid record of vfiomgr: {error}"
        hint = f"stop all guests, remove {TUNED}, and reboot to restore CPUs and huge pages"
        raise InvalidDocument(message, hint) from None


def render_tuned(guests: tuple[TunedGuest, ...]) -> str:
    """The text of the record."""
    return f"{json.dumps(to_jsonable(_Written(guests)))}\n"


def others(guests: Iterable[TunedGuest], uuid: str) -> tuple[TunedGuest, ...]:
    """The guests except one."""
    return tuple(guest for guest in guests if guest.uuid != uuid)


def cpus_of(guests: Iterable[TunedGuest]) -> frozenset[int]:
    """The CPUs that the host's processes leave to guests."""
    return frozenset(cpu for guest in guests for cpu in guest.cpus)


def added_by(guests: Iterable[TunedGuest], pool: tuple[int, int]) -> int:
    """The huge pages that guests added to a pool."""
    return sum(p.added for guest in guests for p in guest.pages if p.pool == pool)
