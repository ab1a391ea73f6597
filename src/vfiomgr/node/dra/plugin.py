"""The DRA plugin of a node: its answers to the kubelet, its sockets, and its registration.

The kubelet finds the plugin by a socket in its registry, asks it for its name, and connects to its
other socket. It repeats what fails: preparing a claim, and unpreparing it.

None of its sockets replaces or removes that of another process.

Sources: pkg/kubelet/cm/dra/plugin of kubernetes/kubernetes, api.proto of k8s.io/kubelet.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from vfiomgr.errors import UsageError, VfiomgrError
from vfiomgr.node.dra.model import DRIVER, PreparedClaim, PreparedDevice
from vfiomgr.node.kubelet import (
    CLAIM_METHODS,
    CLAIMS,
    HEALTH,
    HEALTH_METHODS,
    PLUGIN_METHODS,
    PLUGINS,
)
from vfiomgr.node.rpc import Message, Methods, Server, service
from vfiomgr.node.serving import Latest, require_short, text_of
from vfiomgr.node.sockets import HIDDEN, refuse_served, remove_stale, stamp_of
from vfiomgr.value import Value

if TYPE_CHECKING:
    Prepare = Callable[[str, str, str], Awaitable[PreparedClaim]]
    """Prepare a claim by its namespace, name and UID; raises VfiomgrError."""
    Unprepare = Callable[[str, str, str], Awaitable[None]]
    """Unprepare a claim by its namespace, name and UID; raises VfiomgrError."""

_TYPE = "DRAPlugin"
_SERVICES = ("v1.DRAPlugin", "v1beta1.DRAPlugin")
_HEALTH_SERVICES = ("v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth")
VERSIONS = _SERVICES + _HEALTH_SERVICES
"""The kubelet takes the first that it supports."""
_PACKAGE = "k8s.io.kubelet.pkg.apis.dra."
"""The services' names have it on the wire, but not in a registration; those of health have none."""
_REGISTRATION = "pluginregistration.Registration"
_AGAIN = 30.0
"""Seconds until the plugin is offered again to a kubelet that did not register it."""
_HEALTHY, _UNHEALTHY = 1, 2
_LONGEST_MESSAGE = 1024
"""Characters; the kubelet cuts longer messages (HealthMessage of dra-health/v1)."""
_FINISHING = 4.0
"""Seconds at the end for claims that are being prepared or unprepared."""


class DeviceHealth(Value):
    """The health of a device of a pool, which `kubectl describe pod` shows."""

    pool: str
    device: str
    message: str = ""
    """Why the device is unhealthy; empty for a healthy one."""


