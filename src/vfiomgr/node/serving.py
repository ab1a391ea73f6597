"""The device plugin of each resource: its answers, its socket, its registration.

A plugin cannot see whether the kubelet offers the devices that it lists. If a kubelet follows two
plugins of a resource, it takes the end of the first for the end of both: it still reads the list of
the second, but allocates none of its devices
(https://github.com/kubernetes/kubernetes/issues/127803). Therefore the kubelet is asked.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from vfiomgr.errors import HostError, UsageError, VfiomgrError
from vfiomgr.node.answers import answer, preferred
from vfiomgr.node.kubelet import (
    DEVICE_PLUGIN,
    DEVICES,
    HEALTHY,
    METHODS,
    UNHEALTHY,
    NoAnswer,
    allocatable,
    kubelet_stamp,
    register,
)
from vfiomgr.node.rpc import Message, Methods, Server, end_call, service
from vfiomgr.node.sockets import PREFIX, Stamp, cut, quoted_name, stamp_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
    from collections.abc import Set as AbstractSet

    from vfiomgr.node.model import Answer, NodeResource, NodeUnit

    Verify = Callable[[str, tuple[str, ...]], Awaitable[None]]
    """Verify the devices of a resource; raises VfiomgrError if a container must not start."""
    Observe = Callable[[str, tuple[str, ...], float], None]
    """Receives the devices of an allocation, and the seconds that it took."""


class Latest:
    """Bytes of which any number of streams send the newest."""

    def __init__(self, data: bytes | None = None) -> None:
        self._data = data
        self._changed = asyncio.Event()

    def set(self, data: bytes) -> None:
        """Have the data sent, if it is new."""
        self._data = data
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def follow(self) -> AsyncIterator[bytes]:
        """The data, and again after each change; None is not sent."""
        sent = None
        while True:
            changed = self._changed
            if self._data is not None and self._data != sent:
                sent = self._data
                yield sent
            else:
                await changed.wait()


class DevicePlugin:
    """Answers the kubelet for one resource, of which `update` sets the devices.

    Several streams can list the devices at a time: a kubelet opens the next one before the end of
    the previous one is noticed.
    """

    def __init__(self, resource: NodeResource, verify: Verify, observe: Observe) -> None:
        self._resource = resource
        self._listed = Latest(listed(resource))
        self._verify = verify
        self._observe = observe
        self.streams = self.opened = 0
        """How many streams list the devices now, and how many were ever opened."""

    def update(self, resource: NodeResource) -> None:
        """Set the devices, and send them to the kubelet if its list changes."""
        self._resource = resource
        self._listed.set(listed(resource))

    @property
    def healthy(self) -> set[str]:
        """The devices that pods can get."""
        return {unit.id for unit in self._resource.units if unit.is_healthy}

    def methods(self) -> Methods:
        """The methods, for a server."""
        return service(DEVICE_PLUGIN, DEVICES, METHODS, self)

    async def get_device_plugin_options(self, _request: object) -> Message:
        """Answer that containers are verified before they start, and devices are preferred."""
        return DEVICES.DevicePluginOptions(
            pre_start_required=True, get_preferred_allocation_available=True
        )

    async def list_and_watch(self, _request: object) -> AsyncIterator[bytes]:
        """Send the complete list, and again after each change."""
        self.streams += 1
        self.opened += 1
        try:
            async for data in self._listed.follow():
                yield data
        finally:
            self.streams -= 1

    async def get_preferred_allocation(self, request: Message) -> Message:
        """Prefer close devices; an error would reject the pod, so any mistake is an empty hint."""
        response = DEVICES.PreferredAllocationResponse()
        for container in request.container_requests:
            chosen: tuple[str, ...] = ()
            with suppress(VfiomgrError):
                chosen = preferred(
                    self._resource,
                    container.available_deviceIDs,
                    container.must_include_deviceIDs,
                    container.allocation_size,
                )
            response.container_responses.add(deviceIDs=chosen)
        return response

    async def allocate(self, request: Message) -> Message:
        """Name the devices for the container runtime; reads nothing of the host.

        The same devices can be allocated again: by init containers, and after the kubelet forgot.
        """
        begun = time.perf_counter()
        response = DEVICES.AllocateResponse()
        try:
            for container in request.container_requests:
                made = answer(self._resource, _named(container))
                response.container_responses.append(_written(made))
        except VfiomgrError as error:
            _fail(error)
        given = tuple(d for each in request.container_requests for d in _named(each))
        self._observe(self._resource.name, given, time.perf_counter() - begun)
        return response

    async def pre_start_container(self, request: Message) -> Message:
        """Verify the devices of a container, also before each of its restarts."""
        try:
            await self._verify(self._resource.name, _named(request))
        except VfiomgrError as error:
            _fail(error)
        return DEVICES.PreStartContainerResponse()


def _named(request: Message) -> tuple[str, ...]:
    return tuple(map(quoted_name, request.devices_ids))


def listed(resource: NodeResource) -> bytes:
    """The kubelet's list of a resource, as it is sent."""
    response = DEVICES.ListAndWatchResponse(devices=map(_device, resource.units))
    data: bytes = response.SerializeToString()
    return data


