"""The data of the scanning process about its host, and how they are kept up to date.

Everything is read for a question of the agent, and periodically. After an event, the devices that
it names are read. Facts without events are read in intervals, for the offered devices only: the
processes that have a device open, errors of PCI Express, whether suspended functions still answer,
and what `KeptSnapshot.look` reads. The modes of GPUs are read where claims can get vGPUs.
"""

from __future__ import annotations

import time
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.paths import PCI_DEVICES, HostPath
from vfiomgr.pci import facts as pci_facts
from vfiomgr.pci.error_counters import HealthFacts, read_health, with_present_fatal
from vfiomgr.pci.function import address_in
from vfiomgr.pci.model import PciAddress, PciDevice, is_address, pci_device
from vfiomgr.snapshot.health import DeviceHealth, HealthRecord
from vfiomgr.snapshot.keeping import KeptSnapshot
from vfiomgr.snapshot.model import HostSnapshot
from vfiomgr.snapshot.scan import scan
from vfiomgr.users.processes import read_holders_by_name
from vfiomgr.users.uses import read_host_uses
from vfiomgr.value import Value
from vfiomgr.vgpu.reader import with_gpu_modes

if TYPE_CHECKING:
    from collections.abc import Collection, Container, Iterable, Iterator
    from collections.abc import Set as AbstractSet

    from vfiomgr.host.tree import HostTree
    from vfiomgr.host.udev import DeviceEvents
    from vfiomgr.library import Host
    from vfiomgr.users.model import DeviceUser, HostUse
    from vfiomgr.vgpu.model import Vgpu

_MODES_INTERVAL = 600.0
"""Seconds until nvidia-smi is asked again, although the vGPUs are the same."""
_OF_MODES = ("modes", "partitions", "parents", "active")


def forgiven(before: HealthFacts, now: HealthFacts, released: Container[PciAddress]) -> HealthFacts:
    """The errors that are forgiven, `before` those of the last scan.

    Errors of a new function are those of its past. Numbers fall if the kernel adds it again.
    """
    known = {function.address: function for function in before.functions}
    for function in now.functions:
        last = known.get(function.address)
        if last is None or function.address in released:
            known[function.address] = function
        elif function.fatal is not None and (last.fatal is None or function.fatal < last.fatal):
            known[function.address] = replace(last, fatal=function.fatal)
    return HealthFacts(tuple(known.values()))


class GpuModes:
    """The modes of GPUs, as nvidia-smi reports them.

    It takes a second, so it is asked again only if the vGPUs have changed, and from time to time,
    because an administrator may have changed a mode.
    """

    def __init__(self) -> None:
        self._before: object = None
        """The parents and vGPUs of the host at the last report."""
        self._facts: dict[str, object] = {}
        self._read_at = 0.0

    def are_due(self, seen: HostSnapshot) -> bool:
        """Whether nvidia-smi is to be asked again."""
        is_old = time.monotonic() > self._read_at + _MODES_INTERVAL
        return is_old or self._before != (seen.vgpus.parents, seen.vgpus.active)

    def added_to(self, seen: HostSnapshot, tree: HostTree) -> HostSnapshot:
        """The host with the modes of its GPUs."""
        if self.are_due(seen):
            found = with_gpu_modes(seen, tree)
            self._facts = {name: getattr(found.vgpus, name) for name in _OF_MODES}
            self._before = (seen.vgpus.parents, seen.vgpus.active)
            self._read_at = time.monotonic()
        return replace(seen, vgpus=replace(seen.vgpus, **self._facts))


EVERYTHING = 3600.0
"""Seconds until everything is read again, whatever was announced."""
THOROUGH = 4
"""Number of looks in which non-fatal errors, which only metrics show, are counted once, and each
suspended function is read once."""
_ASLEEP = "suspended"
_ROOT_ERRORS = "aer_rootport_total_err_fatal"
_OWN_ERRORS = "aer_dev_fatal"


