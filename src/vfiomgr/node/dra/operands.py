"""NVIDIA's GPU Operator: its monitoring leaves the node while a device is bound, then it returns.

The pods follow labels of the node, whose value the operator keeps (addGPUStateLabels in
controllers/state_manager.go of gpu-operator). The value of a label that was changed here says so:
nothing else is recorded, and an agent that was killed, or a reboot, loses nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from vfiomgr.expressions import expression
from vfiomgr.node.api_server import CONFLICT, NODES, Api, ApiError, Backoff, Trouble

_LABEL = expression(r"nvidia\.com/gpu\.deploy\.(dcgm|dcgm-exporter|nvsm)(-dra)?")
_PRESENT, _AWAY = "true", "paused-for-vfiomgr"
_ATTEMPTS = 5
"""The kubelet and others change the Node object too."""
_TICK = 0.5
_CLOSING = 5.0
"""Seconds that the agent waits for the API server at its end."""


class Operands:
    """The operator's pods on this node.

    `is_binding` answers whether a device is being bound, also if nobody here waits for it: the
    child of an agent that was killed, or the pod that binds devices, continues.
    """

    def __init__(
        self, api: Api, node: str, tell: Callable[[str], None], is_binding: Callable[[], bool]
    ) -> None:
        self._api, self._node, self._is_binding = api, node, is_binding
        self._trouble, self._backoff = Trouble(tell), Backoff()
        self._lock = asyncio.Lock()
        self._needed = 0
        """How many binds need them away."""
        self._are_away = True
        """Whether some may be away, at first because of an agent that was killed."""

    @asynccontextmanager
    async def away(self) -> AsyncIterator[None]:
        """Have the pods leave for a bind, which waits for their end.

        Raises:
            ApiError: the labels of the node were not changed.
        """
        self._needed += 1
        try:
            async with self._lock:
                self._are_away = True
                await self._change(_PRESENT, _AWAY)
            yield
        finally:
            self._needed -= 1

    async def run(self) -> None:
        """Have the pods return after the last bind, until the task is cancelled."""
        while True:
            await asyncio.sleep(_TICK)
            try:
                async with self._lock:
                    if self._are_away and not self._needed and not self._is_binding():
                        await self._change(_AWAY, _PRESENT)
                        self._are_away = False
                        self._trouble.end()
                        self._backoff.reset()
            except ApiError as error:
                self._trouble.report(f"the GPU Operator's pods may be away: {error.message}")
                await asyncio.sleep(self._backoff.pause())

    async def close(self) -> None:
        """Have the pods return at the end of the agent: perhaps no other one starts.

        After a bind that takes longer than this waits, they return with the next agent.
        """
        if self._are_away:
            with suppress(ApiError, TimeoutError):  # then the next agent does it
                async with asyncio.timeout(_CLOSING):
                    while self._are_away:
                        if self._is_binding():
                            await asyncio.sleep(_TICK)
                            continue
                        await self._change(_AWAY, _PRESENT)
                        self._are_away = False

    async def _change(self, before: str, after: str) -> None:
        """Change the labels that have a value; others, e.g. `false`, are not ours."""
        for attempt in range(1, _ATTEMPTS + 1):
            node = await self._api.get(NODES, self._node)
            labels = node["metadata"].get("labels") or {}
            changed = {k: after for k, v in labels.items() if _LABEL.fullmatch(k) and v == before}
            if not changed:
                return
            node["metadata"]["labels"] = labels | changed
            try:
                await self._api.update(NODES, node)
            except ApiError as error:
                if error.status != CONFLICT or attempt == _ATTEMPTS:
                    raise
            else:
                return
