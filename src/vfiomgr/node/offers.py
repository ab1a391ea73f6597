"""What the kubelet is offered: the inventories of scans, steadied over time, and the quarantine.

A reset during the start of a guest makes a device unhealthy for a moment. The kubelet would refuse
to start the containers of its pod again ("previously allocated devices are no longer healthy").
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.diagnostic import Diagnostic, blocker
from vfiomgr.documents.jsonable import Misfit, from_jsonable, to_jsonable
from vfiomgr.host.owners import NotARecord, read_own
from vfiomgr.paths import RUNTIME
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Container, Mapping

    from vfiomgr.node.model import Inventory, NodeUnit

    Key = tuple[str, str]
    """The name of a resource, and the ID of a device."""
    from vfiomgr.host.tree import HostTree


class Offers:
    """Remembers since when devices are unhealthy.

    A healthy device is offered at once. One that becomes unhealthy is reported after `debounce`
    seconds, or at once if it is quarantined.
    """

    def __init__(self, debounce: float) -> None:
        self._debounce = debounce
        self._since: dict[Key, float] = {}
        """When each device that is offered as healthy was first found unhealthy."""
        self._healthy: set[Key] = set()

    def merge(
        self,
        found: Inventory,
        pods: Mapping[Key, str],
        quarantine: Container[str],
        now: float,
    ) -> Inventory:
        """What to offer now; `pods` are those that have devices."""
        resources_of = {device: name for name, device in pods}
        resources, healthy, since = [], set(), {}
        for resource in found.resources:
            units = []
            for each in resource.units:
                key = (resource.name, each.id)
                unit = _in_one_resource(each, resource.name, resources_of.get(each.id))
                if not unit.is_healthy and key in self._healthy and unit.id not in quarantine:
                    begun = self._since.get(key, now)
                    if now < begun + self._debounce:
                        since[key] = begun
                        unit = replace(unit, reasons=())
                if unit.is_healthy:
                    healthy.add(key)
                units.append(unit)
            resources.append(replace(resource, units=tuple(units)))
        self._healthy, self._since = healthy, since
        return replace(found, resources=tuple(resources))

    def wait(self, now: float) -> float | None:
        """Seconds until a device that is still offered as healthy is not; None without any."""
        first = min(self._since.values(), default=None)
        return None if first is None else max(0.0, first + self._debounce - now)


def _in_one_resource(unit: NodeUnit, name: str, pods_name: str | None) -> NodeUnit:
    """The device, unhealthy if a pod has it by the name of another resource.

    The kubelet counts the devices of each resource for itself, and would give it away again.
    """
    if pods_name in (None, name):
        return unit
    reason = blocker(
        "other-resource",
        unit.id,
        f"a pod has {unit.id} as {pods_name}",
        "wait until the pod ends, or delete it",
    )
    return replace(unit, reasons=(*unit.reasons, reason))


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
