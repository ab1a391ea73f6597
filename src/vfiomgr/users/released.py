"""Records of cards that the desktop released for a guest: what is restored when they return.

They are in /run, since a reboot restores all of it.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import msgspec

from vfiomgr.documents.jsonable import from_jsonable, to_jsonable
from vfiomgr.documents.text import parse_json
from vfiomgr.host.owners import NotARecord, read_own
from vfiomgr.paths import RUNTIME, HostPath
from vfiomgr.pci.model import DeviceIdentity, is_address
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree

RELEASED = RUNTIME / "released"
"""The directory of the records."""
START_YOURSELF = "start it yourself: systemctl start display-manager; then remove the file"
_SUFFIX, _LIMIT = ".json", 1 << 16


class ServiceUnit(Value):
    """A unit of systemd: of the system, or of a user's own manager."""

    name: str
    """`gdm.service`."""
    uid: int | None = None
    """The number of the user; None for units of the system."""

    def __str__(self) -> str:
        """`gdm.service`, or `pipewire.service of user 1000`."""
        return self.name if self.uid is None else f"{self.name} of user {self.uid}"


class ReleasedCard(Value):
    """A display that the desktop released, and what is restored when it returns."""

    device: DeviceIdentity
    stopped: tuple[ServiceUnit, ...] = ()
    """Units that are started when the card returns, in the order in which they were stopped."""
    paused: tuple[ServiceUnit, ...] = ()
    """Units that are started as soon as the card is bound: another display remains."""
    had_console: bool = False
    """Whether the text console was on the card."""
    modules: tuple[str, ...] = ()
    """Kernel modules that were unloaded, in the order in which they are loaded."""

    @property
    def path(self) -> HostPath:
        """The path of the record."""
        return RELEASED / f"{self.device.address}{_SUFFIX}"


def write_released(tree: HostTree, card: ReleasedCard) -> None:
    """Write a record; it is only valid for this boot, so a power cut cannot lose it."""
    tree.make_directory(RELEASED)
    data = msgspec.json.format(msgspec.json.encode(to_jsonable(card))) + b"\n"
    tree.replace(card.path, data, durable=False)


def read_released(tree: HostTree) -> tuple[tuple[ReleasedCard, ...], tuple[str, ...]]:
    """All records, and the addresses of cards whose record cannot be read."""
    found: list[ReleasedCard] = []
    unread: list[str] = []
    for name in tree.children(RELEASED):
        address = name.removesuffix(_SUFFIX)
        if address == name or not is_address(address):
            continue
        place = RELEASED / name
        try:
            text = read_own(tree, place, _LIMIT).decode()
            card = from_jsonable(ReleasedCard, parse_json(text))
        except FileNotFoundError:
            continue
        except (OSError, NotARecord, ValueError) as error:
            message = (
                f"cannot read {place}, so the desktop is not restored when {address} returns: "
                f"{error}; {START_YOURSELF}"
            )
            warnings.warn(message, stacklevel=2)
            unread.append(address)
            continue
        if card.path == place:
            found.append(card)
    return tuple(found), tuple(unread)
