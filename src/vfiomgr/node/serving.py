"""A resource that is served on a socket of its own and registered with the kubelet."""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import grpc

from vfiomgr.errors import UsageError
from vfiomgr.node.kubelet import SOCKET, NoAnswer, register, stamp_of
from vfiomgr.node.plugin import DevicePlugin

if TYPE_CHECKING:
    from collections.abc import Callable

    from vfiomgr.node.kubelet import Stamp
    from vfiomgr.node.model import NodeResource
    from vfiomgr.node.plugin import Observe, Verify

PREFIX = "vfiomgr-"
_LONGEST_PATH = 107
"""Bytes of a Unix socket's path (sun_path in unix(7))."""
_PROCESS = secrets.token_hex(4)
"""Two agents in containers can have the same process ID."""
_LISTING = 5.0
"""Seconds in which a kubelet that accepted a registration lists the devices."""
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0
"""Seconds until a failed registration is repeated; doubled each time."""


def socket_name(resource: str) -> str:
    """The name of the socket; no two resources or processes share one.

    The end of a server removes its path even if another server has replaced the socket
    (https://github.com/grpc/grpc/issues/17122), and a kubelet that finds the same name again
    confuses the two processes (https://github.com/kubernetes/kubernetes/issues/127803).
    """
    return f"{PREFIX}{hashlib.sha256(resource.encode()).hexdigest()[:8]}-{_PROCESS}.sock"


class ServedResource:
    """A resource, its server, and its registration; `tend` keeps both alive."""

    def __init__(
        self,
        resource: NodeResource,
        directory: str,
        verify: Verify,
        observe: Observe,
        tell: Callable[[str], None],
    ) -> None:
        self.name = resource.name
        self.plugin = DevicePlugin(resource, verify, observe)
        self._directory = directory
        self._path = os.path.join(directory, socket_name(resource.name))
        if len(os.fsencode(self._path)) > _LONGEST_PATH:
            message = f"the path of a socket has more than {_LONGEST_PATH} bytes: {self._path}"
            raise UsageError(message, "use a shorter --plugin-directory")
        self._tell = tell
        self._server: grpc.aio.Server | None = None
        self._served: Stamp | None = None
        self._kubelet: Stamp | None = None
        """The kubelet's socket when it accepted the registration."""
        self._registered_at = 0.0
        self._opened = 0
        """The number of streams until the registration."""
        self._retry_at, self._pause = 0.0, 0.0
        self._busy = asyncio.Lock()
        self._is_closed = False

    @property
    def is_registered(self) -> bool:
        """Whether the kubelet lists the devices."""
        return self.plugin.streams > 0

    async def tend(self) -> None:
        """Serve if the socket is missing, then register if the kubelet does not list the devices.

        A kubelet removes all sockets and creates its own again when it starts, and never
        reconnects after the end of a stream.
        """
        async with self._busy:
            if not self._is_closed:
                await self._tend()

    async def _tend(self) -> None:
        if self._server is None or stamp_of(self._path) != self._served:
            await self._serve()
        kubelet = stamp_of(os.path.join(self._directory, SOCKET))
        now = time.monotonic()
        if kubelet is None or (kubelet == self._kubelet and self._is_listed_at(now)):
            return
        if kubelet != self._kubelet:
            self._tell(f"{self.name}: found a kubelet")
            self._kubelet, self._pause, self._retry_at = kubelet, 0.0, 0.0
        if now >= self._retry_at:
            await self._register()

    def _is_listed_at(self, now: float) -> bool:
        """Whether the devices are listed, or a new registration has still time to lead to it."""
        is_new = self.plugin.opened == self._opened
        return self.is_registered or (is_new and now < self._registered_at + _LISTING)

    async def _serve(self) -> None:
        await self._stop()
        server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        server.add_generic_rpc_handlers((self.plugin.handler(),))
        server.add_insecure_port(f"unix:{self._path}")
        await server.start()
        self._server, self._served = server, stamp_of(self._path)
        self._kubelet = None

    async def _register(self) -> None:
        self._opened = self.plugin.opened
        try:
            await register(self._directory, os.path.basename(self._path), self.name)
        except NoAnswer as error:
            self._pause = min(self._pause * 2 or _FIRST_PAUSE, _LONGEST_PAUSE)
            self._retry_at = time.monotonic() + self._pause
            self._tell(f"{self.name}: {error.message}; next attempt in {self._pause:g} s")
            return
        self._registered_at, self._pause = time.monotonic(), 0.0
        self._tell(f"{self.name}: registered with the kubelet")

    async def close(self) -> None:
        """End the streams and remove the socket; the kubelet keeps the devices for its pods.

        No empty list is sent: the kubelet would take the devices away from restarting containers.
        """
        async with self._busy:
            self._is_closed = True
            await self._stop()

    async def _stop(self) -> None:
        if self._server is None:
            return
        server, self._server = self._server, None
        await server.stop(None)
        with suppress(FileNotFoundError):
            os.unlink(self._path)
