"""The DRA driver of a node: the published devices, and the claims that have them.

The scanning process makes the pools. It must know which claims have devices, since these stay
published and decide what else fits on a GPU. Each change of that has a number, and a report with
an older number is not used: it may offer a vGPU that was created for a claim.

Claims are known from the kubelet's calls and pod resources, and from the records of prepared ones;
on request also from pods that the scheduler is about to place here (`nominated`). A watch would
show all claims of the cluster: the API selects none by their node. A claim that is allocated and
not prepared yet is otherwise unknown. Its device stays published, and the counters that it consumes
limit the other devices that the scheduler can choose.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.errors import Refusal, VfiomgrError
from vfiomgr.node.api_server import CLAIMS, Api
from vfiomgr.node.dra.binding import Bound, is_binding, read_bound
from vfiomgr.node.dra.claims import is_of_node, read_claim
from vfiomgr.node.dra.model import DRIVER, MOST_TAINTS, Claim, DraDevice, Pool, PreparedClaim, Taint
from vfiomgr.node.dra.nominated import Nominated
from vfiomgr.node.dra.operands import Operands
from vfiomgr.node.dra.plugin import Answers, DeviceHealth, DraPlugin
from vfiomgr.node.dra.preparing import Preparing
from vfiomgr.node.dra.publisher import Publisher
from vfiomgr.node.dra.records import METADATA
from vfiomgr.node.health import is_unusable
from vfiomgr.node.messages import ClaimFacts, DraSettings, Report
from vfiomgr.node.processes import DEADLINE, Creating, StillRunning
from vfiomgr.paths import HostPath

if TYPE_CHECKING:
    from vfiomgr.diagnostic import Diagnostic
    from vfiomgr.host.tree import HostTree
    from vfiomgr.node.metrics import AgentMetrics
    from vfiomgr.node.model import Inventory, NodeUnit
    from vfiomgr.node.pods import PodLedger

_TICK = 0.5
"""Seconds between looks at the sockets."""
_PATIENCE = 5.0
"""Seconds in which a scan finds the devices of a new claim; the kubelet waits for 45."""
_HANDOVER = 15.0
"""Seconds to wait for the end of a pod: the kubelet names it for 6 s, and retries after 60 s."""
_WITHHELD = 300.0
"""Seconds in which no further claim gets a device that could not be bound."""
_NOT_BOUND = Taint(f"{DRIVER}/bind-failed", "", "NoSchedule")
_AGAIN = 1.0
"""Seconds until the kubelet is asked again whether a pod has ended."""


class Driver:
    """Publishes the devices of this node, and prepares the claims of its pods.

    If the devices of claims change, `share` informs the scanning process and `offer` the device
    plugin. `ledger` has the devices of pods. `withhold` quarantines a unit that could not be reset.
    `require_answer` raises an error if a unit does not answer.
    """

    def __init__(  # noqa: PLR0913 - each is a part of the agent
        self,
        settings: DraSettings,
        tree: HostTree,
        *,
        share: Callable[[ClaimFacts], Awaitable[None]],
        offer: Callable[[], Awaitable[None]],
        ledger: PodLedger,
        metrics: AgentMetrics,
        withhold: Callable[[str, str], None],
        require_answer: Callable[[tuple[str, ...]], Awaitable[None]],
        tell: Callable[[str], None],
    ) -> None:
        self._node, self._tree = settings.node, tree
        self._share, self._offer, self._ledger = share, offer, ledger
        self._units: dict[str, NodeUnit] = {}
        """The units of the last scan, and the vGPUs of claims."""
        self._pools: dict[str, Pool] | None = None
        self._facts = ClaimFacts()
        self._is_current = False
        """Whether the pools were made with these facts."""
        self._knows_pods = False
        """Whether they were made with the pods of the device plugin."""
        self._creating = Creating(tree.root)
        self._api = Api(settings.server, settings.directory, metrics.count_failure)
        self._operands = Operands(
            self._api,
            settings.node,
            tell,
            lambda: self._creating.is_binding or is_binding(tree),
        )
        # The kubelet's directory of the driver, which another root has at its usual place.
        own = HostPath(settings.kubelet_directory) / "plugins" / DRIVER
        self._preparing = Preparing(
            tree,
            self._device,
            self._units.get,
            self._creating,
            quarantine=withhold,
            note=lambda unit, text: tell(f"{unit}: {text}"),
            metadata=own if tree.is_machine else METADATA,
            require_answer=require_answer,
            measured=metrics.claim,
            away=self._operands.away,
        )
        self._working = 0
        """How many claims are being prepared, perhaps with new vGPUs."""
        self._metrics = metrics
        self._changed = asyncio.Event()
        self._is_received = asyncio.Event()
        """Set by each report."""
        self._asked: dict[str, Claim] = {}
        """The claims that the kubelet asked to prepare and has not released, by UID."""
        ledger.report_claims = self._changed.set
        self._withheld: dict[tuple[str, str], float] = {}
        """Until when devices have a taint that could not be bound, by pool and name."""
        self._has_groups = False
        self._publisher = Publisher(
            self._api,
            settings.node,
            tell,
            learn_groups=self._learn_groups,
            awaits=settings.binds_early,
        )
        self._nominated = Nominated(
            self._api,
            settings.node,
            is_on=settings.binds_early,
            known=lambda: self._preparing.claims,
            prepare=self._prepare_early,
            release=self._release_early,
            # Pods would wait in vain for an agent that does not see them.
            denied=lambda is_denied: self._publisher.have_awaited(awaits=not is_denied),
            tell=tell,
        )
        self._answers = Answers(self._prepare, self._unprepare)
        self._plugin = DraPlugin(settings.kubelet_directory, self._answers, tell, settings.instance)

    @property
    def is_registered(self) -> bool:
        """Whether the kubelet accepted the driver."""
        return self._plugin.is_registered

    @property
    def claims(self) -> Mapping[str, str]:
        """The claim that has each unit, NAMESPACE/NAME."""
        return self._facts.held

    @property
    def bound(self) -> Mapping[str, Bound]:
        """The devices that were bound for claims, by address, of the readable records."""
        return {str(made.address): made for made in read_bound(self._tree, readable=True)}

    # ---- its life

    async def share(self) -> None:
        """Inform the scanning process, before its first scan, of claims that are prepared."""
        await self._renew(is_changed=True)

    async def run(self) -> None:
        """Serve and publish until the task is cancelled.

        Raises:
            Refusal: another process serves the driver.
            UsageError: a directory of the kubelet cannot be used.
        """
        await self._plugin.start()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow_claims())
            tasks.create_task(self._publisher.run())
            tasks.create_task(self._nominated.run())
            tasks.create_task(self._operands.run())
            tasks.create_task(self._tend())

    async def close(self) -> None:
        """Leave the kubelet; what was published stays, and so do the claims."""
        await self._plugin.close()
        await self._creating.close()
        await self._operands.close()
        await self._api.close()

    async def _tend(self) -> None:
        while True:
            await asyncio.sleep(_TICK)
            await self._plugin.tend()
            if self._unreadable != self._facts.unreadable:
                self._changed.set()  # the file of a record was removed

    async def _follow_claims(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self._renew()
            self._publish()

    # ---- what scans find

    def receive(self, report: Report, seconds: float) -> bool:
        """Take over the units and pools of a report; returns whether it is the newest state.

        The health of devices is known for so many seconds.
        """
        found = () if report.inventory is None else report.inventory.units
        self._units.clear()
        self._units.update({unit.id: unit for unit in (*found, *report.created)})
        if report.pools is not None:
            self._pools = {pool.name: pool for pool in report.pools}
            self._changed.set()  # units of allocated devices may be known now
        self._is_current = report.claims == self._facts.number
        self._knows_pods = report.knows_pods
        if self._is_current:
            self._answers.set_health(self._health(), seconds)
            self._publish()
        self._is_received.set()
        return self._is_current

    def confirm(self, seconds: float) -> None:
        """Take the last report for a new one: health is known for so many seconds."""
        if self._is_current:
            self._answers.set_health(self._health(), seconds)

    def _publish(self) -> None:
        """Publish the pools if they were made with all known claims and all pods."""
        if self._is_current and self._knows_pods and self._pools is not None:
            self._publisher.set(map(self._as_offered, self._pools.values()))

    def _as_offered(self, pool: Pool) -> Pool:
        """A pool in which devices that could not be bound for a pod have a taint.

        Otherwise the scheduler might choose the same device again for the pod.
        """
        now = time.monotonic()
        self._withheld = {place: end for place, end in self._withheld.items() if now < end}
        names = {name for place, name in self._withheld if place == pool.name}
        devices = (
            replace(d, taints=(*d.taints, _NOT_BOUND)[-MOST_TAINTS:]) if d.name in names else d
            for d in pool.devices
        )
        return replace(pool, devices=tuple(devices)) if names else pool

    def shown(self, found: Inventory, before: Inventory) -> Inventory:
        """The inventory without vGPUs that are created for claims, for pods of the device plugin.

        While one is created, it is not known which of the new ones it is. If that failed, what is
        left of it is nothing that a pod could have had.
        """
        known = {unit.id for unit in before.units}
        new = [u for u in found.units if u.id not in known and u.kind in {"mdev", "vendor"}]
        hidden = {unit.id for unit in new if self._working or is_unusable(unit)}
        return found.without(hidden)

    def _device(self, pool: str, name: str) -> DraDevice | None:
        found = (self._pools or {}).get(pool)
        return None if found is None else found.device(name)

    def _health(self) -> Iterator[DeviceHealth]:
        for unit, (pool, device) in self._preparing.created.items():
            if unit in self._units:
                yield _health(pool, device, self._units[unit])
        for each in (self._pools or {}).values():
            for published in each.devices:
                if published.target.unit in self._units:
                    yield _health(each.name, published.name, self._units[published.target.unit])

    def _learn_groups(self, has_groups: bool) -> None:  # noqa: FBT001 - a fact
        """Have the pools made again if the server stores compatibility groups, or not any more."""
        if has_groups != self._has_groups:
            self._has_groups = has_groups
            self._changed.set()

    # ---- what claims have

    async def _renew(self, *, is_changed: bool = False) -> None:
        """Inform the others if claims have other devices than before, or vGPUs were changed."""
        now = ClaimFacts(
            self._facts.number,
            tuple(sorted(self._allocated)),
            self._held(),
            self._preparing.created,
            {n: next(iter(u.pods)) for n, u in self._ledger.claims.items() if len(u.pods) == 1},
            self._unreadable,
            self._has_groups,
        )
        if is_changed or now != self._facts:
            self._facts, self._is_current = replace(now, number=now.number + 1), False
            await self._share(self._facts)
            await self._offer()

    def _held(self) -> dict[str, str]:
        """The claim of each unit; a claim that waits for the end of a pod does not have it yet."""
        allocated = {
            device.target.unit: claim
            for (pool, name), claim in self._allocated.items()
            if (device := self._device(pool, name)) is not None and device.target.unit
        }
        free = {u: claim for u, claim in allocated.items() if not self._pod_of(u)}
        return {**free, **self._preparing.held}

    @property
    def _unreadable(self) -> tuple[Diagnostic, ...]:
        """The records of claims that cannot be read."""
        return tuple(self._preparing.unreadable.values())

    @property
    def _allocated(self) -> dict[tuple[str, str], str]:
        """The claim that has each device of this node, by pool and name."""
        asked = {
            (device.pool, device.device): str(claim)
            for claim in self._asked.values()
            for device in claim.devices
        }
        listed = {
            device: name
            for name, use in self._ledger.claims.items()
            for device in use.devices
            if is_of_node(device[0], self._node)
        }
        return {**listed, **asked, **self._preparing.allocated}

    async def _prepare(self, namespace: str, name: str, uid: str) -> PreparedClaim:
        """Prepare a claim that the kubelet names; it is read from the API server."""
        prepare, end = f"prepare claim {namespace}/{name}", time.monotonic() + DEADLINE
        with self._metrics.claim("prepare"):
            self._require_scan(prepare)
            document = await self._api.get(CLAIMS, name, namespace)
            found = (document.get("metadata") or {}).get("uid")
            if found != uid:
                message = f"cannot {prepare}: its UID is {found}, expected {uid}"
                raise Refusal(message, "delete the pod, so that it gets the new claim")
            return await self._have(read_claim(document, self._node), end)

    async def _have(
        self, claim: Claim, end: float = math.inf, *, is_early: bool = False
    ) -> PreparedClaim:
        """Prepare a claim when its devices are known, and no pod has one of them."""
        self._asked[claim.uid] = claim
        self._ledger.expect(str(claim))
        self._changed.set()
        await self._await_devices(claim)
        await self._await_pods(claim)
        async with self._work():
            return await self._preparing.prepare(claim, end, is_early=is_early)

    async def _prepare_early(self, claim: Claim) -> None:
        """Prepare a claim before its pod is placed."""
        try:
            self._require_scan(f"prepare claim {claim}")
        except Refusal as refused:
            raise StillRunning(refused.message, refused.hint) from None
        try:
            await self._have(claim, is_early=True)
        except StillRunning:
            raise
        except VfiomgrError:
            self._asked.pop(claim.uid, None)  # the kubelet will not end it
            self._changed.set()
            places = {(each.pool, each.device) for each in claim.devices}
            end = time.monotonic() + _WITHHELD
            self._withheld |= dict.fromkeys(places & self._preparing.refused, end)
            self._publish()
            _call_later(_WITHHELD, self._publish)
            raise

    async def _release_early(self, claim: PreparedClaim) -> None:
        """Undo the preparation of a claim that its pod does not get."""
        async with self._work():
            if await self._preparing.unprepare(claim.uid, only_early=True):
                self._asked.pop(claim.uid, None)
                self._ledger.release(str(claim))

    async def _await_devices(self, claim: Claim) -> None:
        """Wait for devices that the scheduler found in slices that have changed since.

        A scan that knows the claim makes them again.
        """
        end = time.monotonic() + _PATIENCE
        while not all(self._device(each.pool, each.device) for each in claim.devices):
            self._is_received.clear()
            try:
                async with asyncio.timeout(end - time.monotonic()):
                    await self._is_received.wait()
            except TimeoutError:
                return  # what is missing is refused

    async def _unprepare(self, namespace: str, name: str, uid: str) -> None:
        """Undo the preparation of a claim, which may no longer exist."""
        with self._metrics.claim("unprepare"):
            self._require_scan(f"release claim {namespace}/{name}")
            async with self._work():
                await self._preparing.unprepare(uid)
                self._asked.pop(uid, None)
                self._ledger.release(f"{namespace}/{name}")

    @asynccontextmanager
    async def _work(self) -> AsyncIterator[None]:
        self._working += 1
        try:
            yield
        finally:
            self._working -= 1
            await self._renew(is_changed=True)

    def _require_scan(self, what: str) -> None:
        """Raise Refusal unless the devices, and the pods that have some, are known."""
        if self._pools is None or not self._knows_pods:
            message = f"cannot {what}: the devices of the host and its pods are not known yet"
            raise Refusal(message, "wait a moment; see vfiomgr node status on the node")

    async def _await_pods(self, claim: Claim) -> None:
        """Wait until no pod has a device of a claim from a device plugin, or raise Refusal.

        The kubelet is asked before a device is bound: others' plugins may have given it to a pod.
        """
        end = time.monotonic() + _HANDOVER
        is_known = not self._binds(claim)
        while True:
            if is_known and not self._taken(claim):
                return
            is_known = await self._ledger.ask() is not None
            taken = self._taken(claim)
            if is_known and taken is None:
                return
            if time.monotonic() >= end:
                raise _still_taken(claim, taken)
            await asyncio.sleep(_AGAIN)

    def _binds(self, claim: Claim) -> bool:
        """Whether a device of a claim is still to be bound."""
        if self._preparing.is_ready(claim.uid):
            return False
        devices = (self._device(each.pool, each.device) for each in claim.devices)
        return any(device is not None and device.target.on_demand for device in devices)

    def _taken(self, claim: Claim) -> tuple[str, str] | None:
        """A unit of a claim that a pod has from the device plugin, and the pod."""
        for allocated in claim.devices:
            device = self._device(allocated.pool, allocated.device)
            unit = "" if device is None else device.target.unit
            if unit and (pod := self._pod_of(unit)):
                return unit, pod
        return None

    def _pod_of(self, unit: str) -> str:
        """The pod that has a unit, from this device plugin or from that of others."""
        known = self._units.get(unit)
        return self._ledger.pod_of(unit, () if known is None else known.aliases)


def _call_later(seconds: float, call: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_later(seconds, call)


def _health(pool: str, device: str, unit: NodeUnit) -> DeviceHealth:
    reasons = (reason.summary for reason in unit.reasons)
    return DeviceHealth(pool, device, "; ".join(reasons))


def _still_taken(claim: Claim, taken: tuple[str, str] | None) -> Refusal:
    """The refusal of a claim whose device a pod has, or may have."""
    if taken is None:
        message = (
            f"cannot prepare claim {claim}: the kubelet does not report which pods have devices"
        )
        return Refusal(message, "see the log of the kubelet, and: vfiomgr node status")
    unit, pod = taken
    message = (
        f"cannot prepare claim {claim}: "
        f"{unit} is assigned to pod {pod} by a device plugin or another driver"
    )
    return Refusal(message, "delete one of the two pods")
