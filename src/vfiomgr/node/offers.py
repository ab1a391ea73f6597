"""What the kubelet is offered: the inventories of scans, steadied over time, and the quarantine.

A reset during the start of a guest makes a device unhealthy for a moment. The kubelet would refuse
to start the containers of its pod again ("previously allocated devices are no longer healthy").
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.diagnostic import Diagnostic, blocker
from vfiomgr.errors import HostError
from vfiomgr.node.health import EVERY, SANDBOX
from vfiomgr.node.messages import read_record, write_record
from vfiomgr.paths import RUNTIME
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.node.model import Inventory, NodeUnit
    from vfiomgr.users.model import DeviceUser

    Key = tuple[str, str]
    """The name of a resource, and the ID of a device."""
    from vfiomgr.host.tree import HostTree


_NONE: Mapping[str, str] = MappingProxyType({})


class Offers:
    """Remembers since when devices are unhealthy.

    A healthy device is offered at once. A device that becomes unhealthy is reported after
    `debounce` seconds, or at once if it is quarantined or had fatal errors.
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
        claims: Mapping[str, str] = _NONE,
    ) -> Inventory:
        """What to offer now; `pods` and `claims` are those that have devices."""
        resources_of = {device: name for name, device in pods}
        resources, healthy, since = [], set(), {}
        for resource in found.resources:
            units = []
            for each in resource.units:
                key = (resource.name, each.id)
                unit = _in_one_resource(each, resource.name, resources_of.get(each.id))
                # Errors stay counted: no reset clears them.
                stays = any(reason.rule == "fatal-errors" for reason in unit.reasons)
                is_withheld = unit.id in quarantine or unit.id in claims or stays
                if not unit.is_healthy and key in self._healthy and not is_withheld:
                    begun = self._since.get(key, now)
                    if now < begun + self._debounce:
                        since[key] = begun
                        unit = replace(unit, reasons=())
                unit = _without_claim(unit, claims.get(unit.id, ""))
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


def _without_claim(unit: NodeUnit, claim: str) -> NodeUnit:
    """The device, unhealthy if a ResourceClaim has it: the kubelet counts it for both."""
    if not claim or unit.pod:
        return unit
    reason = blocker(
        "held-by-claim",
        unit.id,
        f"{unit.id} belongs to ResourceClaim {claim}",
        "delete the pods of the claim, and the claim",
    )
    return replace(unit, reasons=(*unit.reasons, reason), used_by=f"claim {claim}", claim=claim)


SETTLE = 20.0
"""Seconds for which the kubelet names a pod that has ended, or a process outlives its pod."""


class _Sandbox(Value):
    """The last processes of a pod that had a device open."""

    pod: str
    """NAMESPACE/NAME of the pod that had it, from the device plugin or by a claim."""
    guest: str
    """Kata's name for the guest; empty for other processes."""
    pids: frozenset[int]
    since: float | None = None
    """Since when the guest is gone although the pod has the device, or the pod without it."""


