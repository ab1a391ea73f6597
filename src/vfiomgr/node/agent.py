"""The agent of a node: it serves the resources of the scanning process to the kubelet."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import signal
import time
from collections.abc import Callable, Coroutine, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from vfiomgr.errors import HostError, Refusal
from vfiomgr.host.notifying import notify, watchdog_seconds
from vfiomgr.host.tree import HostTree
from vfiomgr.node.health import reset_failed, stuck_in
from vfiomgr.node.kubelet import kubelet_stamp
from vfiomgr.node.metrics import AgentMetrics
from vfiomgr.node.model import Inventory, NodeUnit
from vfiomgr.node.offers import LONGEST, Offers, Quarantine
from vfiomgr.node.pages import AgentPages
from vfiomgr.node.pods import PodLedger
from vfiomgr.node.processes import Scanning
from vfiomgr.node.serving import Listing, ServedResource
from vfiomgr.node.sockets import PREFIX, DirectoryChanges, DirectoryLock, Stamp, remove_stale
from vfiomgr.paths import HostPath

if TYPE_CHECKING:
    from vfiomgr.diagnostic import Diagnostic
    from vfiomgr.node.dra.driver import Driver
    from vfiomgr.node.events import Events
    from vfiomgr.node.messages import AgentSettings, Report

_AFTER_ALLOCATION = 5.0
"""Seconds until the kubelet is asked which pod has received a device."""
_ENDING = 5.0
"""Seconds that the parts of the agent have to end."""
_SHARED = 2.0
"""Seconds between questions to the kubelet while pods have devices that claims may get."""
_PATIENCE = 30.0
"""Seconds that devices are withheld until the kubelet reports which pods have some."""
_HEALTH_INTERVALS = 3
"""Intervals of scans after which the health of a device of a claim is unknown."""
_UNANSWERED = 1.0
"""Seconds until the kubelet is asked again if it has not answered yet."""
_LIVELY = 30.0
"""Seconds after a change of the kubelet's sockets in which they are looked at in every tick."""
_IDLE = 10.0
"""Seconds until they are looked at anyway."""


def run(settings: AgentSettings, tell: Callable[[str], None]) -> None:
    """Run an agent until a signal asks for the end.

    Raises:
        VfiomgrError: as in `Agent.run`.
    """
    asyncio.run(Agent(settings, tell).run())


