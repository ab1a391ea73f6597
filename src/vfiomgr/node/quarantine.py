"""Devices that are withheld for a while because a reset failed; longer each time."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from vfiomgr.diagnostic import Diagnostic
from vfiomgr.documents.jsonable import Misfit, from_jsonable, to_jsonable
from vfiomgr.host.owners import NotARecord, read_own
from vfiomgr.paths import RUNTIME
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree

FILE = RUNTIME / "node-quarantine.json"
"""Emptied at reboot, when devices are reset anyway."""
_FIRST, _LONGEST = 60.0, 3600.0
"""Seconds of a quarantine; doubled each time."""
_CALM = 4 * _LONGEST
"""Seconds after a quarantine until it no longer lengthens the next one."""


class Entry(Value):
    """A device that was quarantined `count` times, the last time until `until`."""

    reason: Diagnostic
    until: float
    """Seconds of the monotonic clock, which all processes of a boot share."""
    count: int = 1


class Entries(Value):
    """The content of the file."""

    devices: dict[str, Entry]


class Quarantine:
    """The devices in quarantine, which outlive the agent but not the boot."""

    def __init__(self, tree: HostTree) -> None:
        self._tree = tree
        self._entries = _read(tree)

    def add(self, device: str, reason: Diagnostic, now: float) -> float:
        """Withhold a device; returns for how many seconds."""
        last = self._entries.get(device)
        count = 1 if last is None or now > last.until + _CALM else last.count + 1
        seconds = float(min(_FIRST * 2 ** (count - 1), _LONGEST))
        self._entries[device] = Entry(reason, now + seconds, count)
        self._save()
        return seconds

    def release(self, device: str) -> bool:
        """Return a device before its time; whether it was in quarantine."""
        was_there = self._entries.pop(device, None) is not None
        self._save()
        return was_there

    def active(self, now: float) -> dict[str, Diagnostic]:
        """The reasons of the devices that are withheld, by device."""
        return {name: each.reason for name, each in self._entries.items() if now < each.until}

    def end(self, now: float) -> float | None:
        """When the next device returns; None without any."""
        return min((e.until for e in self._entries.values() if now < e.until), default=None)

    def _save(self) -> None:
        text = json.dumps(to_jsonable(Entries(self._entries)), indent=2)
        self._tree.make_directory(RUNTIME)
        self._tree.replace(FILE, f"{text}\n".encode(), mode=0o600, durable=False)


def _read(tree: HostTree) -> dict[str, Entry]:
    """The entries of the file; without any if it is absent or was not written by vfiomgr."""
    try:
        return dict(from_jsonable(Entries, json.loads(read_own(tree, FILE))).devices)
    except (OSError, NotARecord, Misfit, ValueError):
        return {}
