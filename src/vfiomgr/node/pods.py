"""The pods of a node that have devices, as the kubelet reports them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from vfiomgr.node.kubelet import NoAnswer, pod_devices
from vfiomgr.node.sockets import Stamp, stamp_of

if TYPE_CHECKING:
    from vfiomgr.node.kubelet import ClaimUse, Key
    from vfiomgr.node.model import Inventory

_FRESH = 1.0
"""Seconds until an answer is too old; only a kubelet that starts is asked more often."""
_PATIENCE = 0.6
"""Seconds to wait for the kubelet; commands wait a second for the agent."""
_STARTING = 3.0
"""Seconds in which a kubelet that starts may not answer, or may not list all pods (seen: one)."""
_NAMING = 10.0
"""Seconds in which the kubelet reports the pod that it has given a device to."""


class PodLedger:
    """The pods that have devices.

    The kubelet limits the rate of calls of all its clients together: one call at a time serves
    everyone who asks.
    """

    def __init__(self, socket: str) -> None:
        self._socket = socket
        self._call: asyncio.Task[Mapping[Key, str] | None] | None = None
        self._called_at = 0.0
        self._stamp: Stamp | None = None
        self._seen_at = 0.0
        """When the present socket was found."""
        self._allocated: dict[Key, float] = {}
        """When devices were allocated that the kubelet has not reported since."""
        self.pods: Mapping[Key, str] = {}
        """The last answer: NAMESPACE/POD/CONTAINER."""
        self.is_known = False
        """Whether the kubelet has ever answered."""
        self.claims: Mapping[str, ClaimUse] = {}
        """The claims of the last answer, without those that were released since."""
        self._released: set[str] = set()
        """The claims that were released, until an answer does not name them."""
        self.report_claims: Callable[[], object] = lambda: None
        """Called when the claims have changed."""

    def stamp(self) -> Stamp | None:
        """What changes if the kubelet creates its socket again; None without one."""
        stamp = stamp_of(self._socket)
        if stamp not in (None, self._stamp):
            self._stamp, self._seen_at = stamp, time.monotonic()
        return stamp

    @property
    def is_starting(self) -> bool:
        """Whether the kubelet's socket is so new that it may not answer, or not list all pods."""
        return time.monotonic() < self._seen_at + _STARTING

    async def ask(self) -> Mapping[Key, str] | None:
        """The kubelet's answer, at most a second old; None if it does not answer.

        A kubelet that has started meanwhile is asked at once. While it starts, each call asks again
        if the one before was not answered.
        """
        if self.stamp() is None:
            return None
        call, now = self._call, time.monotonic()
        is_old = now >= self._called_at + _FRESH or self._seen_at > self._called_at
        is_starting = self.is_starting
        if call is None or (call.done() and (is_old or (is_starting and call.result() is None))):
            self._called_at = now
            call = self._call = asyncio.create_task(self._ask(now))
        return await asyncio.shield(call)

    async def refresh(self) -> None:
        """Ask the kubelet, and do not wait long for it."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE):
                await self.ask()

    def allocate(self, resource: str, devices: Iterable[str]) -> None:
        """Remember devices that the kubelet gives to a pod, whose name it does not say."""
        now = time.monotonic()
        self._allocated.update({(resource, device): now for device in devices})

    def held(self, offered: Inventory) -> dict[str, str]:
        """The pods of these devices; those that claims bind, also from others' plugins."""
        ours = {resource.name for resource in offered.resources}
        found = {device: pod for (name, device), pod in self.pods.items() if name in ours}
        others = {unit.id: self.pod_of(unit.id, unit.aliases) for unit in offered.on_demand}
        return found | {device: pod for device, pod in others.items() if pod}

    def pod_of(self, device: str, aliases: Iterable[str] = ()) -> str:
        """The pod that has a device, even if the kubelet has not named it yet; empty without one.

        `aliases` are what other plugins call it, perhaps with the number of a share behind.
        """
        beginnings = tuple(f"{name}{mark}" for name in aliases for mark in ("-", "::"))
        pods = (
            pod
            for (_, held), pod in self.pods.items()
            if held == device or held in aliases or held.startswith(beginnings)
        )
        is_given = any(given == device for _, given in self._allocated)
        return next(pods, "that starts now" if is_given else "")

    def allocated(self, offered: Inventory) -> dict[str, float]:
        """The seconds since devices were given to pods that the kubelet has not named yet."""
        ours, now = {resource.name for resource in offered.resources}, time.monotonic()
        return {device: now - at for (name, device), at in self._allocated.items() if name in ours}

    def expect(self, claim: str) -> None:
        """Accept answers that name a claim again: it is prepared."""
        self._released.discard(claim)

    def release(self, claim: str) -> None:
        """Ignore a claim that the kubelet still names: it was released."""
        self._released.add(claim)
        self.claims = {name: use for name, use in self.claims.items() if name != claim}

    async def _ask(self, now: float) -> Mapping[Key, str] | None:
        try:
            found, claims = await pod_devices(self._socket)
        except NoAnswer:
            return None
        if now < self._seen_at + _STARTING:
            found, claims = {**self.pods, **found}, {**self.claims, **claims}
        self._released &= claims.keys()
        claims = {name: use for name, use in claims.items() if name not in self._released}
        if claims != self.claims:
            self.claims = claims
            self.report_claims()
        self.pods, self.is_known = found, True
        self._allocated = {
            key: at
            for key, at in self._allocated.items()
            if at >= now or (key not in found and now < at + _NAMING)
        }
        return found