class Agent:
    """Everything that runs beside gRPC in its process; nothing here reads devices."""

    def __init__(self, settings: AgentSettings, tell: Callable[[str], None]) -> None:
        self._settings = settings
        self._tell = tell
        self._found = self.offered = Inventory()
        self.is_scanned = asyncio.Event()
        self._is_serving = asyncio.Event()
        """Whether the scanned devices are offered to the kubelet, if it answers."""
        self._offers = Offers(settings.debounce)
        self._served: dict[str, ServedResource] = {}
        self.ledger = PodLedger(settings.pod_resources)
        self._joined: tuple[bool, Mapping[tuple[str, str], str]] = False, {}
        """Whether pods were known at the last offer, and which."""
        self.is_offering = False
        """Whether devices were offered; without this, the pods that have them are unknown."""
        self._held: dict[str, str] | None = {} if settings.dra is None else None
        """The pods of offered devices, as the scanning process knows them."""
        self._drift: Mapping[str, str] = {}
        """The devices that differ from the layout, and why."""
        self.is_following = False
        """Whether the pods are known, or cannot be."""
        self._pods_at = 0.0
        """When the kubelet is asked again."""
        self.scanning = Scanning(settings.root, settings.scan, self._receive, tell)
        self.metrics = AgentMetrics(lambda: self.registered, lambda: bool(self.scanning.error))
        self._events: Events | None = None
        if settings.events is not None:
            self._events = import_module("vfiomgr.node.events").Events(
                settings.events, tell, self.metrics.count_failure
            )
        self.driver: Driver | None = None
        if settings.dra is not None:
            self.driver = import_module("vfiomgr.node.dra.driver").Driver(
                settings.dra,
                HostTree(settings.root),
                share=lambda facts: self.scanning.tell(claims=facts),
                offer=self._offer_if_known,
                ledger=self.ledger,
                metrics=self.metrics,
                withhold=lambda unit, why: self._start(self._withhold_unreset(unit, why)),
                require_answer=self.scanning.require_answer,
                tell=tell,
            )
        self._quarantine = Quarantine(HostTree(settings.root), time.monotonic())
        self._lock = DirectoryLock(HostTree(settings.root), settings.plugin_directory)
        self._listing = Listing(settings.pod_resources)
        self._quarantined: frozenset[str] = frozenset()
        self._failure: BaseException | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()
        self._is_ready = False
        directories = (settings.plugin_directory, os.path.dirname(settings.pod_resources))
        self._sockets = DirectoryChanges(directories, settings.tick)
        self._pages = AgentPages(settings, self, tell)

    async def run(self) -> None:
        """Serve until a signal asks for the end.

        Raises:
            Refusal: another agent serves this kubelet.
            UsageError: a directory or an address cannot be used.
        """
        os.umask(0o077)  # the sockets are for root only
        await self._lock.take()
        try:
            await self._run()
        finally:
            self._lock.close()

    async def _run(self) -> None:
        remove_stale(self._settings.plugin_directory, PREFIX, "--plugin-directory")
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopping.set)
        self._sockets.start()
        loop.add_signal_handler(signal.SIGHUP, lambda: self._start(self._reload()))
        directory = os.path.dirname(self._settings.control)
        HostTree("/").make_directory(HostPath(directory))  # the umask is narrower
        try:
            await self._serve()
        finally:
            notify("STOPPING=1")
            await self._stop()

    async def _serve(self) -> None:
        await self._pages.start()
        if (reason := self._quarantine.unreadable) is not None:
            self._report_quarantine("each device", LONGEST, reason)
        await self._share_quarantine()
        if self.driver is not None:
            await self.driver.share()
        for work in (self.scanning.run(), self._tend(), self._follow_pods(), self._watch()):
            self._start(work)
        if self._events is not None:
            self._start(self._events.run())
        if self.driver is not None:
            self._start(self.driver.run())
        await self._stopping.wait()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """End the agent if a part of it failed: a part alone would look alive."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = error
            self._stopping.set()

    async def _stop(self) -> None:
        self._sockets.close()
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_ENDING)
        await asyncio.gather(*(served.close() for served in self._served.values()))
        if self.driver is not None:
            await self.driver.close()
        await self._pages.stop()
        if self._failure is not None:
            raise self._failure

    # ---- what is offered

    async def _receive(self, report: Report) -> None:
        seconds = _HEALTH_INTERVALS * self._settings.scan.interval
        if report.inventory is None:
            if self.driver is not None:
                self.driver.confirm(seconds)
            return
        if self.driver is None:
            self._found = report.inventory
        elif self.driver.receive(report, seconds):
            self._found = self.driver.shown(report.inventory, self._found)
        else:
            return  # claims have other devices meanwhile: another scan follows
        self._report_drift(report.drift)
        for device, reason in (await self._confirmed(report.inventory, report.crashes)).items():
            await self._withhold(device, reason)
        self.metrics.scanned = report.metrics
        self.is_scanned.set()
        await self._join()

    async def _confirmed(
        self, found: Inventory, crashes: Mapping[str, Diagnostic]
    ) -> dict[str, Diagnostic]:
        """The crashes, without those of guests that ended with their pods.

        The kubelet names a pod for some seconds after its end, and is asked seldom.
        """
        if crashes:
            await self.ledger.ask()
        held = {device for _, device in self.ledger.pods}
        ended = {unit.id for unit in found.units if unit.pod and unit.id not in held}
        return {device: reason for device, reason in crashes.items() if device not in ended}

    async def _join(self) -> None:
        """Offer what was found, as soon as the scan and the pods are known.

        A first offer waits for the scan that knows the pods: without them a device of a pod may
        seem to be in use by a guest of the host.
        """
        self._joined = self.is_following, self.ledger.pods
        if self.is_scanned.is_set() and self.is_following:
            is_changed = await self._share_pods()
            if self._served or not is_changed:
                await self._offer()

    async def _share_pods(self) -> bool:
        """Tell the scanning process which pods have devices, if that has changed."""
        held = self.ledger.held(self._found)
        if held == self._held:
            return False
        self._held = held
        await self.scanning.tell(pods=held)
        return True

    async def _offer(self) -> None:
        """Serve the debounced result of the last scan; stop resources that are not configured."""
        before = {unit.id: unit for unit in self.offered.units}
        self.offered = self._offers.merge(
            self._found, self.ledger.pods, self._quarantined, time.monotonic(), self.claims
        )
        self.is_offering = True
        for unit in self.offered.units:
            self._report_change(before.get(unit.id), unit)
        for resource in self.offered.resources:
            served = self._served.get(resource.name)
            if served is None:
                self._served[resource.name] = ServedResource(
                    resource,
                    self._settings.plugin_directory,
                    self._verify,
                    self._allocated,
                    self._tell,
                )
            else:
                served.plugin.update(resource)
        names = {resource.name for resource in self.offered.resources}
        for name in [name for name in self._served if name not in names]:
            self._tell(f"{name}: not configured, therefore not offered")
            await self._served.pop(name).close()
        self._sockets.stir()  # a device may have to be withdrawn soon, or a resource registered

    @property
    def registered(self) -> Mapping[str, bool]:
        """The resources that are served, and whether the kubelet lists each."""
        return {name: served.is_registered for name, served in self._served.items()}

    @property
    def claims(self) -> Mapping[str, str]:
        """The claims that have devices."""
        return {} if self.driver is None else self.driver.claims

    async def _offer_if_known(self) -> None:
        """Offer the devices again after a change of claims, if they were offered before."""
        self._ask_soon()
        if self._served:
            await self._offer()

    def _report_change(self, before: NodeUnit | None, now: NodeUnit) -> None:
        """Write an event if the kubelet learns something new; a quarantine has its own."""
        if self._events is None:
            return
        was_stuck, stuck = stuck_in(before), stuck_in(now)
        if stuck is not None:
            if was_stuck is None:
                text = f"{stuck.summary}; pods with claims for it are evicted; {stuck.hint}"
                self._events.put("DeviceStuck", text)
            return
        if before is None or before.is_healthy == now.is_healthy or before.claim != now.claim:
            return  # Kubernetes has events of claims
        if now.on_demand is not None and not now.nodes and was_stuck is None:
            return  # the host uses its own device
        if now.is_healthy:
            self._events.put("DeviceHealthy", f"{now.id} can be given to pods", is_normal=True)
        elif now.id not in self._quarantined:
            reasons = "; ".join(reason.summary for reason in now.reasons)
            self._events.put("DeviceUnhealthy", f"{now.id} is not given to pods: {reasons}")

    def _report_drift(self, drift: Mapping[str, str]) -> None:
        """Write an event for each device that leaves the driver of its rule, or returns."""
        before, self._drift = self._drift, drift
        if self._events is None:
            return
        for _, found in sorted(drift.items() - before.items()):
            self._events.put("LayoutDrift", found)
        for device in sorted(before.keys() - drift.keys()):
            found = f"{device} is on the driver that the layout requires"
            self._events.put("LayoutDriftResolved", found, is_normal=True)

    async def _tend(self) -> None:
        """Keep the lock, sockets and registrations, and report devices that stay unhealthy."""
        await self.is_scanned.wait()
        while True:
            self._lock.keep()
            served = tuple(self._served.values())
            await asyncio.gather(self._pages.tend(), *(each.tend() for each in served))
            if self.is_offering or not self.is_following:
                self._is_serving.set()
            await self._listing.check(served, self._sockets.since)
            await self._sockets.wait(self._rest())
            if self._offers.wait(time.monotonic()) == 0:
                await self._offer()
            if self._quarantine.active(time.monotonic()).keys() != self._quarantined:
                await self._share_quarantine()

    @property
    def _is_lively(self) -> bool:
        """Whether the kubelet's sockets have changed lately, or it lists not all resources yet."""
        if time.monotonic() < self._sockets.since + _LIVELY:
            return True
        is_listed = all(self.registered.values())
        return not is_listed and kubelet_stamp(self._settings.plugin_directory) is not None

    def _rest(self) -> float:
        """Seconds until the resources are tended again, if nothing happens."""
        if self._is_lively:
            return self._settings.tick
        now = time.monotonic()
        end, wait = self._quarantine.end(now), self._offers.wait(now)
        ends = (wait, None if end is None else end - now, self._listing.due - now, _IDLE)
        return max(self._settings.tick, min(each for each in ends if each is not None))

    async def _verify(self, resource: str, devices: tuple[str, ...]) -> None:
        """Verify devices before a container starts; after a reboot, nothing was allocated.

        Raises:
            HostError: a device is not as it should be, or cannot be verified.
        """
        self._ask_soon()
        for device in devices:
            if device in self.claims:
                message = f"{device} belongs to ResourceClaim {self.claims[device]}"
                raise Refusal(message, "delete the pod, so that it gets another device")
        problems = await self.scanning.verify(resource, devices)
        for problem in problems:
            if problem.has_failed_reset:
                await self._withhold_unreset(problem.device, problem.message)
        if problems:
            message = "; ".join(problem.message for problem in problems)
            raise HostError(message, "see vfiomgr node status on the node")

    def _allocated(self, resource: str, devices: tuple[str, ...], seconds: float) -> None:
        self.metrics.observe(resource, seconds)
        self.ledger.allocate(resource, devices)
        self._start(self.scanning.allocated(devices))
        self._ask_soon()

    def _ask_soon(self) -> None:
        self._pods_at = min(self._pods_at, time.monotonic() + _AFTER_ALLOCATION)
        self._sockets.stir()

    async def _withhold(self, device: str, reason: Diagnostic) -> None:
        seconds = self._quarantine.add(device, reason, time.monotonic())
        self._report_quarantine(device, seconds, reason)
        await self._share_quarantine()

    def _report_quarantine(self, what: str, seconds: float, reason: Diagnostic) -> None:
        self._tell(f"{what}: quarantined for {seconds:g} s: {reason.summary}")
        if self._events is not None:
            text = f"{what} is not given to pods for {seconds:g} s: {reason.summary}"
            self._events.put("DeviceQuarantined", text)

    async def _withhold_unreset(self, device: str, why: str) -> None:
        """Quarantine a device that could not be reset."""
        unit = next((unit for unit in self._found.units if unit.id == device), None)
        if unit is not None:
            await self._withhold(device, reset_failed(unit, why))

    async def _share_quarantine(self) -> None:
        active = self._quarantine.active(time.monotonic())
        self._quarantined = frozenset(active)
        await self.scanning.tell(quarantine=active)

    async def _reload(self) -> None:
        """Scan now, and read the layout again. Before readiness, a scan is already running."""
        if not self._is_ready:
            return
        notify(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")
        await self.scanning.scan()
        notify("READY=1")

    # ---- which pods have devices

    async def _follow_pods(self) -> None:
        """Ask the kubelet seldom which pods have devices, and soon after an allocation.

        A kubelet that starts lists no pods in its first second. Then it rejects the pods of before
        a reboot if their devices are not offered yet: a first offer does not wait longer.
        """
        end, has_answered = time.monotonic() + _PATIENCE, False
        known: Stamp | None = None
        while True:
            stamp = self.ledger.stamp()
            is_new, known = stamp not in (None, known), stamp or known
            if is_new and self.is_following:
                self._ask_soon()
            elif is_new or time.monotonic() >= self._pods_at:
                self._pods_at = time.monotonic() + self._pods_interval
                has_answered = await self.ledger.ask() is not None or has_answered
                if not has_answered:
                    is_starting = self.ledger.is_starting
                    again = self._settings.tick if is_starting else _UNANSWERED
                    self._pods_at = time.monotonic() + again
                elif is_new or self.ledger.is_starting:
                    self._ask_soon()  # its pods may not be listed yet
                is_over = stamp is None or time.monotonic() > end
                self.is_following = self.is_following or has_answered or is_over
            if (self.is_following, self.ledger.pods) != self._joined:
                await self._join()
            await self._sockets.wait(self._rest_of_pods())

    @property
    def _pods_interval(self) -> float:
        """Seconds until the kubelet is asked for the pods again.

        A claim can get a device only after the end of its pod, which only the kubelet knows.
        """
        is_shared = self.driver is not None and bool(self.ledger.pods)
        return min(self._settings.pods_interval, _SHARED if is_shared else math.inf)

    def _rest_of_pods(self) -> float:
        """Seconds until the kubelet is asked for the pods, if nothing happens."""
        if self._is_lively or not self.is_following:
            return self._settings.tick
        return max(self._settings.tick, min(_IDLE, self._pods_at - time.monotonic()))

    # ---- what others ask

    async def _watch(self) -> None:
        """Report readiness to systemd, since kubelets wait for it, then notify the watchdog."""
        await self._is_serving.wait()
        notify("READY=1")
        self._is_ready = True
        gc.collect()
        gc.freeze()  # what lives as long as the agent: each collection would delay answers by 10 ms
        seconds = watchdog_seconds()
        while seconds is not None:
            if self.scanning.is_alive:
                notify("WATCHDOG=1")
            await asyncio.sleep(seconds / 2)

    async def refresh(self) -> None:
        """Ask the kubelet which pods have devices."""
        await self.ledger.refresh()
        self._sockets.stir()  # the pods may be others

    async def release(self, device: str) -> None:
        """End the quarantine of a device, and forgive its errors up to now."""
        self._quarantine.release(device, (unit.id for unit in self._found.units))
        await self.scanning.tell(forgive=device)
        await self._share_quarantine()
