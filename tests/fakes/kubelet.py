"""A kubelet for tests: device plugins and pod resources over real sockets.

It behaves as that of Kubernetes 1.36 was seen to: registrations connect back, a start removes all
sockets of the directory, answers are stored with the pods, and calls for pod resources are limited.
"""

from __future__ import annotations

import asyncio
import os
import random
import stat
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import grpc

from tests.fakes.calls import answer
from vfiomgr.node.kubelet import DEVICES, HEALTHY, METHODS, PODS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

VERSION = "v1beta1"
DIAL = 10.0
BURST, PER_SECOND = 10, 100
"""Calls for pod resources: this many at once, and this many per second."""
LONGEST_NAME = 63
READMISSION = 0.9
"""Seconds from the start until the kubelet knows its pods, and admits them (seen: 0.7 to 1.0)."""
_PARTS = 18


class AdmissionError(Exception):
    """UnexpectedAdmissionError: the pod failed for good."""


@dataclass
class Container:
    """A container of a pod, with the answer that the kubelet stored."""

    resource: str
    ids: tuple[str, ...]
    answer: Any
    is_init: bool = False


@dataclass
class Claimed:
    """What a pod has by a claim."""

    pod: str
    name: str
    """NAMESPACE/NAME of the claim."""
    driver: str
    devices: list[tuple[str, str]]
    """By pool and name."""


@dataclass
class Endpoint:
    """A plugin that has registered.

    The lists of all its connections count for a resource, and the end of any ends the newest one
    (runClient in plugin/v1beta1/handler.go, until kubernetes/kubernetes PR 135437).
    """

    name: str
    path: str
    channel: grpc.aio.Channel
    options: Any
    devices: dict[str, Any] = field(default_factory=dict)
    ever_healthy: set[str] = field(default_factory=set)
    lists: list[float] = field(default_factory=list)
    """When each list arrived."""
    is_stopped: bool = False
    task: asyncio.Task[None] | None = None

    @property
    def healthy(self) -> set[str]:
        """The devices that can be allocated: none of a plugin that has left."""
        found = {each.ID for each in self.devices.values() if each.health == HEALTHY}
        return set() if self.is_stopped else found

    async def call(self, method: str, request: Any, seconds: float | None = None) -> Any:
        """Call a method of the plugin."""
        return await answer(_stub(self.channel, method)(request, timeout=seconds))


