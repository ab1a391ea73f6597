"""The device plugin of one resource: what the kubelet asks, and the answers."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import grpc

from vfiomgr.errors import UsageError, VfiomgrError
from vfiomgr.node.answers import answer, preferred
from vfiomgr.node.wire import DEVICE_PLUGIN, DEVICES, HEALTHY, METHODS, UNHEALTHY

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from vfiomgr.node.model import Answer, NodeResource, NodeUnit
    from vfiomgr.node.wire import Message

    Verify = Callable[[str, tuple[str, ...]], Awaitable[None]]
    """Verify the devices of a resource; raises VfiomgrError if a container must not start."""
    Observe = Callable[[str, float], None]
    """Receives the seconds that an allocation of a resource took."""


class DevicePlugin:
    """Answers the kubelet for one resource, of which `update` sets the devices.

    Several streams can list the devices at a time: a kubelet opens the next one before the end of
    the previous one is noticed.
    """

    def __init__(self, resource: NodeResource, verify: Verify, observe: Observe) -> None:
        self._resource = resource
        self._listed = listed(resource)
        self._changed = asyncio.Event()
        self._verify = verify
        self._observe = observe
        self.streams = self.opened = 0
        """How many streams list the devices now, and how many were ever opened."""

    def update(self, resource: NodeResource) -> None:
        """Set the devices, and send them to the kubelet if its list changes."""
        self._resource = resource
        self._listed = listed(resource)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def handler(self) -> grpc.GenericRpcHandler[Any, Any]:
        """The methods, for a server."""
        methods = {name: _method(name, getattr(self, _named(name))) for name in METHODS}
        return grpc.method_handlers_generic_handler(DEVICE_PLUGIN, methods)

    async def get_device_plugin_options(self, _request: object, _context: object) -> Message:
        """Answer that containers are verified before they start, and devices are preferred."""
        return DEVICES.DevicePluginOptions(
            pre_start_required=True, get_preferred_allocation_available=True
        )

    async def list_and_watch(self, _request: object, _context: object) -> AsyncIterator[bytes]:
        """Send the complete list, and again after each change."""
        self.streams += 1
        self.opened += 1
        try:
            sent = None
            while True:
                changed = self._changed
                if self._listed != sent:
                    sent = self._listed
                    yield sent
                else:
                    await changed.wait()
        finally:
            self.streams -= 1

    async def get_preferred_allocation(self, request: Message, _context: object) -> Message:
        """Prefer close devices; an error would reject the pod, so any mistake is an empty hint."""
        response = DEVICES.PreferredAllocationResponse()
        for container in request.container_requests:
            chosen = self._preferred(container)
            response.container_responses.add(deviceIDs=chosen)
        return response

    def _preferred(self, container: Message) -> tuple[str, ...]:
        try:
            return preferred(
                self._resource,
                tuple(container.available_deviceIDs),
                tuple(container.must_include_deviceIDs),
                container.allocation_size,
            )
        except VfiomgrError:
            return ()

    async def allocate(
        self, request: Message, context: grpc.aio.ServicerContext[Any, Any]
    ) -> Message:
        """Name the devices for the container runtime; reads nothing of the host.

        The same devices can be allocated again: by init containers, and after the kubelet forgot.
        """
        begun = time.perf_counter()
        response = DEVICES.AllocateResponse()
        try:
            for container in request.container_requests:
                made = answer(self._resource, tuple(container.devices_ids))
                response.container_responses.append(_written(made))
        except VfiomgrError as error:
            await _fail(context, error)
        self._observe(self._resource.name, time.perf_counter() - begun)
        return response

    async def pre_start_container(
        self, request: Message, context: grpc.aio.ServicerContext[Any, Any]
    ) -> Message:
        """Verify the devices of a container, also before each of its restarts."""
        try:
            await self._verify(self._resource.name, tuple(request.devices_ids))
        except VfiomgrError as error:
            await _fail(context, error)
        return DEVICES.PreStartContainerResponse()


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


async def _fail(context: grpc.aio.ServicerContext[Any, Any], error: VfiomgrError) -> None:
    """End a call with an error; users read its text in the events of the pod."""
    is_wrong = isinstance(error, UsageError)
    code = grpc.StatusCode.INVALID_ARGUMENT if is_wrong else grpc.StatusCode.FAILED_PRECONDITION
    await context.abort(code, f"{error.message}; {error.hint}" if error.hint else error.message)


def _named(method: str) -> str:
    """`ListAndWatch` is the method `list_and_watch`."""
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in method).lstrip("_")


def _method(name: str, function: Callable[..., object]) -> grpc.RpcMethodHandler[Any, Any]:
    request, response = METHODS[name]
    read = getattr(DEVICES, request).FromString
    if name == "ListAndWatch":  # whose responses are already bytes
        return grpc.unary_stream_rpc_method_handler(function, read, bytes)
    write = getattr(DEVICES, response).SerializeToString
    return grpc.unary_unary_rpc_method_handler(function, read, write)
