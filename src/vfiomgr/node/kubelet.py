"""The agent as a client of the kubelet: registration, and which pod has which device."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import grpc

from vfiomgr.errors import HostError
from vfiomgr.node.wire import DEVICES, LIST_POD_RESOURCES, MOST_BYTES, PODS, REGISTER, VERSION

if TYPE_CHECKING:
    from vfiomgr.node.wire import Message

    Stamp = tuple[int, int]

SOCKET = "kubelet.sock"
_REGISTRATION_DEADLINE = 20.0
"""Seconds; the kubelet itself gives up after 10 if it cannot connect to the plugin."""
_LIST_DEADLINE = 10.0
_NO_PROXY = ("grpc.enable_http_proxy", 0)


class NoAnswer(HostError):  # noqa: N818 - it says what the kubelet did
    """The kubelet is absent, refuses, or limits the rate of calls."""


def stamp_of(path: str) -> Stamp | None:
    """What changes if a socket is created again; None if there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_ctime_ns


async def register(directory: str, endpoint: str, resource: str) -> None:
    """Register a resource; the kubelet connects to its plugin before it answers.

    Raises:
        NoAnswer: with the kubelet's text.

    """
    request = DEVICES.RegisterRequest(
        version=VERSION,
        endpoint=endpoint,
        resource_name=resource,
        options=DEVICES.DevicePluginOptions(
            pre_start_required=True, get_preferred_allocation_available=True
        ),
    )
    await _call(
        os.path.join(directory, SOCKET), REGISTER, request, DEVICES.Empty, _REGISTRATION_DEADLINE
    )


async def pods_by_device(socket: str) -> dict[tuple[str, str], str]:
    """The container, as NAMESPACE/POD/NAME, that has each device, by resource and device ID.

    Raises:
        NoAnswer: the kubelet does not serve pod resources, or was asked too often.

    """
    request = PODS.ListPodResourcesRequest()
    found = await _call(
        socket, LIST_POD_RESOURCES, request, PODS.ListPodResourcesResponse, _LIST_DEADLINE
    )
    return {
        (devices.resource_name, device): f"{pod.namespace}/{pod.name}/{container.name}"
        for pod in found.pod_resources
        for container in pod.containers
        for devices in container.devices
        for device in devices.device_ids
    }


async def _call(
    socket: str, method: str, request: Message, response: Message, seconds: float
) -> Message:
    """One call on a connection of its own: the socket is another one after each restart."""
    options = (_NO_PROXY, ("grpc.max_receive_message_length", MOST_BYTES))
    async with grpc.aio.insecure_channel(f"unix:{socket}", options=options) as channel:
        call = channel.unary_unary(
            method,
            request_serializer=type(request).SerializeToString,
            response_deserializer=response.FromString,
        )
        try:
            return await call(request, timeout=seconds)
        except grpc.aio.AioRpcError as error:
            message = f"the kubelet did not accept {method}: {error.details()}"
            raise NoAnswer(message) from error