def _device(unit: NodeUnit) -> Message:
    """A device; without a NUMA node it has no topology, since any number would be wrong."""
    device = DEVICES.Device(ID=unit.id, health=HEALTHY if unit.is_healthy else UNHEALTHY)
    for node in unit.numa_nodes:
        device.topology.nodes.add(ID=node)
    return device


def _written(made: Answer) -> Message:
    return DEVICES.ContainerAllocateResponse(
        envs=made.environment,
        annotations=made.annotations,
        devices=[
            DEVICES.DeviceSpec(container_path=node, host_path=node, permissions="rw")
            for node in made.nodes
        ],
        cdi_devices=[DEVICES.CDIDevice(name=name) for name in made.cdi_devices],
    )


def _fail(error: VfiomgrError) -> NoReturn:
    """End a call with an error; users read its text in the events of the pod."""
    end_call(text_of(error), is_invalid=isinstance(error, UsageError))


def text_of(error: VfiomgrError) -> str:
    """The text of an error in the events of a pod."""
    return cut(f"{error.message}; {error.hint}" if error.hint else error.message)


_LONGEST_PATH = 107
"""Bytes of a Unix socket's path (sun_path in unix(7))."""
_PROCESS = secrets.token_hex(4)
"""Two agents in containers can have the same process ID."""
_LEAVING = 1.0
"""Seconds until a kubelet notices the end of a plugin."""
_LISTING = 5.0
"""Seconds in which a kubelet that accepted a registration lists the devices."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 30.0
"""Seconds until a failed registration is repeated; doubled each time."""


def socket_name(resource: str, renewals: int = 0) -> str:
    """The name of the socket; no two resources or processes share one, nor two after a renewal.

    A kubelet that finds the same name again confuses the two
    (https://github.com/kubernetes/kubernetes/issues/127803).
    """
    digest = hashlib.sha256(resource.encode()).hexdigest()[:8]
    return f"{PREFIX}{digest}-{_PROCESS}{renewals or ''}.sock"


def require_short(path: str, option: str) -> None:
    """Check that a socket can have this path.

    Raises:
        UsageError: it is too long.
    """
    if len(os.fsencode(path)) > _LONGEST_PATH:
        message = f"the path of a socket has more than {_LONGEST_PATH} bytes: {path}"
        raise UsageError(message, f"use a shorter {option}")


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
        require_short(self._path, "--plugin-directory")
        self._tell = tell
        self._server: Server | None = None
        self._served: Stamp | None = None
        self._kubelet: Stamp | None = None
        """The kubelet's socket when it accepted the registration."""
        self.registered_at = 0.0
        self._opened = 0
        """The number of streams until the registration."""
        self._retry_at, self._pause = 0.0, 0.0
        self._problem = ""
        """Why the last registration failed, which is reported once."""
        self._misses = self._renewals = 0
        """Number of successive answers of the kubelet without any healthy device of the list."""
        self._busy = asyncio.Lock()
        self._is_closed = False

    @property
    def is_registered(self) -> bool:
        """Whether the kubelet lists the devices."""
        return self.plugin.streams > 0 and not self._misses

    async def is_missed(self, listed: AbstractSet[str]) -> bool:
        """Note which devices are allocatable; True if all healthy devices are missing.

        The kubelet may not have read the list yet, so the plugin is registered again only the
        second time, on another socket.
        """
        healthy = self.plugin.healthy
        if not self.plugin.streams or not healthy or healthy & listed:
            self._misses = 0
            return False
        self._misses += 1
        if self._misses > 1:
            self._tell(f"{self.name}: the kubelet lost the devices; registering again")
            async with self._busy:
                await self._stop()
                self._misses, self._renewals = 0, self._renewals + 1
                name = socket_name(self.name, self._renewals)
                self._path = os.path.join(self._directory, name)
                await asyncio.sleep(_LEAVING)
        return True

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
        kubelet = kubelet_stamp(self._directory)
        now = time.monotonic()
        # A new registration has some time to lead to a list.
        is_new = self.plugin.opened == self._opened and now < self.registered_at + _LISTING
        is_listed = self.plugin.streams > 0 or is_new
        if kubelet is None or (kubelet == self._kubelet and is_listed):
            return
        if kubelet != self._kubelet:
            self._tell(f"{self.name}: found a kubelet")
            self._kubelet, self._pause, self._retry_at = kubelet, 0.0, 0.0
        if now >= self._retry_at:
            await self._register()

    async def _serve(self) -> None:
        await self._stop()
        server = Server(self.plugin.methods(), tell=self._tell)
        try:
            with suppress(FileNotFoundError):
                os.unlink(self._path)
            await server.serve(self._path)
        except OSError as error:
            message = f"cannot serve {self._path}: {error.strerror}"
            raise HostError(message, "check that the directory exists and is writable") from None
        self._server, self._served = server, stamp_of(self._path)
        self._kubelet = None

    async def _register(self) -> None:
        self._opened = self.plugin.opened
        try:
            await register(self._directory, os.path.basename(self._path), self.name)
        except NoAnswer as error:
            self._pause = min(self._pause * 2 or _FIRST_PAUSE, _LONGEST_PAUSE)
            self._retry_at = time.monotonic() + self._pause
            if error.message != self._problem:
                self._tell(f"{self.name}: {error.message}; next attempt in {self._pause:g} s")
            self._problem = error.message
            return
        self.registered_at, self._pause, self._problem = time.monotonic(), 0.0, ""
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
        await server.stop()
        with suppress(FileNotFoundError):
            os.unlink(self._path)


_SOON = 5.0
"""Seconds after a registration, or a change of the kubelet's sockets, until it is asked."""
_SELDOM = 120.0
"""Seconds between questions without such a reason; the kubelet limits their rate."""


class Listing:
    """Asks the kubelet which devices are allocatable, and registers lost resources again."""

    def __init__(self, socket: str) -> None:
        self._socket = socket
        self._changed_at = 0.0
        self.due = 0.0
        """When the kubelet is asked again."""

    async def check(self, served: Iterable[ServedResource], changed_at: float) -> None:
        """Ask if it is due; a resource that was missing twice is registered again."""
        served, now = tuple(served), time.monotonic()
        last = max((changed_at, *(each.registered_at for each in served)))
        if last > self._changed_at:
            self._changed_at, self.due = last, last + _SOON
        if now < self.due:
            return
        self.due = now + _SELDOM
        listed = await allocatable(self._socket)
        if listed is None:
            return
        for each in served:
            if await each.is_missed(listed.get(each.name, set())):
                self.due = time.monotonic() + _SOON