class Answers:
    """Answers the kubelet's calls for claims and for the health of devices."""

    def __init__(self, prepare: Prepare, unprepare: Unprepare) -> None:
        self._prepare = prepare
        self._unprepare = unprepare
        self._health = Latest()
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self.work: set[asyncio.Task[str]] = set()
        """What is being prepared or unprepared."""

    async def node_prepare_resources(self, request: Message) -> Message:
        """Prepare claims; each has an entry in the response, with an error or its devices."""
        response = CLAIMS.NodePrepareResourcesResponse()
        await asyncio.gather(
            *(
                self._in_turn(each.uid, response.claims[each.uid], self._prepared(each, response))
                for each in request.claims
            )
        )
        return response

    async def _prepared(self, claim: Message, response: Message) -> None:
        prepared = await self._prepare(claim.namespace, claim.name, claim.uid)
        response.claims[claim.uid].devices.extend(map(_written, prepared.devices))

    async def node_unprepare_resources(self, request: Message) -> Message:
        """Unprepare claims; each has an entry in the response."""
        response = CLAIMS.NodeUnprepareResourcesResponse()
        await asyncio.gather(
            *(
                self._in_turn(
                    each.uid,
                    response.claims[each.uid],
                    self._unprepare(each.namespace, each.name, each.uid),
                )
                for each in request.claims
            )
        )
        return response

    async def node_watch_resources(self, _request: object) -> AsyncIterator[bytes]:
        """Send the health of all devices, and again after each change."""
        async for data in self._health.follow():
            yield data

    def set_health(self, devices: Iterable[DeviceHealth], seconds: float) -> None:
        """Send the health of all devices, which is unknown after so many seconds."""
        now = int(time.time())
        response = HEALTH.NodeWatchResourcesResponse()
        for each in devices:
            response.devices.add(
                device={"pool_name": each.pool, "device_name": each.device},
                health=_UNHEALTHY if each.message else _HEALTHY,
                last_updated_time=now,
                health_check_timeout_seconds=int(seconds),
                message=each.message[:_LONGEST_MESSAGE],
            )
        self._health.set(response.SerializeToString())

    async def _in_turn(self, uid: str, entry: Message, work: Awaitable[None]) -> None:
        """Do the work of a claim when no other work of it is left, and note an error.

        It is finished even if the kubelet does not wait for it any longer.
        """
        turn = self._turns.setdefault(uid, asyncio.Lock())

        async def finish() -> str:
            async with turn:
                try:
                    await work
                except VfiomgrError as error:
                    return text_of(error)
            return ""

        task = asyncio.create_task(finish())
        self.work.add(task)
        task.add_done_callback(self.work.discard)
        entry.error = await asyncio.shield(task)


def _written(prepared: PreparedDevice) -> Message:
    """A device for the kubelet, which looks for it by the request alone, not by the alternative."""
    return CLAIMS.Device(
        request_names=[prepared.request.partition("/")[0]],
        pool_name=prepared.pool,
        device_name=prepared.device,
        cdi_device_ids=prepared.cdi_devices,
    )


class DraPlugin:
    """The answers and the registration on their sockets; `tend` keeps them there.

    With an instance, the UID of a pod, two processes can serve at a time: the kubelet asks the
    newer one, and a rolling update leaves no gap.
    """

    def __init__(
        self,
        kubelet_directory: str,
        answers: Answers,
        tell: Callable[[str], None],
        instance: str = "",
    ) -> None:
        self._directory = os.path.join(kubelet_directory, "plugins", DRIVER)
        self._registry = os.path.join(kubelet_directory, "plugins_registry")
        part = f"-{instance}" if instance else ""
        self._endpoint = Socket(os.path.join(self._directory, f"dra{part}.sock"), tell)
        self._registrar = Socket(os.path.join(self._registry, f"{DRIVER}{part}-reg.sock"), tell)
        self._answers = answers
        self.is_registered = False
        """Whether the kubelet accepted the plugin."""
        self._tell = tell
        self._problem = ""
        """Why the plugin cannot be served again, which is reported once."""
        self._again: float | None = None
        """When the plugin is offered again to a kubelet that did not register it."""
        self._busy = asyncio.Lock()
        self._is_closed = False

    async def get_info(self, _request: object) -> Message:
        """The name of the driver, its socket, and its services; the kubelet waits for 1 s."""
        return PLUGINS.PluginInfo(
            type=_TYPE, name=DRIVER, endpoint=self._endpoint.path, supported_versions=VERSIONS
        )

    async def notify_registration_status(self, request: Message) -> Message:
        """Note whether the kubelet accepts the plugin; if not, it may never ask again.

        It does not after a failed RegisterPlugin, since AddPlugin came before it
        (operation_generator.go in pkg/kubelet/pluginmanager), but it does for a new socket.
        """
        self.is_registered = request.plugin_registered
        self._again = None if self.is_registered else time.monotonic() + _AGAIN
        if self.is_registered:
            self._tell(f"{DRIVER}: registered with the kubelet")
        else:
            self._tell(f"{DRIVER}: the kubelet did not register the DRA driver: {request.error}")
        return PLUGINS.RegistrationStatusResponse()

    async def start(self) -> None:
        """Serve the calls, then the registration: the kubelet connects at once.

        Raises:
            Refusal: another process serves the driver under the same names.
            UsageError: a directory or a path cannot be used.
        """
        try:
            os.makedirs(self._directory, mode=0o750, exist_ok=True)
        except OSError as error:
            message = f"cannot create {self._directory}: {error.strerror}"
            raise UsageError(message, "pass --kubelet-root, or make it writable") from None
        remove_stale(self._directory, "dra", "--kubelet-root")
        remove_stale(self._registry, DRIVER, "--kubelet-root")
        await self._serve()

    async def tend(self) -> None:
        """Serve again if a socket was removed; one of another process is left there.

        To a kubelet that did not register the plugin, it is offered again.
        """
        async with self._busy:
            is_there = self._endpoint.is_there and self._registrar.is_there
            is_refused = self._again is not None and time.monotonic() >= self._again
            if self._is_closed or (is_there and not is_refused):
                return
            try:
                await self._serve()
            except VfiomgrError as error:
                if error.message != self._problem:
                    self._tell(f"{DRIVER}: {error.message}")
                self._problem = error.message

    async def _serve(self) -> None:
        self.is_registered, self._again = False, None
        await self._registrar.stop()
        await self._endpoint.stop()
        await self._endpoint.start(
            *(service(_PACKAGE + each, CLAIMS, CLAIM_METHODS, self._answers) for each in _SERVICES),
            *(service(each, HEALTH, HEALTH_METHODS, self._answers) for each in _HEALTH_SERVICES),
        )
        await self._registrar.start(service(_REGISTRATION, PLUGINS, PLUGIN_METHODS, self))
        self._problem = ""

    async def close(self) -> None:
        """Leave the kubelet, which gets no new answers, and finish the work that has begun."""
        async with self._busy:
            self._is_closed = True
            self._registrar.remove()
            self._endpoint.remove()
            if self._answers.work:
                await asyncio.wait(self._answers.work, timeout=_FINISHING)
            await self._registrar.stop()
            await self._endpoint.stop()


