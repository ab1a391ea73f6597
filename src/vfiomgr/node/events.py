"""Events of the node, which `kubectl describe node` shows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from vfiomgr.node.api_server import EVENTS, Api, ApiError, Trouble

if TYPE_CHECKING:
    from vfiomgr.node.messages import EventSettings

_EVENTS_OF_NODES = "default"
"""Events of nodes, which are in no namespace, are in this one."""
_COMPONENT = "vfiomgr-node"
_LONGEST_EVENT = 1024
"""Characters of the message: as many as events.k8s.io/v1 accepts bytes (NoteLengthLimit)."""
_ATTEMPTS = 5
_EVENT_PAUSE = 1.0
"""Seconds until the next attempt; doubled each time."""
_WAITING = 100
"""Events that are kept while the API server does not answer; more are dropped."""
_BURST, _REFILL = 5, 300.0
"""Events of a reason and a device at once, and the seconds until one more is written."""


class _Budget(NamedTuple):
    left: float
    since: float
    dropped: int = 0


class Events:
    """Writes events one after the other; nothing waits for it."""

    def __init__(
        self,
        settings: EventSettings,
        tell: Callable[[str], None],
        failed: Callable[[str, str, int], None] = lambda _verb, _resource, _status: None,
    ) -> None:
        """`failed` is called for each failed request, as by `Api`."""
        self._node = settings.node
        self._api = Api(settings.server, settings.directory, failed)
        self._trouble = Trouble(tell)
        self._waiting: asyncio.Queue[dict[str, Any]] = asyncio.Queue(_WAITING)
        self._budgets: dict[tuple[str, str], _Budget] = {}

    def put(self, reason: str, message: str, *, is_normal: bool = False) -> None:
        """Have an event written; `reason` is one word, as `kubectl` shows it.

        The message begins with the device; a device that changes all the time fills no API server.
        """
        now, key = time.monotonic(), (reason, message.partition(" ")[0])
        budget = self._budgets.get(key, _Budget(_BURST, now))
        left = min(_BURST, budget.left + (now - budget.since) / _REFILL)
        if left < 1:
            self._budgets[key] = _Budget(left, now, budget.dropped + 1)
            return
        self._budgets[key] = _Budget(left - 1, now)
        self._forget(now)
        if budget.dropped:
            message = f"{message} (not written since the last one: {budget.dropped})"
        if not self._waiting.full():
            self._waiting.put_nowait(self._event(reason, message, is_normal=is_normal))

    def _forget(self, now: float) -> None:
        """Remove the budgets that are full again: each new vGPU has another name."""
        self._budgets = {
            key: each
            for key, each in self._budgets.items()
            if each.dropped or each.left + (now - each.since) / _REFILL < _BURST
        }

    async def run(self) -> None:
        """Write what waits, until the task is cancelled."""
        try:
            while True:
                problem = await self._write(await self._waiting.get())
                if problem:
                    self._trouble.report(f"cannot write an event of the node: {problem}")
                else:
                    self._trouble.end()
        finally:
            await self._api.close()

    async def _write(self, event: dict[str, Any]) -> str:
        """Write an event; returns why it was dropped."""
        pause = _EVENT_PAUSE
        for attempt in range(_ATTEMPTS):
            if attempt:
                await asyncio.sleep(pause)
                pause *= 2
            try:
                await self._api.create(EVENTS, event, _EVENTS_OF_NODES)
            except ApiError as error:
                problem = f"{error.status or ''} {error.message.partition(': ')[2]}".strip()
                if not error.is_passing:
                    break
            else:
                return ""
        return problem

    def _event(self, reason: str, message: str, *, is_normal: bool) -> dict[str, Any]:
        """An event of v1; the uid of a node is its name there, as in the kubelet's own events."""
        node, now = self._node, datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"{node}.{time.time_ns():x}", "namespace": _EVENTS_OF_NODES},
            "involvedObject": {"apiVersion": "v1", "kind": "Node", "name": node, "uid": node},
            "reason": reason,
            "message": message[:_LONGEST_EVENT],
            "type": "Normal" if is_normal else "Warning",
            "count": 1,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "source": {"component": _COMPONENT, "host": node},
            "reportingComponent": _COMPONENT,
            "reportingInstance": node,
        }
