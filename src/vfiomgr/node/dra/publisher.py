"""The ResourceSlices of this node, written when pools change and after a deletion.

The scheduler uses the slices of a pool with the highest generation, and only if there are as many
as each of them says (`resourceSliceCount`). A change that adds or removes slices, or that concerns
counters, therefore gives all slices of the pool the next generation; until the last one is written,
the pool is incomplete. For any other change, only the slices that differ are written, at the same
generation (compare syncPool in k8s.io/dynamic-resource-allocation/resourceslice).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from contextlib import aclosing
from functools import partial
from itertools import zip_longest

from msgspec.structs import replace

from vfiomgr.errors import HostError, VfiomgrError
from vfiomgr.node.api_server import (
    FORBIDDEN,
    GONE,
    INVALID,
    NODES,
    NOT_FOUND,
    SLICES,
    Api,
    ApiError,
    Backoff,
    Change,
    Collection,
    Object,
    Trouble,
    name_of,
    version_of,
)
from vfiomgr.node.dra.model import DRIVER, Pool
from vfiomgr.node.dra.slices import (
    CONDITIONS,
    GROUPS,
    Kept,
    as_kept,
    comparable,
    dropped,
    has_groups,
    kept_of,
    needs_kept,
    slices,
    trial,
    with_times,
)
from vfiomgr.node.serving import text_of


class Mirror:
    """The objects as the server stores them, some moments ago.

    A watch that ends is resumed at the last version; if the server has forgotten that version, the
    objects are listed again.
    """

    def __init__(
        self,
        api: Api,
        collection: Collection,
        fields: Mapping[str, str],
        tell: Callable[[str], None],
        changed: Callable[[], None],
    ) -> None:
        self.objects: dict[str, Object] = {}
        """By `name_of`."""
        self.is_complete = False
        """Whether the objects were listed at least once."""
        self._api, self._collection, self._fields = api, collection, fields
        self._changed = changed
        self.report_denied: Callable[[bool], object] = lambda _: None
        """Called if the right to list them is found to be missing, or there again."""
        self._is_denied = False
        self._trouble = Trouble(tell)
        self._backoff = Backoff()
        self._version = ""

    async def run(self) -> None:
        """Follow the changes until the task is cancelled."""
        while True:
            pause = 0.0
            try:
                await self._follow()
            except ApiError as error:
                pause = error.retry_after
                if error.status == GONE:
                    self._version = ""
                else:
                    self._trouble.report(text_of(error))
            await asyncio.sleep(pause + self._backoff.pause())

    def note(self, thing: Object) -> bool:
        """Store what the server answered to a request; returns whether it is news.

        An answer can arrive after the events of the watch. An object that the watch should have
        shown by then, but does not, was deleted in the meantime.
        """
        is_known = name_of(thing) in self.objects
        if not is_known and version_of(thing) <= int(self._version or 0):
            return False
        return self._store(thing)

    def forget(self, name: str) -> None:
        """Remove an object that was deleted."""
        self.objects.pop(name, None)

    async def _follow(self) -> None:
        if not self._version:
            await self._list()
        changes = self._api.watch(self._collection, self._version, self._fields)
        async with aclosing(changes):
            async for change in changes:
                self._backoff.reset()
                self._trouble.end()
                self._apply(change)

    async def _list(self) -> None:
        try:
            listing = await self._api.list(self._collection, self._fields)
        except ApiError as error:
            self._learn_right(is_denied=error.status == FORBIDDEN)
            raise
        self._learn_right(is_denied=False)
        version = int(listing.version)
        held = self.objects.values()
        self.objects = {name_of(each): each for each in held if version_of(each) > version}
        for thing in listing.objects:
            self._store(thing)
        self._version, self.is_complete = listing.version, True
        self._changed()

    def _learn_right(self, *, is_denied: bool) -> None:
        if is_denied != self._is_denied:
            self._is_denied = is_denied
            self.report_denied(is_denied)

    def _apply(self, change: Change) -> None:
        self._version = str(version_of(change.object))
        if change.type == "DELETED":
            is_news = self._drop(change.object)
        else:
            is_news = change.type != "BOOKMARK" and self._store(change.object)
        if is_news:
            self._changed()

    def _store(self, thing: Object) -> bool:
        """Store an object unless a newer one is stored; returns whether it is news."""
        held = self.objects.get(name_of(thing))
        if held is not None and version_of(held) >= version_of(thing):
            return False
        self.objects[name_of(thing)] = thing
        return True

    def _drop(self, thing: Object) -> bool:
        """Remove an object unless it was created again since."""
        held = self.objects.get(name_of(thing))
        if held is None or version_of(held) > version_of(thing):
            return False
        self.forget(name_of(thing))
        return True


_GATHERING = 0.05
"""Seconds in which changes are collected: the kubelet deletes all slices of a node at once."""
_COUNTERS, _WITH_GROUPS = "DRAPartitionableDevices", "DRADeviceCompatibilityGroups"
_WITH_CONDITIONS = "DRADeviceBindingConditions"
_GATES = {
    GROUPS: _WITH_GROUPS,
    "Counters": _COUNTERS,
    "taints": "DRADeviceTaints",
    "binding": _WITH_CONDITIONS,
    "bindsToNode": _WITH_CONDITIONS,
}
"""Feature gates of the API server, by a part of the fields that it drops without them."""


class Publisher:
    """Keeps the slices of this node and driver as the pools are; others are not touched."""

    def __init__(  # noqa: PLR0913 - each is a part of the agent, with a default
        self,
        api: Api,
        node: str,
        tell: Callable[[str], None],
        make: Callable[[Pool, str, int, list[list[str]]], list[Object]] = slices,
        *,
        learn_groups: Callable[[bool], object] = lambda _: None,
        awaits: bool = False,
    ) -> None:
        self._api, self._node, self._make = api, node, make
        self._awaits = awaits
        """Whether pods wait for devices that claims bind."""
        self._wake = asyncio.Event()
        fields = {"spec.driver": DRIVER, "spec.nodeName": node}
        self._slices = Mirror(api, SLICES, fields, tell, self._wake.set)
        self._trouble = Trouble(tell)
        self._backoff = Backoff()
        self._pools: tuple[Pool, ...] | None = None
        self._written: dict[str, tuple[Pool, int]] = {}
        """By pool: what was written last, with its generation."""
        self._sent: dict[str, tuple[int, object]] = {}
        """By slice: its version, and what was sent; the server may store it in another form."""
        self._owner = ""
        """The uid of the Node object."""
        self._keeps_counters = False
        """Whether the server is known to store counters."""
        self._gates = Trouble(tell)
        self._kept: Kept | None = None
        """What the server stores of the newer fields; None until it is known."""
        self._learn_groups = learn_groups

    def set(self, pools: Iterable[Pool]) -> None:
        """Publish these pools, and remove all others."""
        wanted = tuple(pools)
        if wanted != self._pools:
            self._pools = wanted
            self._wake.set()

    def have_awaited(self, *, awaits: bool) -> None:
        """Have pods wait for devices that claims bind, or not."""
        self._awaits = awaits
        self._wake.set()

    async def run(self) -> None:
        """Publish until the task is cancelled; the slices stay."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._slices.run())
            tasks.create_task(self._work())

    async def _work(self) -> None:
        while True:
            await self._wake.wait()
            await asyncio.sleep(_GATHERING)
            self._wake.clear()
            if self._pools is None or not self._slices.is_complete:
                continue
            try:
                await self._publish(self._pools)
            except VfiomgrError as error:
                self._keeps_counters = False
                self._trouble.report(f"cannot publish devices: {text_of(error)}")
                await self._pause(error)
            else:
                self._trouble.end()
                self._backoff.reset()

    async def _pause(self, error: VfiomgrError) -> None:
        """Wait for the next attempt; a change of pools or slices ends the wait."""
        if isinstance(error, ApiError):
            await asyncio.sleep(error.retry_after)
        try:
            async with asyncio.timeout(self._backoff.pause()):
                await self._wake.wait()
        except TimeoutError:
            self._wake.set()

    async def _publish(self, pools: tuple[Pool, ...]) -> None:
        """Write what differs; a pool that is refused does not hold up the others.

        Pools that are gone are removed first, and new ones are written last: a device that moves
        to another pool is not in two of them at a time.

        Raises:
            VfiomgrError: a pool cannot be published.
        """
        if self._kept is None and any(needs_kept(each, awaits=self._awaits) for each in pools):
            await self._learn_kept()
        pools = tuple(as_kept(each, self._kept or Kept(), awaits=self._awaits) for each in pools)
        held: dict[str, list[Object]] = {}
        for each in self._slices.objects.values():
            held.setdefault(each["spec"]["pool"]["name"], []).append(each)
        self._sent = {name: self._sent[name] for name in self._sent.keys() & self._slices.objects}
        names = {pool.name for pool in pools}
        work = [partial(self._delete, each) for name in held.keys() - names for each in held[name]]
        ordered = sorted(pools, key=lambda pool: pool.name not in held)
        work += [partial(self._write, pool, held.get(pool.name, [])) for pool in ordered]
        failure = None
        for part in work:
            try:
                await part()
            except VfiomgrError as error:
                if isinstance(error, ApiError) and error.is_passing:
                    raise
                failure = failure or error
        if failure is not None:
            raise failure

    async def _write(self, pool: Pool, held: list[Object]) -> None:
        """Make the slices of a pool what they should be; the last write completes the pool."""
        generation, specs = self._wanted(pool, held)
        missing, spare = self._differences(specs, held)
        if missing and self._written.get(pool.name) == (pool, generation):
            # slices were deleted: the Node object or the server may be another one
            self._owner, self._keeps_counters, self._kept = "", False, None
        if not self._keeps_counters:
            await self._require_counters(missing)
        self._written[pool.name] = pool, generation
        for spec, old in zip_longest(missing, spare):
            if spec is None:
                await self._delete(old)
            elif old is None:
                await self._create(with_times(spec, held))
            else:
                await self._update(old, with_times(spec, held))

    def _wanted(self, pool: Pool, held: list[Object]) -> tuple[int, list[Object]]:
        """The generation at which the pool can be written, and its slices.

        It is the last generation if the slices of that generation are equal to the wanted ones, so
        that some were only deleted or not yet written, or if slices can be replaced one by one.
        """
        last, published = self._written.get(pool.name, (pool, 1))
        newest = max([published, *map(_generation_of, held)])
        current = [each for each in held if _generation_of(each) == newest]
        devices = [each["spec"].get("devices") for each in current]
        before = [[device["name"] for device in each] for each in devices if each]
        specs = self._make(pool, self._node, newest, before)
        wanted = [comparable(spec) for spec in specs]
        changed = sum(self._content(each) not in wanted for each in current)
        is_complete = len(specs) == len(current) == len(held)
        counts = {each["spec"]["pool"].get("resourceSliceCount") for each in current}
        is_complete = is_complete and counts <= {len(specs)}
        is_separate = changed <= 1 or len(before) == len(specs)
        if (last == pool and not changed) or (is_complete and is_separate):
            return newest, specs
        return newest + 1, self._make(pool, self._node, newest + 1, before)

    def _differences(
        self, specs: list[Object], held: list[Object]
    ) -> tuple[list[Object], list[Object]]:
        """The specs that no slice has, and the slices that have none of the specs."""
        missing, spare = [(comparable(spec), spec) for spec in specs], []
        for each in held:
            content = self._content(each)
            place = next((place for place, (one, _) in enumerate(missing) if one == content), None)
            if place is None:
                spare.append(each)
            else:
                del missing[place]
        return [spec for _, spec in missing], spare

    def _content(self, held: Object) -> object:
        """What was sent for a slice if this process wrote it last, otherwise what is stored."""
        version, sent = self._sent.get(name_of(held), (0, None))
        return sent if version == version_of(held) else comparable(held["spec"])

    async def _require_counters(self, specs: list[Object]) -> None:
        """Raise an error if the server would not store counters: GPUs would be oversold."""
        spec = next((spec for spec in specs if spec.get("sharedCounters")), None)
        if spec is not None:
            trial = await self._api.trial(SLICES, await self._document(spec))
            self._require_stored(trial, spec)
            self._keeps_counters = True
        grouped = next((spec for spec in specs if has_groups(spec)), None)
        if grouped is not None:
            trial = await self._api.trial(SLICES, await self._document(grouped))
            self._require_stored(trial, grouped)

    async def _learn_kept(self) -> None:
        """Learn which newer fields the server stores, by a slice that is not kept."""
        kept = Kept()
        for lists in (True, False):
            spec = trial(self._node, lists=lists)
            try:
                kept = kept_of(await self._api.trial(SLICES, await self._document(spec)))
            except ApiError as error:  # an older server refuses other values than it knows
                if error.status not in INVALID:
                    raise
            else:
                break
        self._kept = kept
        self._learn_groups(kept.groups)
        if self._awaits and not kept.conditions:
            problem = f"the API server drops spec.devices.{CONDITIONS}"
            self._gates.report(f"{problem}; enable its feature gate {_WITH_CONDITIONS}")

    def _require_stored(self, stored: Object, sent: Object) -> None:
        """Raise HostError if a slice lacks its counters, and report other fields that it lacks."""
        for field in dropped(comparable(sent), comparable(stored)):
            gate = next((gate for part, gate in _GATES.items() if part in field), "")
            problem = f"the API server drops {field}"
            remedy = f"enable its feature gate {gate}" if gate else "use a newer Kubernetes"
            if gate == _WITH_GROUPS and self._kept is not None and self._kept.groups:
                self._kept = replace(self._kept, groups=False)
                self._learn_groups(False)  # noqa: FBT003 - a fact
            if gate in (_COUNTERS, _WITH_GROUPS):
                message = f"{problem} of pool {sent['pool']['name']}"
                raise HostError(message, remedy)
            self._gates.report(f"{problem}; {remedy}")

    async def _create(self, spec: Object) -> None:
        self._store(await self._api.create(SLICES, await self._document(spec)), spec)

    async def _document(self, spec: Object) -> Object:
        """A new slice, which belongs to the Node object."""
        if not self._owner:
            node = await self._api.get(NODES, self._node)
            self._owner = node["metadata"]["uid"]
        owner = {
            "apiVersion": "v1",
            "kind": "Node",
            "name": self._node,
            "uid": self._owner,
            "controller": True,
        }
        return {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceSlice",
            "metadata": {"generateName": f"{self._node}-{DRIVER}-", "ownerReferences": [owner]},
            "spec": spec,
        }

    async def _update(self, old: Object, spec: Object) -> None:
        try:
            stored = await self._api.update(SLICES, {**old, "spec": spec})
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise
            self._slices.forget(name_of(old))
            await self._create(spec)
        else:
            self._store(stored, spec)

    async def _delete(self, old: Object) -> None:
        try:
            await self._api.delete(SLICES, name_of(old))
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise
        self._slices.forget(name_of(old))
        self._sent.pop(name_of(old), None)

    def _store(self, stored: Object, spec: Object) -> None:
        self._slices.note(stored)
        self._sent[name_of(stored)] = version_of(stored), comparable(spec)
        self._require_stored(stored["spec"], spec)


def _generation_of(held: Object) -> int:
    return int(held["spec"]["pool"].get("generation", 0))
