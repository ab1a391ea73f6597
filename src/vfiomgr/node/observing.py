"""What the scanning process knows of its host, and how it is kept up to date.

Everything is read for a question of the agent, and from time to time. An event leads to the devices
that it names. What no event announces is looked at in intervals, for the offered devices only: the
processes that have a device open, errors of PCI Express, and what `KeptSnapshot.look` reads.
"""

from __future__ import annotations

import time
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.node.facts import read_health, with_present_fatal
from vfiomgr.node.model import HealthFacts
from vfiomgr.pci.model import PciDevice
from vfiomgr.snapshot.keeping import KeptSnapshot
from vfiomgr.snapshot.model import HostSnapshot
from vfiomgr.snapshot.scan import scan
from vfiomgr.snapshot.users import read_holders
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Set as AbstractSet

    from vfiomgr.host.udev import DeviceEvents
    from vfiomgr.library import Host
    from vfiomgr.pci.model import PciAddress
    from vfiomgr.snapshot.values import DeviceUser
    from vfiomgr.vgpu.model import Vgpu

EVERYTHING = 3600.0
"""Seconds until everything is read again, whatever was announced."""
THOROUGH = 4
"""Every so many looks, errors that are not fatal are counted too: only metrics show them."""


class Observed(Value):
    """The facts of a host for its inventory."""

    host: HostSnapshot
    health: HealthFacts


class Observer:
    """Reads what an inventory is made of: no device is opened or woken.

    The same object as before says that nothing has changed.
    """

    def __init__(self, host: Host) -> None:
        self._tree = host.tree
        read = partial(scan, host.tree, host.machine, with_claims=False, with_links=True)
        self._kept = KeptSnapshot(host.tree, host.machine, read)
        self._seen: HostSnapshot | None = None
        """The kept snapshot, without users."""
        self._nodes_of: dict[int, frozenset[str]] = {}
        """The nodes for guests of each function and vGPU of the kept snapshot, by its object."""
        self._nodes: Counter[str] = Counter()
        """How many of them have each node."""
        self._users: tuple[DeviceUser, ...] | None = None
        self._health = HealthFacts()
        self._observed: Observed | None = None
        self._read_at = 0.0
        self._looks = 0

    def close(self) -> None:
        """End the process that reads attributes."""
        self._kept.close()

    def read(self) -> Observed:
        """Read everything."""
        seen = self._kept.read()
        self._read_at = time.monotonic()
        self._health = read_health(self._tree, (device.address for device in seen.devices))
        self._note_nodes(seen)
        users = read_holders(self._tree, self._nodes.keys())
        return self._observe(seen, users)

    def follow(self, events: DeviceEvents) -> Observed:
        """Read what the events name; processes are looked for if there is a new node."""
        before, nodes = self._seen, frozenset(self._nodes)
        seen = self._kept.follow(events)
        if before is None or self._observed is None:
            return self.read()
        if seen is before:
            return self._observed
        new = self._note_nodes(seen)
        self._read_health(seen, {each.address for each in new if isinstance(each, PciDevice)})
        users = self._users
        if users is None or not self._nodes.keys() <= nodes:
            users = read_holders(self._tree, self._nodes.keys())
        else:
            users = tuple(user for user in users if user.node in self._nodes)
        return self._observe(seen, users)

    def look(self, addresses: Iterable[PciAddress]) -> Observed:
        """Read what no event announces of these functions, and everything from time to time."""
        if self._seen is None or time.monotonic() > self._read_at + EVERYTHING:
            return self.read()
        watched = frozenset(addresses)
        seen = self._kept.look([d for d in self._seen.devices if d.address in watched])
        self._looks += 1
        self._read_health(seen, watched, only_fatal=self._looks % THOROUGH != 0)
        if seen is not self._seen:
            self._note_nodes(seen)
        return self._observe(seen, read_holders(self._tree, self._nodes.keys()))

    def _note_nodes(self, seen: HostSnapshot) -> list[PciDevice | Vgpu]:
        """Note the nodes of a snapshot, and return what the one before did not have.

        The one before still has its objects, so that none of them has the number of another.
        """
        known: tuple[PciDevice | Vgpu, ...] = (*seen.devices, *seen.vgpus)
        holders = dict(zip(map(id, known), known, strict=True))
        for gone in self._nodes_of.keys() - holders.keys():
            for node in self._nodes_of.pop(gone):
                self._nodes[node] -= 1
                if not self._nodes[node]:
                    del self._nodes[node]
        new = holders.keys() - self._nodes_of.keys()
        for number in new:
            self._nodes_of[number] = seen.guest_nodes(holders[number])
            self._nodes.update(self._nodes_of[number])
        return [holders[number] for number in new]

    def _read_health(
        self, seen: HostSnapshot, addresses: AbstractSet[PciAddress], *, only_fatal: bool = False
    ) -> None:
        """Read the errors of these functions again; the others only appear in metrics."""
        known = {each.address: each for each in self._health.functions}
        if only_fatal:
            had = (known[address] for address in known.keys() & addresses)
            now = {each.address: with_present_fatal(self._tree, each) for each in had}
        else:
            now = {each.address: each for each in read_health(self._tree, addresses).functions}
        if not known and not now:
            return
        health = HealthFacts(
            tuple(
                found
                for d in seen.devices
                if (found := (now if d.address in addresses else known).get(d.address)) is not None
            )
        )
        if health != self._health:
            self._health = health

    def _observe(self, seen: HostSnapshot, users: tuple[DeviceUser, ...] | None) -> Observed:
        """What is known now; the same object as before if nothing has changed."""
        last = self._observed
        is_same = seen is self._seen and users == self._users
        self._seen, self._users = seen, users
        if last is None or not is_same or last.health is not self._health:
            self._observed = last = Observed(replace(seen, users=users), self._health)
        return last