class Kubelet:
    """The part of a kubelet that device plugins see."""

    def __init__(self, directory: Path, *, dial: float = DIAL, authority: str = "") -> None:
        self.directory = directory
        self.socket = str(directory / "kubelet.sock")
        pods = directory.parent / "pod-resources"
        pods.mkdir(exist_ok=True)
        self.pod_resources = str(pods / "kubelet.sock")
        self.endpoints: dict[str, Endpoint] = {}
        """The newest plugin of each resource."""
        self._connected: list[Endpoint] = []
        self.registrations: list[tuple[str, str]] = []
        self.rejected: list[float] = []
        """When registrations with wrong names came."""
        self.pods: dict[str, list[Container]] = {}
        """Survives a restart, as the kubelet's checkpoint does."""
        self.calls: list[tuple[str, tuple[str, ...]]] = []
        self.preferences: list[Any] = []
        self.claims: Callable[[], Iterable[Claimed]] = tuple
        """The claims of pods."""
        self.asked = 0
        """How many calls for pod resources came."""
        self.refusals = 0
        """How many of the next calls for pod resources are refused."""
        self._dial = dial
        self._authority = authority
        self._server: grpc.aio.Server | None = None
        self._random = random.Random(7)  # noqa: S311 - an order, not a secret
        self._tokens, self._refilled = float(BURST), time.monotonic()
        self._admission = asyncio.Lock()
        """Pods are admitted one after the other: a slow plugin holds up all of the node."""
        self._earlier: set[str] = set()
        """The pods of before the start."""
        self._knows_earlier_at = 0.0

    # ---- its life

    async def start(self) -> None:
        """Remove the sockets of all plugins, and listen on a new socket."""
        for path in self.directory.iterdir():
            if stat.S_ISSOCK(path.lstat().st_mode):
                path.unlink()
        with suppress(FileNotFoundError):
            os.unlink(self.pod_resources)
        self._earlier, self._knows_earlier_at = {*self.pods}, time.monotonic() + READMISSION
        self._server = grpc.aio.server()
        self._server.add_generic_rpc_handlers((self._registration(), self._lister()))
        self._server.add_insecure_port(f"unix:{self.socket}")
        self._server.add_insecure_port(f"unix:{self.pod_resources}")
        await self._server.start()

    async def stop(self) -> None:
        """End; its own sockets stay, and the pods go on."""
        self.endpoints.clear()
        for endpoint in self._connected:
            await _close(endpoint)
        self._connected.clear()
        if self._server is not None:
            for path in (self.socket, self.pod_resources):
                os.link(path, f"{path}.kept")
            await self._server.stop(None)
            for path in (self.socket, self.pod_resources):
                os.rename(f"{path}.kept", path)
            self._server = None

    async def restart(self) -> None:
        """End, and start again: nothing is allocatable until the plugins register again."""
        await self.stop()
        await self.start()

    async def boot(self) -> dict[str, str]:
        """Start after a reboot of the node, and start the pods again; why others are rejected.

        Nothing is allocated: the containers get the stored answers.
        """
        await self.start()
        rejected = await self.readmit(are_running=False)
        for pod in self.pods:
            await self.restart_containers(pod)
        return rejected

    async def readmit(self, *, are_running: bool = True) -> dict[str, str]:
        """Admit the pods of before the start again; those that are rejected end, with the reason.

        Devices of containers that run are not checked; init containers do not run any more.
        """
        for _ in range(_PARTS):  # a moment in which the whole machine stood still counts as one
            await asyncio.sleep(READMISSION / _PARTS)
        rejected: dict[str, str] = {}
        for pod, containers in tuple(self.pods.items()):
            try:
                for container in containers:
                    if container.is_init or not are_running:
                        self._check_again(container)
            except AdmissionError as error:
                rejected[pod] = str(error)
                del self.pods[pod]
        return rejected

    def _check_again(self, container: Container) -> None:
        """Whether a container's devices are there (devicesToAllocate in devicemanager/manager.go).

        Raises:
            AdmissionError: they are not.

        """
        endpoint = self.endpoints.get(container.resource)
        healthy = set() if endpoint is None else endpoint.healthy
        if not healthy:
            what = f"cannot allocate unhealthy devices {container.resource}"
            _reject(f"no healthy devices present; {what}")
        if not healthy.issuperset(container.ids):
            what = f"cannot allocate unhealthy devices {container.resource}"
            _reject(f"previously allocated devices are no longer healthy; {what}")

    # ---- what it shows

    def capacity(self, resource: str) -> tuple[int, int]:
        """The node's capacity and allocatable for a resource."""
        endpoint = self.endpoints.get(resource)
        if endpoint is None:
            return 0, 0
        return len(endpoint.devices), len(endpoint.healthy)

    async def until(self, condition: Callable[[], object], seconds: float = 20.0) -> None:
        """Wait until something is so."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "it did not become so"
            await asyncio.sleep(0.01)

    async def until_capacity(self, resource: str, *wanted: int) -> None:
        """Wait for a capacity and allocatable."""
        end = time.monotonic() + 20
        while self.capacity(resource) != wanted:
            assert time.monotonic() < end, (self.capacity(resource), wanted)
            await asyncio.sleep(0.01)

    # ---- pods

    async def admit(self, pod: str, resource: str, count: int, *, init: int = 0) -> Container:
        """Admit a pod, NAMESPACE/NAME, and start its containers.

        An init container and the container share devices as far as they can.
        """
        shared: tuple[str, ...] = ()
        async with self._admission:
            if init:
                first = await self._allocate(pod, resource, init, ())
                shared, first.is_init = first.ids, True
            container = await self._allocate(pod, resource, count, shared)
        await self._pre_start(container)
        return container

    async def _allocate(
        self, pod: str, resource: str, count: int, reusable: tuple[str, ...]
    ) -> Container:
        endpoint = self.endpoints.get(resource)
        if endpoint is None:
            _reject(f"cannot allocate unregistered device {resource}")
        if not endpoint.healthy:
            what = f"cannot allocate unhealthy devices {resource}"
            _reject(f"no healthy devices present; {what}")
        ids = list(reusable[:count])
        needed = count - len(ids)
        if needed:
            ids += await self._chosen(endpoint, ids, needed)
        self._random.shuffle(ids)
        request = DEVICES.AllocateRequest(container_requests=[{"devices_ids": ids}])
        self.calls.append(("Allocate", tuple(ids)))
        try:
            response = await endpoint.call("Allocate", request)
        except grpc.aio.AioRpcError as error:
            _reject(f"Allocate failed due to {error.details()}, which is unexpected")
        if not response.container_responses:
            _reject("no containers in the response")
        container = Container(resource, tuple(ids), response.container_responses[0])
        self.pods.setdefault(pod, []).append(container)
        return container

    async def _chosen(self, endpoint: Endpoint, reused: list[str], needed: int) -> list[str]:
        """Free and healthy devices, as the plugin prefers them."""
        containers = [c for pod in self.pods.values() for c in pod if c.resource == endpoint.name]
        used = {i for c in containers for i in c.ids} | set(reused)
        free = [each for each in endpoint.devices if each in endpoint.healthy - used]
        if len(free) < needed:
            _reject(f"requested {needed} devices, {len(free)} available")
        self._random.shuffle(free)
        if not endpoint.options.get_preferred_allocation_available:
            return free[:needed]
        wanted = {
            "available_deviceIDs": [*free, *reused],
            "must_include_deviceIDs": reused,
            "allocation_size": needed + len(reused),
        }
        request = DEVICES.PreferredAllocationRequest(container_requests=[wanted])
        self.preferences.append(request)
        try:
            response = await endpoint.call("GetPreferredAllocation", request)
        except grpc.aio.AioRpcError as error:
            _reject(error.details())
        preferred = [i for r in response.container_responses for i in r.deviceIDs if i in free]
        others = [i for i in free if i not in preferred]
        return (preferred + others)[:needed]

    async def restart_containers(self, pod: str) -> None:
        """Start the containers of a pod again: with the stored answers, without an allocation."""
        for container in self.pods[pod]:
            await self._pre_start(container)

    async def _pre_start(self, container: Container) -> None:
        endpoint = self.endpoints.get(container.resource)
        if endpoint is None or not endpoint.options.pre_start_required:
            return
        self.calls.append(("PreStartContainer", container.ids))
        request = DEVICES.PreStartContainerRequest(devices_ids=container.ids)
        await endpoint.call("PreStartContainer", request, 30)

    # ---- what plugins call

    def _registration(self) -> Any:
        handler = grpc.unary_unary_rpc_method_handler(
            self._register,
            DEVICES.RegisterRequest.FromString,
            DEVICES.Empty.SerializeToString,
        )
        return grpc.method_handlers_generic_handler("v1beta1.Registration", {"Register": handler})

    async def _register(self, request: Any, context: Any) -> Any:
        problem = _problem(request)
        if problem:
            self.rejected.append(time.monotonic())
            await context.abort(grpc.StatusCode.UNKNOWN, problem)
        path = str(self.directory / request.endpoint)
        options = [("grpc.enable_http_proxy", 0)]
        if self._authority:
            options.append(("grpc.default_authority", self._authority))  # type: ignore[arg-type]
        channel = grpc.aio.insecure_channel(f"unix:{path}", options=options)
        try:
            async with asyncio.timeout(self._dial):
                await channel.channel_ready()
        except TimeoutError:
            await channel.close(None)
            text = f"failed to dial device plugin with socketPath {path}"
            await context.abort(grpc.StatusCode.UNKNOWN, text)
        made = await _stub(channel, "GetDevicePluginOptions")(DEVICES.Empty())
        self.registrations.append((request.resource_name, request.endpoint))
        old = self.endpoints.get(request.resource_name)
        new = Endpoint(request.resource_name, path, channel, made)
        if old is not None and not old.is_stopped:
            new.devices = old.devices
        self.endpoints[request.resource_name] = new
        self._connected.append(new)
        new.task = asyncio.create_task(self._list_and_watch(new))
        return DEVICES.Empty()

    async def _list_and_watch(self, endpoint: Endpoint) -> None:
        request, response = METHODS["ListAndWatch"]
        stream = endpoint.channel.unary_stream(
            "/v1beta1.DevicePlugin/ListAndWatch",
            request_serializer=getattr(DEVICES, request).SerializeToString,
            response_deserializer=getattr(DEVICES, response).FromString,
        )(DEVICES.Empty())
        with suppress(grpc.aio.AioRpcError):
            async for listed in stream:
                newest = self.endpoints[endpoint.name]
                newest.devices = {device.ID: device for device in listed.devices}
                newest.ever_healthy |= {d.ID for d in listed.devices if d.health == HEALTHY}
                newest.lists.append(time.monotonic())
        newest = self.endpoints.get(endpoint.name, endpoint)
        newest.is_stopped = True
        await newest.channel.close(None)

    def _lister(self) -> Any:
        handler = grpc.unary_unary_rpc_method_handler(
            self._list,
            PODS.ListPodResourcesRequest.FromString,
            PODS.ListPodResourcesResponse.SerializeToString,
        )
        allocatable = grpc.unary_unary_rpc_method_handler(
            self._list_allocatable,
            PODS.AllocatableResourcesRequest.FromString,
            PODS.AllocatableResourcesResponse.SerializeToString,
        )
        methods = {"List": handler, "GetAllocatableResources": allocatable}
        return grpc.method_handlers_generic_handler("v1.PodResourcesLister", methods)

    async def _list_allocatable(self, _request: Any, _context: Any) -> Any:
        response = PODS.AllocatableResourcesResponse()
        for name, endpoint in self.endpoints.items():
            for device in sorted(endpoint.healthy):
                response.devices.add(resource_name=name, device_ids=[device])
        return response

    async def _list(self, _request: Any, context: Any) -> Any:
        now = time.monotonic()
        self.asked += 1
        self._tokens = min(BURST, self._tokens + (now - self._refilled) * PER_SECOND)
        self._refilled = now
        if self.refusals or self._tokens < 1:
            self.refusals = max(0, self.refusals - 1)
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by rate limit")
        self._tokens -= 1
        response = PODS.ListPodResourcesResponse()
        for name, containers in self.pods.items():
            if name in self._earlier and now < self._knows_earlier_at:
                continue
            namespace, _, pod = name.partition("/")
            made = response.pod_resources.add(name=pod, namespace=namespace)
            for number, container in enumerate(containers):
                if container.is_init:
                    continue  # only those that run on as sidecars are listed
                made.containers.add(name=f"c{number}").devices.add(
                    resource_name=container.resource, device_ids=container.ids
                )
        for claimed in self.claims():
            namespace, _, pod = claimed.pod.partition("/")
            container = response.pod_resources.add(name=pod, namespace=namespace).containers.add()
            namespace, _, claim = claimed.name.partition("/")
            found = container.dynamic_resources.add(claim_name=claim, claim_namespace=namespace)
            for pool, device in claimed.devices:
                found.claim_resources.add(
                    driver_name=claimed.driver, pool_name=pool, device_name=device
                )
        return response


def _reject(text: str | None) -> NoReturn:
    raise AdmissionError(text)


def _problem(request: Any) -> str:
    """Why a registration is refused (server.go, handler.go)."""
    name = request.resource_name
    if request.version != VERSION:
        return f"requested API version {request.version!r} is not supported by kubelet"
    domain, slash, _ = name.partition("/")
    if not slash or domain.endswith("kubernetes.io") or domain.startswith("requests."):
        return f"the ResourceName {name!r} is invalid"
    if len(name.rpartition("/")[2]) > LONGEST_NAME:
        return f"the ResourceName {name!r} is invalid"
    return ""


def _stub(channel: grpc.aio.Channel, method: str) -> Any:
    request, response = METHODS[method]
    return channel.unary_unary(
        f"/v1beta1.DevicePlugin/{method}",
        request_serializer=getattr(DEVICES, request).SerializeToString,
        response_deserializer=getattr(DEVICES, response).FromString,
    )


async def _close(endpoint: Endpoint) -> None:
    endpoint.is_stopped = True
    if endpoint.task is not None:
        endpoint.task.cancel()
        with suppress(asyncio.CancelledError):
            await endpoint.task
    await endpoint.channel.close(None)
