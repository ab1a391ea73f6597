"""Events of the node in the Kubernetes API, which `kubectl describe node` shows."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import httpx

from vfiomgr.node.api_server import authority, authorization, cause, trusted

if TYPE_CHECKING:
    from collections.abc import Callable

    from vfiomgr.node.messages import EventSettings

_PATH = "/api/v1/namespaces/default/events"
"""Events of nodes, which are in no namespace, are in this one."""
_COMPONENT = "vfiomgr-node"
_LONGEST = 1024
"""Characters of the message: as many as events.k8s.io/v1 accepts bytes (NoteLengthLimit)."""
_DEADLINE = 10.0
_ATTEMPTS = 5
_FIRST_PAUSE = 1.0
"""Seconds until the next attempt; doubled each time."""
_WAITING = 100
"""Events that are kept while the API server does not answer; more are dropped."""
_CREATED = 201
_BUSY = 429
_BROKEN = 500


class Events:
    """Writes events one after the other; nothing waits for it."""

    def __init__(
        self,
        settings: EventSettings,
        tell: Callable[[str], None],
        failed: Callable[[str, str, int], None] = lambda _verb, _resource, _status: None,
    ) -> None:
        self._settings = settings
        self._failed = failed
        """Called for each failed request, with its verb, what it is for, and the HTTP status."""
        self._tell = tell
        self._waiting: asyncio.Queue[dict[str, Any]] = asyncio.Queue(_WAITING)
        self._problem = ""

    def put(self, reason: str, message: str, *, is_normal: bool = False) -> None:
        """Have an event written; `reason` is one word, as `kubectl` shows it."""
        if not self._waiting.full():
            self._waiting.put_nowait(self._event(reason, message, is_normal=is_normal))

    async def run(self) -> None:
        """Write what waits, until the task is cancelled."""
        while True:
            problem = await self._write(await self._waiting.get())
            if problem and problem != self._problem:
                self._tell(f"cannot write an event of the node: {problem}")
            self._problem = problem

    async def _write(self, event: dict[str, Any]) -> str:
        """Write an event; returns why it was dropped."""
        pause = _FIRST_PAUSE
        for attempt in range(_ATTEMPTS):
            if attempt:
                await asyncio.sleep(pause)
                pause *= 2
            try:
                answer = await self._post(event)
            except (OSError, ValueError, httpx.HTTPError, httpx.InvalidURL) as error:
                self._failed("create", "events", 0)
                problem = str(error) or type(error).__name__
                continue
            if answer.status_code == _CREATED:
                return ""
            self._failed("create", "events", answer.status_code)
            problem = f"{answer.status_code} {cause(answer)}"
            if answer.status_code != _BUSY and answer.status_code < _BROKEN:
                break
        return problem

    async def _post(self, event: dict[str, Any]) -> httpx.Response:
        """Send an event on a connection of its own: events are rare, and tokens change."""
        headers = authorization(self._settings.directory)
        verify = trusted(authority(self._settings.directory))
        async with httpx.AsyncClient(verify=verify, timeout=_DEADLINE, trust_env=False) as client:
            url = f"{self._settings.server}{_PATH}"
            return await client.post(url, json=event, headers=headers)

    def _event(self, reason: str, message: str, *, is_normal: bool) -> dict[str, Any]:
        """An event of v1; the uid of a node is its name there, as in the kubelet's own events."""
        node, now = self._settings.node, datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"{node}.{time.time_ns():x}", "namespace": "default"},
            "involvedObject": {"apiVersion": "v1", "kind": "Node", "name": node, "uid": node},
            "reason": reason,
            "message": message[:_LONGEST],
            "type": "Normal" if is_normal else "Warning",
            "count": 1,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "source": {"component": _COMPONENT, "host": node},
            "reportingComponent": _COMPONENT,
            "reportingInstance": node,
        }
