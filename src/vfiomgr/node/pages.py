"""The pages of the agent: metrics and probes for others, its status for other commands."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import msgspec

from vfiomgr.node.http import UNIX, HttpServer, Response, text
from vfiomgr.node.kubelet import kubelet_stamp
from vfiomgr.node.metrics import CONTENT_TYPE_LATEST
from vfiomgr.users.node_agent import ClaimStatus, DeviceStatus, NodeStatus, ResourceStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vfiomgr.node.agent import Agent
    from vfiomgr.node.messages import AgentSettings
    from vfiomgr.node.model import NodeUnit


class AgentPages:
    """The servers of the pages of an agent."""

    def __init__(self, settings: AgentSettings, agent: Agent, tell: Callable[[str], None]) -> None:
        self._settings = settings
        self._agent = agent
        pages = {
            "GET /metrics": self._show_metrics,
            "GET /healthz": self._show_health,
            "GET /readyz": self._show_readiness,
        }
        self._public = HttpServer(pages, tell)
        own = {"GET /status": self._show_status, "POST /release": self._release}
        self._control = HttpServer(own, tell)

    async def start(self) -> None:
        """Serve other commands, and metrics if their address is set; raises as HttpServer."""
        await self._control.start(f"{UNIX}{self._settings.control}")
        if self._settings.metrics is not None:
            await self._public.start(self._settings.metrics)

    async def tend(self) -> None:
        """Create sockets that were removed again; raises as HttpServer."""
        await asyncio.gather(self._control.tend(), self._public.tend())

    async def stop(self) -> None:
        """Stop listening."""
        await self._public.stop()
        await self._control.stop()

    async def _show_metrics(self, _body: str) -> Response:
        return Response(self._agent.metrics.text(), content_type=CONTENT_TYPE_LATEST)

    async def _show_health(self, _body: str) -> Response:
        if self._agent.scanning.is_alive:
            return text("ok")
        return text("the scanning process does not answer", 503)

    async def _show_readiness(self, _body: str) -> Response:
        waiting = "; ".join(self.unready())
        return text(waiting, 503) if waiting else text("ok")

    def unready(self) -> Iterator[str]:
        """Why the kubelet cannot use the agent yet."""
        agent = self._agent
        if agent.scanning.error:
            yield f"cannot scan the host: {agent.scanning.error}"
        if not agent.is_scanned.is_set():
            yield "the host was not scanned yet"
        elif not agent.is_following:
            yield "the kubelet has not reported the devices of pods yet"
        if agent.driver is not None and not agent.driver.is_registered:
            yield "the kubelet has not registered the DRA driver"
        for name, is_registered in agent.registered.items():
            if not is_registered:
                yield f"the kubelet does not list {name}"

    async def _show_status(self, _body: str) -> Response:
        await self._agent.refresh()
        # Other commands wait for this, so it must be fast; paths of the host are not plain strings.
        body = msgspec.json.encode(self.status(), enc_hook=str)
        return Response(body, content_type="application/json")

    def status(self) -> NodeStatus:
        """The state of the agent, for other commands."""
        agent, directory = self._agent, self._settings.plugin_directory
        offered, registered = agent.offered, agent.registered
        pods, allocated = agent.ledger.held(offered), agent.ledger.allocated(offered)
        return NodeStatus(
            pid=os.getpid(),
            plugin_directory=str(directory),
            has_kubelet=kubelet_stamp(directory) is not None,
            resources=tuple(
                ResourceStatus(
                    each.name,
                    each.consumer,
                    registered.get(each.name, False),
                    tuple(
                        _device_status(unit, pods.get(unit.id, ""), allocated.get(unit.id))
                        for unit in each.units
                    ),
                )
                for each in offered.resources
            ),
            notes=offered.notes,
            error=agent.scanning.error,
            is_dra_registered=None if agent.driver is None else agent.driver.is_registered,
            claims=tuple(ClaimStatus(*each) for each in sorted(agent.claims.items())),
            pods_unknown=self._why_unknown(),
        )

    def _why_unknown(self) -> str:
        """Why it is unknown which pods have devices; empty if it is known."""
        if not self._agent.is_offering:
            return "the agent has not offered the devices yet"
        if not self._agent.ledger.is_known:
            return f"the kubelet has not answered on {self._settings.pod_resources}"
        return ""

    async def _release(self, device: str) -> Response:
        if all(unit.id != device for unit in self._agent.offered.units):
            return text(f"{device} is not offered by this agent", 404)
        await self._agent.release(device)
        return text("released")


def _device_status(unit: NodeUnit, pod: str, age: float | None) -> DeviceStatus:
    """A device with its present pod, which the last scan may not have known."""
    user = unit.used_by if unit.used_by != unit.pod else ""
    if age is not None:
        pod, user, age = "", f"given to a pod {age:.0f} s ago", round(age, 1)
    addresses = tuple(map(str, unit.addresses))
    is_healthy, used_by = unit.is_healthy, pod or user
    return DeviceStatus(
        unit.id, addresses, unit.numa_nodes, is_healthy, used_by, pod, unit.reasons, age
    )