_OWNER_ONLY = 0o600


class Socket:
    """A server on a path.

    It is made at a hidden path, which the kubelet ignores, and renamed when it answers: the kubelet
    finds no socket that does not, and one of a process that has ended is replaced at once.
    """

    def __init__(self, path: str, tell: Callable[[str], None]) -> None:
        self.path = path
        self._tell = tell
        self._server: Server | None = None
        self._inode = 0

    @property
    def is_there(self) -> bool:
        """Whether the socket is the one of this server."""
        stamp = stamp_of(self.path)
        return stamp is not None and stamp[0] == self._inode

    async def start(self, *methods: Methods) -> None:
        """Serve; a socket of a process that has ended is replaced.

        Raises:
            Refusal: another process serves this path.
            UsageError: the path cannot be used.
        """
        hidden = os.path.join(os.path.dirname(self.path), f"{HIDDEN}{secrets.token_hex(4)}")
        for path in (self.path, hidden):
            require_short(path, "--kubelet-root")
        refuse_served(self.path)
        server = Server(*methods, tell=self._tell)
        try:
            await server.serve(hidden)
            os.chmod(hidden, _OWNER_ONLY)
            os.rename(hidden, self.path)
        except OSError as error:
            await server.stop()
            with suppress(OSError):
                os.unlink(hidden)
            message = f"cannot serve {self.path}: {error}"
            raise UsageError(message, "check that the directory exists and is writable") from None
        stamp = stamp_of(self.path)
        self._server, self._inode = server, 0 if stamp is None else stamp[0]

    async def stop(self) -> None:
        """Remove the socket, and end the calls."""
        self.remove()
        server, self._server = self._server, None
        if server is not None:
            await server.stop()

    def remove(self) -> None:
        """Remove the socket if it is the one of this server; connections stay."""
        if self.is_there:
            with suppress(FileNotFoundError):
                os.unlink(self.path)