class Sandboxes:
    """Notices guests that crashed, by what has each device open from scan to scan.

    A pod keeps its sandbox while it runs: another guest in the same pod replaces one that crashed.
    Kata unplugs the devices of a container that ends, while its guest runs on: `runs` says whether
    one of these processes still runs the guest.
    """

    def __init__(self, runs: Callable[[str, Iterable[int]], bool]) -> None:
        self._runs = runs
        self._known: dict[str, _Sandbox] = {}

    def forget(self, devices: Iterable[str]) -> None:
        """Forget the guests of devices that were allocated again: to a new pod of that name."""
        for device in devices:
            self._known.pop(device, None)

    @property
    def is_waiting(self) -> bool:
        """Whether a later scan decides about a device."""
        return any(sandbox.since is not None for sandbox in self._known.values())

    def crashes(
        self,
        units: Iterable[NodeUnit],
        users: Mapping[str, Sequence[DeviceUser]],
        quarantine: Container[str],
        now: float,
        claims: Mapping[str, str] = _NONE,
    ) -> dict[str, Diagnostic]:
        """Why to withhold devices.

        `users` are the processes that have each one open, and `claims` the pods of claims.
        """
        found = {}
        for unit in units:
            pod = unit.pod.rpartition("/")[0] if unit.pod else claims.get(unit.claim, "")
            if not pod and unit.claim:
                # Several pods have the claim, or its pod is not known again yet.
                if (last := self._known.get(unit.id)) is not None:
                    self._known[unit.id] = replace(last, since=None)
                continue
            cause = self._cause(unit, pod, users.get(unit.id, ()), now)
            if cause and unit.id not in quarantine:
                found[unit.id] = _crashed(unit, cause)
        return found

    def _cause(self, unit: NodeUnit, pod: str, users: Sequence[DeviceUser], now: float) -> str:
        """Why to withhold a device; nothing if its guest runs, or ended with its pod."""
        last = self._known.pop(unit.id, None)
        guest = next((u.guest for u in users if SANDBOX.fullmatch(u.guest or "")), None) or ""
        pids = frozenset(user.pid for user in users)
        if pod and users:
            self._known[unit.id] = _Sandbox(pod, guest, pids)
        if last is None:
            return ""
        if not pod:
            left = last.pids & pids
            is_over = bool(left) and self._is_over(unit, replace(last, pids=left), now)
            named = ", ".join(map(str, sorted(left)))
            why = f"pod {last.pod} ended, and PID {named} still has {unit.id} open"
            return why if is_over else ""
        if last.pod != pod or not last.guest or guest == last.guest:
            return ""
        if users and not guest:
            return ""
        if self._runs(last.guest, last.pids):
            self._known.setdefault(unit.id, replace(last, since=None))
            return ""
        is_over = bool(guest) or self._is_over(unit, last, now)
        if is_over and not guest:
            del self._known[unit.id]  # once for each guest
        why = f"guest {last.guest} of pod {pod} ended while the pod had {unit.id}"
        return why if is_over else ""

    def _is_over(self, unit: NodeUnit, last: _Sandbox, now: float) -> bool:
        """Whether the time to settle is over; a later scan decides again."""
        since = now if last.since is None else last.since
        is_over = now >= since + SETTLE
        self._known[unit.id] = replace(last, since=now if is_over else since)
        return is_over


def _crashed(unit: NodeUnit, cause: str) -> Diagnostic:
    return blocker(
        "sandbox-crashed",
        unit.id,
        cause,
        f"see dmesg and the log of the container runtime; then: vfiomgr node release {unit.id}",
        why="a device that crashes its guests would do so in the next pod",
    )


FILE = RUNTIME / "node-quarantine.json"
"""Emptied at reboot, when devices are reset anyway."""
_FIRST, LONGEST = 60.0, 3600.0
"""Seconds of a quarantine; doubled each time."""
_CALM = 4 * LONGEST
"""Seconds after a quarantine until it no longer lengthens the next one."""


class Entry(Value):
    """A device that was quarantined `count` times, the last time until `until`."""

    reason: Diagnostic
    until: float
    """Seconds of the monotonic clock, which all processes of a boot share."""
    count: int = 1


class Entries(Value):
    """The content of the file, by device."""

    devices: dict[str, Entry]


class Quarantine:
    """The devices in quarantine, which outlive the agent but not the boot.

    If they cannot be read, `unreadable` says why, and all devices are withheld until each of these
    quarantines is over.
    """

    def __init__(self, tree: HostTree, now: float) -> None:
        self._tree = tree
        self.unreadable: Diagnostic | None = None
        try:
            found = read_record(Entries, tree, FILE)
        except HostError as error:
            self.unreadable = _unreadable(error)
            found = Entries({EVERY: Entry(self.unreadable, now + LONGEST)})
        self._entries = {} if found is None else dict(found.devices)

    def add(self, device: str, reason: Diagnostic, now: float) -> float:
        """Withhold a device; returns for how many seconds."""
        last = self._entries.get(device)
        count = 1 if last is None or now > last.until + _CALM else last.count + 1
        seconds = float(min(_FIRST * 2 ** (count - 1), LONGEST))
        self._entries[device] = Entry(reason, now + seconds, count)
        self._save()
        return seconds

    def release(self, device: str, known: Iterable[str] = ()) -> bool:
        """Return a device before its time; whether it was in quarantine.

        If all are, the others of the `known` ones stay there.
        """
        if (every := self._entries.pop(EVERY, None)) is not None:
            for name in known:
                own = self._entries.setdefault(name, every)
                self._entries[name] = max(own, every, key=lambda entry: entry.until)
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
        write_record(self._tree, FILE, Entries(self._entries))


def _unreadable(error: HostError) -> Diagnostic:
    return blocker(
        "quarantine-unreadable",
        FILE,
        f"the devices in quarantine are unknown: {error.message}",
        "check the device, then: vfiomgr node release ADDRESS",
        why="the next pod could get a device that was not reset",
    )