class Observed(Value):
    """The facts of a host for its inventory."""

    host: HostSnapshot
    health: HealthFacts
    flooded: frozenset[PciAddress] = frozenset()
    """The functions with too many corrected errors."""


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
        self._on_demand: frozenset[str] = frozenset()
        """The devices that claims bind, by address; their users on the host matter too."""
        self._uses: tuple[HostUse, ...] | None = None
        """The host's own uses, if there are such devices."""
        self._health = HealthFacts()
        self._rates = HealthRecord("")
        """The last readings of these errors, to compare them with."""
        self._observed: Observed | None = None
        self._silent: frozenset[PciAddress] = frozenset()
        """The suspended functions that did not answer."""
        self._shown = self._silent
        """The silent functions of the last observation."""
        self._errors: dict[tuple[HostPath, str], str | None] = {}
        """The files that count fatal errors of watched functions, with their last content."""
        self._errors_of: tuple[HostSnapshot | None, frozenset[PciAddress]] = None, frozenset()
        """The snapshot and the functions of these files."""
        self._read_at = 0.0
        self._looks = 0

    def close(self) -> None:
        """End the process that reads attributes."""
        self._kept.close()

    def observe_users_of(self, on_demand: frozenset[str]) -> bool:
        """Look for users of these devices on host drivers too; returns whether they are new."""
        is_new, self._on_demand = on_demand != self._on_demand, on_demand
        if is_new:
            self._nodes_of.clear()
            self._nodes.clear()
        return is_new

    def read(self, woken: Collection[PciAddress] = ()) -> Observed:
        """Read everything, and wake suspended functions among these to test whether they answer."""
        seen = self._kept.read()
        self._read_at = time.monotonic()
        self._health = read_health(self._tree, (device.address for device in seen.devices))
        self._note_rates()
        self._note_nodes(seen)
        self._wake(seen, woken)
        users = read_holders_by_name(self._tree, self._nodes.keys())
        return self._observe(seen, users)

    def follow(self, events: DeviceEvents) -> Observed:
        """Read what the events name; processes are looked for if there is a new node."""
        before, nodes = self._seen, frozenset(self._nodes)
        seen = self._kept.follow(events)
        if before is None or self._observed is None:
            return self.read()
        names = (address_in(path.rpartition("/")[2]) for path in events.paths)
        named = {address for address in names if address is not None}
        if seen is before:
            self._read_health(seen, named)  # an error is an event too (pci_uevent_ers)
            return self._observe(seen, self._users)
        new = self._note_nodes(seen)
        named.update(each.address for each in new if isinstance(each, PciDevice))
        self._read_health(seen, named)
        users = self._users
        if users is None or not self._nodes.keys() <= nodes:
            users = read_holders_by_name(self._tree, self._nodes.keys())
        else:
            users = tuple(user for user in users if user.node in self._nodes)
        return self._observe(seen, users)

    def look(self, addresses: Iterable[PciAddress]) -> Observed:
        """Read what no event announces of these functions, and everything from time to time."""
        if self._seen is None or time.monotonic() > self._read_at + EVERYTHING:
            return self.read()
        watched = frozenset(addresses)
        self._note_errors()
        seen = self._kept.look([d for d in self._seen.devices if d.address in watched])
        self._looks += 1
        is_thorough = self._looks % THOROUGH == 0
        ports = self._ports_above(watched) if is_thorough else frozenset()
        self._read_health(seen, watched | ports, only_fatal=not is_thorough)
        if is_thorough:
            self._note_rates()
        if seen is not self._seen:
            self._note_nodes(seen)
        self._note_silent(self._asleep(seen, watched))
        return self._observe(seen, read_holders_by_name(self._tree, self._nodes.keys()))

    def wake(self, addresses: Collection[PciAddress]) -> Observed:
        """Read only whether these functions answer, since a claim waits for it."""
        if self._seen is None:
            return self.read(addresses)
        self._wake(self._seen, addresses)
        return self._observe(self._seen, self._users)

    def _wake(self, seen: HostSnapshot, addresses: Collection[PciAddress]) -> None:
        self._note_silent(
            (device.address, pci_facts.answers(self._tree, device.address))
            for device in seen.devices
            if device.address in addresses and device.runtime_status == _ASLEEP
        )

    def has_errors(self, addresses: Iterable[PciAddress]) -> bool:
        """Whether fatal errors of these functions were counted since the last call or look.

        Their root ports count them first (aer_isr_one_error in drivers/pci/pcie/aer.c): a host has
        few of them, and reading them wakes no device.
        """
        seen, watched = of = self._seen, frozenset(addresses)
        if seen is not self._errors_of[0] or watched != self._errors_of[1]:
            known, self._errors_of = self._errors, of
            self._errors = {f: known.get(f, n) for f, n in self._counters(seen, watched).items()}
        before = self._errors
        return self._note_errors() != before

    def _note_errors(self) -> dict[tuple[HostPath, str], str | None]:
        self._errors = {file: self._tree.read_in(*file) for file in self._errors}
        return self._errors

    def _counters(
        self, seen: HostSnapshot | None, watched: Container[PciAddress]
    ) -> dict[tuple[HostPath, str], str]:
        """The files that count fatal errors of functions, with their content.

        If the firmware handles errors, root ports do not count them, so each function is read.
        """
        found: dict[tuple[HostPath, str], str | None] = {}
        for device in () if seen is None else seen.devices:
            if device.address not in watched:
                continue
            own = pci_device(device.address), _OWN_ERRORS
            root = next(filter(is_address, device.bridges), None)
            for file in (own,) if root is None else ((PCI_DEVICES / root, _ROOT_ERRORS), own):
                if file not in found:
                    found[file] = self._tree.read_in(*file)
                if found[file] is not None:
                    break
        return {file: number for file, number in found.items() if number is not None}

    def _asleep(
        self, seen: HostSnapshot, watched: Container[PciAddress]
    ) -> Iterator[tuple[PciAddress, bool | None]]:
        """Whether suspended functions answer: a part of them in each look, and all silent ones."""
        asleep = (d for d in seen.devices if d.address in watched and d.runtime_status == _ASLEEP)
        for number, device in enumerate(asleep):
            is_due = (number + self._looks) % THOROUGH == 0
            if is_due or device.address in self._silent:
                yield device.address, pci_facts.answers_asleep(self._tree, device)

    def _note_silent(self, found: Iterable[tuple[PciAddress, bool | None]]) -> None:
        known = dict(found)
        silent = {address for address, answers in known.items() if answers is False}
        silent |= {address for address in self._silent if not known.get(address)}
        self._silent = frozenset(silent)

    def _ports_above(self, watched: Container[PciAddress]) -> frozenset[PciAddress]:
        devices = () if self._seen is None else self._seen.devices
        above = {name for d in devices if d.address in watched for name in d.bridges}
        return frozenset(d.address for d in devices if str(d.address) in above)

    def _note_rates(self) -> None:
        now = replace(self._health, seconds=time.monotonic())
        self._rates = DeviceHealth(now, self._rates).noted()

    def _note_nodes(self, seen: HostSnapshot) -> list[PciDevice | Vgpu]:
        """Note the nodes of a snapshot, and return what the one before did not have.

        The one before still has its objects, so that none of them has the number of another.
        """
        known: tuple[PciDevice | Vgpu, ...] = (*seen.devices, *seen.vgpus.active)
        holders = dict(zip(map(id, known), known, strict=True))
        for gone in self._nodes_of.keys() - holders.keys():
            for node in self._nodes_of.pop(gone):
                self._nodes[node] -= 1
                if not self._nodes[node]:
                    del self._nodes[node]
        new = holders.keys() - self._nodes_of.keys()
        for number in new:
            self._nodes_of[number] = self._nodes_of_holder(seen, holders[number])
            self._nodes.update(self._nodes_of[number])
        return [holders[number] for number in new]

    def _nodes_of_holder(self, seen: HostSnapshot, holder: PciDevice | Vgpu) -> frozenset[str]:
        """The nodes whose users matter: those for guests, and on demand those of host drivers."""
        nodes = seen.guest_nodes(holder)
        if isinstance(holder, PciDevice) and self._on_demand:
            slot = (str(each.address) for each in seen.slot(holder))
            if not self._on_demand.isdisjoint(slot):
                return nodes | frozenset(holder.nodes)
        return nodes

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
        silent = frozenset(
            device.address
            for device in seen.devices
            if device.address in self._silent and device.runtime_status == _ASLEEP
        )
        uses = read_host_uses(self._tree) if self._on_demand else None
        is_same = seen is self._seen and users == self._users and silent == self._shown
        is_same, self._uses = is_same and uses == self._uses, uses
        self._seen, self._users, self._silent, self._shown = seen, users, silent, silent
        flooded = frozenset(self._rates.flooded)
        is_same = is_same and last is not None and last.flooded == flooded
        if last is None or not is_same or last.health is not self._health:
            devices = seen.devices
            if silent:
                devices = tuple(
                    replace(d, is_responsive=False) if d.address in silent else d for d in devices
                )
            facts = replace(seen.users, processes=users)
            if self._on_demand:
                facts = replace(facts, host_uses=uses)
            host = replace(seen, users=facts, devices=devices)
            self._observed = last = Observed(host, self._health, flooded)
        return last
