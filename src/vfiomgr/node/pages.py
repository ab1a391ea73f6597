"""The pages of the agent: metrics and probes for others, its status for other commands."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from vfiomgr.errors import UsageError
from vfiomgr.node.kubelet import kubelet_stamp
from vfiomgr.node.metrics import CONTENT_TYPE
from vfiomgr.node.sockets import Clients, Stamp, cut, refuse_served, stamp_of
from vfiomgr.users.node_agent import ClaimStatus, DeviceStatus, NodeStatus, ResourceStatus
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.node.agent import Agent
    from vfiomgr.node.messages import AgentSettings
    from vfiomgr.node.model import NodeUnit

    Page = Callable[[str], Awaitable["Response"]]
    """Answers a request; the text is its body."""

UNIX = "unix:"
_DEADLINE = 10.0
"""Seconds for a request to arrive, and for its answer to be read."""
_MOST = 64
"""Connections at a time."""
_LONGEST = 1 << 16
_LENGTH = "content-length"
_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 409: "Conflict", 503: "Unavailable"}


class Response(Value):
    """The answer to a request."""

    body: bytes
    status: int = 200
    content_type: str = "text/plain; charset=utf-8"


def text(words: str, status: int = 200) -> Response:
    """A line of text."""
    return Response(f"{cut(words)}\n".encode(), status)


class HttpServer:
    """Serves pages by method and path: `GET /metrics`."""

    def __init__(self, pages: Mapping[str, Page], tell: Callable[[str], None]) -> None:
        self._pages = pages
        self._tell = tell
        self._answering: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self._path = ""
        self._stamp: Stamp | None = None

    async def start(self, address: str) -> None:
        """Listen on HOST:PORT, :PORT, or unix:PATH, which only its owner can open.

        Raises:
            Refusal: another process serves the socket.
            UsageError: the address is not valid, is in use, or is another file.
        """
        self._clients = Clients(address, _MOST, self._tell)
        try:
            if address.startswith(UNIX):
                self._path = address.removeprefix(UNIX)
                _remove_socket(self._path)
                self._server = await asyncio.start_unix_server(self._serve, self._path)
                os.chmod(self._path, 0o600)
                self._stamp = stamp_of(self._path)
            else:
                host, port = parse_address(address)
                self._server = await asyncio.start_server(self._serve, host or None, port)
        except OSError as error:
            message = f"cannot listen on {address}: {error.strerror or error}"
            raise UsageError(message, "choose another address") from None

    @property
    def port(self) -> int:
        """The port that it listens on."""
        assert self._server is not None  # noqa: S101 - it was started
        return int(self._server.sockets[0].getsockname()[1])

    async def tend(self) -> None:
        """Create a socket that was removed again.

        Raises:
            Refusal: another process serves a socket in its place.
        """
        if self._path and self._stamp != stamp_of(self._path):
            await self.stop()
            await self.start(f"{UNIX}{self._path}")

    async def stop(self) -> None:
        """Stop listening, and remove the socket unless it belongs to another process."""
        if self._server is not None:
            self._server.close()
            if self._path and self._stamp == stamp_of(self._path):
                with suppress(FileNotFoundError):
                    os.unlink(self._path)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._clients.add(writer.transport, lambda: writer not in self._answering)
        try:
            head, body = await _request(reader)
            self._answering.add(writer)
            response = await self._answer(head, body)
            async with asyncio.timeout(_DEADLINE):
                writer.write(_written(response))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError):
            return  # the client is gone, slow, or does not speak HTTP
        finally:
            writer.transport.abort()  # no effect after the answer
            self._answering.discard(writer)
            self._clients.remove(writer.transport)

    async def _answer(self, head: str, body: str | None) -> Response:
        if body is None:
            return text("the request is too long", 400)
        method, _, target = head.partition(" ")
        path = target.partition(" ")[0].partition("?")[0]
        page = self._pages.get(f"{method} {path}")
        return text("not found", 404) if page is None else await page(body)


async def _request(reader: asyncio.StreamReader) -> tuple[str, str | None]:
    """The first line of a request, and its body; None if that is too long."""
    async with asyncio.timeout(_DEADLINE):
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        fields = dict(line.lower().split(":", 1) for line in head[1:] if ":" in line)
        length = fields.get(_LENGTH, "0").strip()
        if not length.isdecimal() or int(length) > _LONGEST:
            return head[0], None
        return head[0], (await reader.readexactly(int(length))).decode(errors="replace")


def _written(response: Response) -> bytes:
    reason = _REASONS.get(response.status, "")
    head = (
        f"HTTP/1.1 {response.status} {reason}\r\nContent-Type: {response.content_type}\r\n"
        f"Content-Length: {len(response.body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + response.body


def _remove_socket(path: str) -> None:
    """Remove the socket of an agent that was killed, but no other file, and none that is served."""
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            message = f"cannot listen on {UNIX}{path}: the file exists and is not a socket"
            raise UsageError(message, "choose another path, or remove the file")
        refuse_served(path)
        os.unlink(path)


def parse_address(address: str) -> tuple[str, int]:
    """The host and port of HOST:PORT, [IPv6]:PORT or :PORT; without a host all addresses are meant.

    Raises:
        UsageError: it is not of one of these forms.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or int(port) >= 1 << 16:
        message = f"not an address: {address!r}"
        raise UsageError(message, "use HOST:PORT, :PORT or unix:PATH")
    return host.strip("[]"), int(port)


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
        return Response(self._agent.metrics.text(), content_type=CONTENT_TYPE)

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
            claims=tuple(self._claims()),
            on_demand=tuple(_device_status(unit, "", None) for unit in offered.on_demand),
            pods_unknown=self._why_unknown(),
        )

    def _claims(self) -> Iterator[ClaimStatus]:
        """The devices of claims, and from which drivers they were bound."""
        bound = {} if self._agent.driver is None else self._agent.driver.bound
        for device, claim in sorted(self._agent.claims.items()):
            made = bound.get(device)
            if made is None:
                yield ClaimStatus(device, claim)
            else:
                yield ClaimStatus(device, claim, made.driver, made.since, made.returns)

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
