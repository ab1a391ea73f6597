"""The DRA manager of a kubelet for tests: it finds plugins by sockets, and calls them.

It behaves as that of Kubernetes 1.36 was seen to: slices of the node are deleted at its start, and
those of a driver some time after its last connection ended. What fails is repeated.
"""

from __future__ import annotations

import asyncio
import stat
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import grpc

from tests.fakes.calls import answer
from vfiomgr.node.kubelet import CLAIMS, HEALTH, PLUGIN_METHODS, PLUGINS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SUPPORTED = ("v1.DRAPlugin", "v1beta1.DRAPlugin")
HEALTH_SERVICES = ("v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth")
WIPING_DELAY = 30.0
"""Seconds from the end of a driver's last connection until its slices are deleted."""
PREPARE_DEADLINE = 45.0
INFO_DEADLINE = 1.0
HEALTH_TIMEOUT = 30.0
"""Seconds after which the health of a device is unknown if the plugin names no other time."""
_GLANCE = 0.01
_PACKAGE = "k8s.io.kubelet.pkg.apis.dra."
_NO_PROXY = ("grpc.enable_http_proxy", 0)
_OWN_CONNECTION = ("grpc.use_local_subchannel_pool", 1)
_FAST = (("grpc.initial_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 100))


class PrepareError(Exception):
    """A claim that the plugin did not prepare or unprepare, with its text."""


@dataclass
class Plugin:
    """A plugin that has registered."""

    driver: str
    endpoint: str
    service: str
    """The one that is called, as in the registration."""
    health_service: str
    channel: grpc.aio.Channel
    is_connected: bool = False
    health: dict[tuple[str, str], Any] = field(default_factory=dict)
    """By pool and device."""
    tasks: list[asyncio.Task[None]] = field(default_factory=list)


@dataclass(frozen=True)
class Manners:
    """What differs among kubelets, and the seconds that tests do not wait for."""

    supported: tuple[str, ...] = SUPPORTED
    health: tuple[str, ...] = HEALTH_SERVICES
    wiping_delay: float = WIPING_DELAY
    deadline: float = PREPARE_DEADLINE
    pause: float = 0.05
    """Until what failed is repeated."""


class DraKubelet:
    """The part of a kubelet that DRA plugins see."""

    def __init__(
        self,
        directory: Path,
        wipe: Callable[[str], None],
        manners: Manners = Manners(),
    ) -> None:
        self.registry = directory / "plugins_registry"
        self.plugins: dict[str, Plugin] = {}
        """By the path of the socket in the registry; the last one of a driver is called."""
        self.infos: list[Any] = []
        """Each answer to GetInfo."""
        self.failures: list[str] = []
        """The texts of claims that could not be prepared or unprepared."""
        self.unread: list[str] = []
        """The sockets of the registry that did not answer."""
        self.prepared: dict[str, list[Any]] = {}
        """The devices of claims, by UID; survives a restart, as the checkpoint does."""
        self._wipe, self._manners = wipe, manners
        self._known: dict[str, int] = {}
        self._wiping: dict[str, asyncio.Task[None]] = {}
        self._watch: asyncio.Task[None] | None = None

    # ---- its life

    async def start(self) -> None:
        """Delete the slices of all drivers, and look for plugins."""
        self.registry.mkdir(parents=True, exist_ok=True)
        self._wipe("")
        self._watch = asyncio.create_task(self._find())

    async def stop(self) -> None:
        """End the connections; the slices and the prepared claims stay."""
        for task in (self._watch, *self._wiping.values()):
            await _end(task)
        self._wiping.clear()
        for plugin in self.plugins.values():
            await _close(plugin)
        self.plugins.clear()
        self._known.clear()

    async def restart(self) -> None:
        """End, and start again: plugins are asked for their names again."""
        await self.stop()
        await self.start()

    # ---- what it shows

    def plugin(self, driver: str) -> Plugin | None:
        """The newest plugin that is connected: it is called."""
        found = [p for p in self.plugins.values() if p.driver == driver and p.is_connected]
        return found[-1] if found else None

    def _newest(self, driver: str) -> Plugin | None:
        """The plugin that is called if none is connected (get in dra_plugin_manager.go)."""
        found = [p for p in self.plugins.values() if p.driver == driver]
        return found[-1] if found else None

    def is_wiping(self, driver: str) -> bool:
        """Whether the slices of a driver will be deleted if it does not return."""
        return driver in self._wiping

    def state(self, driver: str, pool: str, device: str) -> str:
        """The health of a device, as in the status of its pod."""
        plugin = self.plugin(driver)
        found = None if plugin is None else plugin.health.get((pool, device))
        if found is None:
            return "Unknown"
        seconds = found.health_check_timeout_seconds or HEALTH_TIMEOUT
        if time.time() > found.last_updated_time + seconds:
            return "Unknown"
        return ("Unknown", "Healthy", "Unhealthy")[found.health]

    # ---- claims

    async def prepare(self, driver: str, namespace: str, name: str, uid: str) -> list[Any]:
        """Prepare a claim for a pod, until it works."""
        while True:
            try:
                self.prepared[uid] = await self.prepare_once(driver, namespace, name, uid)
            except PrepareError as error:
                self.failures.append(str(error))
                await asyncio.sleep(self._manners.pause)
            else:
                return self.prepared[uid]

    async def prepare_once(self, driver: str, namespace: str, name: str, uid: str) -> list[Any]:
        """One attempt; raises PrepareError."""
        made = (await self.call(driver, "Prepare", (namespace, name, uid))).claims
        if uid not in made:
            _fail(f"NodePrepareResources skipped claim {name}")
        if made[uid].error:
            _fail(made[uid].error)
        return list(made[uid].devices)

    async def unprepare(self, driver: str, namespace: str, name: str, uid: str) -> None:
        """Unprepare a claim until it works: its pod stays Terminating."""
        while True:
            try:
                made = (await self.call(driver, "Unprepare", (namespace, name, uid))).claims
                if uid in made and not made[uid].error:
                    self.prepared.pop(uid, None)
                    return
                text = made[uid].error if uid in made else f"skipped claim {name}"
            except PrepareError as error:
                text = str(error)
            self.failures.append(text)
            await asyncio.sleep(self._manners.pause)

    async def call(self, driver: str, verb: str, *claims: tuple[str, str, str]) -> Any:
        """Call `Prepare` or `Unprepare` for claims: namespace, name, UID; raises PrepareError."""
        plugin = self.plugin(driver) or self._newest(driver)
        if plugin is None:
            _fail(f"DRA driver {driver} is not registered")
        kind = f"Node{verb}Resources"
        request = getattr(CLAIMS, f"{kind}Request")()
        for namespace, name, uid in claims:
            request.claims.add(namespace=namespace, name=name, uid=uid)
        method = plugin.channel.unary_unary(
            f"/{_PACKAGE}{plugin.service}/{kind}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=getattr(CLAIMS, f"{kind}Response").FromString,
        )
        try:
            return await answer(method(request, timeout=self._manners.deadline))
        except grpc.aio.AioRpcError as error:
            _fail(f"{error.code().name}: {error.details()}")

    # ---- plugins

    async def _find(self) -> None:
        """Follow the sockets of the registry; hidden files are ignored."""
        while True:
            found = {}
            for entry in self.registry.iterdir():
                with suppress(FileNotFoundError):
                    status = entry.stat()
                    if stat.S_ISSOCK(status.st_mode) and not entry.name.startswith("."):
                        found[str(entry)] = status.st_ino
            for path in [p for p, inode in self._known.items() if found.get(p) != inode]:
                del self._known[path]
                await self._forget(path)
            for path, inode in found.items():
                if path not in self._known and await self._register(path):
                    self._known[path] = inode
            await asyncio.sleep(_GLANCE)

    async def _register(self, path: str) -> bool:
        channel = _channel(path)
        try:
            info = await _ask(channel, "GetInfo")
            self.infos.append(info)
            problem = self._connect(path, info)
            told = {"plugin_registered": not problem, "error": problem}
            await _ask(channel, "NotifyRegistrationStatus", **told)
        except grpc.aio.AioRpcError:
            self.unread.append(path)
            return False
        finally:
            await channel.close(None)
        return True

    def _connect(self, path: str, info: Any) -> str:
        """Begin to connect to the plugin; why it is not accepted.

        Nothing waits for the connection (add in dra_plugin_manager.go).
        """
        known = [v for v in info.supported_versions if v in self._manners.supported]
        if info.type != "DRAPlugin" or not known:
            return f"none of the versions are supported: {list(info.supported_versions)}"
        health = [v for v in self._manners.health if v in info.supported_versions]
        channel = _channel(info.endpoint)
        plugin = Plugin(info.name, info.endpoint, known[0], health[0] if health else "", channel)
        self.plugins[path] = plugin
        plugin.tasks.append(asyncio.create_task(self._follow_connection(plugin)))
        if plugin.health_service:
            plugin.tasks.append(asyncio.create_task(self._follow_health(plugin)))
        return ""

    async def _forget(self, path: str) -> None:
        plugin = self.plugins.pop(path, None)
        if plugin is not None:
            await _close(plugin)
            self._wipe_later(plugin.driver)

    async def _follow_connection(self, plugin: Plugin) -> None:
        while True:
            state = plugin.channel.get_state(try_to_connect=True)
            is_connected = state == grpc.ChannelConnectivity.READY
            if is_connected != plugin.is_connected:
                plugin.is_connected = is_connected
                if is_connected:
                    await _end(self._wiping.pop(plugin.driver, None))
                else:
                    self._wipe_later(plugin.driver)
            await plugin.channel.wait_for_state_change(state)

    def _wipe_later(self, driver: str) -> None:
        """Delete the driver's slices, unless it connects again in time."""
        if self.plugin(driver) is None and driver not in self._wiping:
            self._wiping[driver] = asyncio.create_task(self._wipe_after(driver))

    async def _wipe_after(self, driver: str) -> None:
        await asyncio.sleep(self._manners.wiping_delay)
        self._wipe(driver)

    async def _follow_health(self, plugin: Plugin) -> None:
        """Read the health of devices; the stream is opened again after its end."""
        while True:
            stream = plugin.channel.unary_stream(
                f"/{plugin.health_service}/NodeWatchResources",
                request_serializer=HEALTH.NodeWatchResourcesRequest.SerializeToString,
                response_deserializer=HEALTH.NodeWatchResourcesResponse.FromString,
            )(HEALTH.NodeWatchResourcesRequest())
            with suppress(grpc.aio.AioRpcError):
                async for listed in stream:
                    plugin.health = {
                        (each.device.pool_name, each.device.device_name): each
                        for each in listed.devices
                    }
            await asyncio.sleep(self._manners.pause)


def _fail(text: str) -> NoReturn:
    raise PrepareError(text)


def _channel(path: str) -> grpc.aio.Channel:
    options = (_NO_PROXY, _OWN_CONNECTION, *_FAST)
    return grpc.aio.insecure_channel(f"unix:{path}", options=options)


async def _ask(channel: grpc.aio.Channel, method: str, **fields: Any) -> Any:
    request, response = PLUGIN_METHODS[method]
    made = getattr(PLUGINS, request)(**fields)
    call = channel.unary_unary(
        f"/pluginregistration.Registration/{method}",
        request_serializer=type(made).SerializeToString,
        response_deserializer=getattr(PLUGINS, response).FromString,
    )
    return await answer(call(made, timeout=INFO_DEADLINE))


async def _end(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _close(plugin: Plugin) -> None:
    plugin.is_connected = False
    for task in plugin.tasks:
        await _end(task)
    await plugin.channel.close(None)
