"""The kubelet's messages, described in tables, and the agent as its client.

The messages are built at run time, in a pool of descriptors of their own: every version of protobuf
can do that, and other libraries with files or packages of the same names do not interfere.

Sources: api.proto in pkg/apis/deviceplugin/v1beta1, podresources/v1, dra/v1, dra-health/v1 and
pluginregistration/v1 of k8s.io/kubelet.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

from vfiomgr.errors import HostError
from vfiomgr.node.dra.model import DRIVER
from vfiomgr.node.rpc import CallError, Message, call
from vfiomgr.node.sockets import Stamp, stamp_of

if TYPE_CHECKING:
    Key = tuple[str, str]
    """The name of a resource, and the ID of a device."""

_SCALARS = {
    "bool": FieldDescriptorProto.TYPE_BOOL,
    "int32": FieldDescriptorProto.TYPE_INT32,
    "int64": FieldDescriptorProto.TYPE_INT64,
    "string": FieldDescriptorProto.TYPE_STRING,
}
_MAP = "map<"
"""map<TYPE> has keys of text; on the wire a repeated message with the fields `key` and `value`."""
_ENTRY = "Entry"

VERSION = "v1beta1"
"""The version of the device plugin API."""
HEALTHY, UNHEALTHY = "Healthy", "Unhealthy"

REGISTER = "/v1beta1.Registration/Register"
LIST_POD_RESOURCES = "/v1.PodResourcesLister/List"
LIST_ALLOCATABLE = "/v1.PodResourcesLister/GetAllocatableResources"
DEVICE_PLUGIN = "v1beta1.DevicePlugin"


def package(name: str, messages: Mapping[str, str]) -> Message:
    """The classes of a package's messages, as attributes.

    A field is written NAME:TYPE, and its number is its position; `*` marks a repeated one.
    """
    file = FileDescriptorProto(name=f"vfiomgr/{name}.proto", package=name, syntax="proto3")
    for message, fields in messages.items():
        described = file.message_type.add(name=message)
        for number, field in enumerate(fields.split(), 1):
            _describe(described, number, field, name)
    pool = DescriptorPool()
    pool.Add(file)
    classes = {m: GetMessageClass(pool.FindMessageTypeByName(f"{name}.{m}")) for m in messages}
    return SimpleNamespace(**classes)


def _describe(message: DescriptorProto, number: int, text: str, package: str) -> None:
    name, _, kind = text.partition(":")
    is_map = kind.startswith(_MAP)
    is_repeated = kind.endswith("*") or is_map
    field = message.field.add(name=name, number=number, json_name=name)
    field.label = (
        FieldDescriptorProto.LABEL_REPEATED if is_repeated else FieldDescriptorProto.LABEL_OPTIONAL
    )
    kind = kind.removesuffix("*")
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
        return
    field.type = FieldDescriptorProto.TYPE_MESSAGE
    field.type_name = f".{package}.{kind}"
    if is_map:
        entry = name.title().replace("_", "") + _ENTRY
        field.type_name = f".{package}.{message.name}.{entry}"
        nested = message.nested_type.add(name=entry)
        nested.options.map_entry = True
        value = kind.removeprefix(_MAP).removesuffix(">")
        for position, part in enumerate(("key:string", f"value:{value}"), 1):
            _describe(nested, position, part, package)


DEVICES = package(
    "v1beta1",
    {
        "Empty": "",
        "DevicePluginOptions": "pre_start_required:bool get_preferred_allocation_available:bool",
        "RegisterRequest": (
            "version:string endpoint:string resource_name:string options:DevicePluginOptions"
        ),
        "NUMANode": "ID:int64",
        "TopologyInfo": "nodes:NUMANode*",
        "Device": "ID:string health:string topology:TopologyInfo",
        "ListAndWatchResponse": "devices:Device*",
        "PreStartContainerRequest": "devices_ids:string*",
        "PreStartContainerResponse": "",
        "ContainerPreferredAllocationRequest": (
            "available_deviceIDs:string* must_include_deviceIDs:string* allocation_size:int32"
        ),
        "PreferredAllocationRequest": "container_requests:ContainerPreferredAllocationRequest*",
        "ContainerPreferredAllocationResponse": "deviceIDs:string*",
        "PreferredAllocationResponse": "container_responses:ContainerPreferredAllocationResponse*",
        "ContainerAllocateRequest": "devices_ids:string*",
        "AllocateRequest": "container_requests:ContainerAllocateRequest*",
        "Mount": "container_path:string host_path:string read_only:bool",
        "DeviceSpec": "container_path:string host_path:string permissions:string",
        "CDIDevice": "name:string",
        "ContainerAllocateResponse": (
            "envs:map<string> mounts:Mount* devices:DeviceSpec* annotations:map<string> "
            "cdi_devices:CDIDevice*"
        ),
        "AllocateResponse": "container_responses:ContainerAllocateResponse*",
    },
)
"""Device plugins, v1beta1."""

PODS = package(
    "v1",
    {
        "ListPodResourcesRequest": "",
        "ContainerDevices": "resource_name:string device_ids:string*",
        "ContainerMemory": "",
        "ClaimResource": (
            "cdi_devices:CDIDevice* driver_name:string pool_name:string device_name:string"
        ),
        "CDIDevice": "name:string",
        "DynamicResource": (
            "class_name:string claim_name:string claim_namespace:string "
            "claim_resources:ClaimResource*"
        ),
        "ContainerResources": (
            "name:string devices:ContainerDevices* cpu_ids:int64* memory:ContainerMemory* "
            "dynamic_resources:DynamicResource*"
        ),
        "PodResources": "name:string namespace:string containers:ContainerResources*",
        "ListPodResourcesResponse": "pod_resources:PodResources*",
        "AllocatableResourcesRequest": "",
        "AllocatableResourcesResponse": "devices:ContainerDevices*",
    },
)
"""Pod resources, v1, limited to pods, their devices and their claims."""

CLAIMS = package(
    "k8s.io.kubelet.pkg.apis.dra.v1",
    {
        "Claim": "namespace:string uid:string name:string",
        "Device": (
            "request_names:string* pool_name:string device_name:string cdi_device_ids:string*"
        ),
        "NodePrepareResourcesRequest": "claims:Claim*",
        "NodePrepareResourceResponse": "devices:Device* error:string",
        "NodePrepareResourcesResponse": "claims:map<NodePrepareResourceResponse>",
        "NodeUnprepareResourcesRequest": "claims:Claim*",
        "NodeUnprepareResourceResponse": "error:string",
        "NodeUnprepareResourcesResponse": "claims:map<NodeUnprepareResourceResponse>",
    },
)
"""DRA plugins: v1, without the shares of devices; v1beta1 is the same on the wire."""

HEALTH = package(
    "v1",
    {
        "NodeWatchResourcesRequest": "",
        "DeviceIdentifier": "pool_name:string device_name:string",
        "DeviceHealth": (
            "device:DeviceIdentifier health:int32 last_updated_time:int64 "
            "health_check_timeout_seconds:int64 message:string"
        ),
        "NodeWatchResourcesResponse": "devices:DeviceHealth*",
    },
)
"""The health of devices of DRA plugins: v1, and v1alpha1 is the same on the wire."""

PLUGINS = package(
    "pluginregistration",
    {
        "InfoRequest": "",
        "PluginInfo": "type:string name:string endpoint:string supported_versions:string*",
        "RegistrationStatus": "plugin_registered:bool error:string",
        "RegistrationStatusResponse": "",
    },
)
"""The registration of plugins that the kubelet finds by their sockets."""

METHODS: dict[str, tuple[str, str]] = {
    "GetDevicePluginOptions": ("Empty", "DevicePluginOptions"),
    "ListAndWatch": ("Empty", "ListAndWatchResponse"),
    "GetPreferredAllocation": ("PreferredAllocationRequest", "PreferredAllocationResponse"),
    "Allocate": ("AllocateRequest", "AllocateResponse"),
    "PreStartContainer": ("PreStartContainerRequest", "PreStartContainerResponse"),
}
"""The methods of a device plugin, with the messages of their requests and responses."""
CLAIM_METHODS = {
    "NodePrepareResources": ("NodePrepareResourcesRequest", "NodePrepareResourcesResponse"),
    "NodeUnprepareResources": ("NodeUnprepareResourcesRequest", "NodeUnprepareResourcesResponse"),
}
HEALTH_METHODS = {
    "NodeWatchResources": ("NodeWatchResourcesRequest", "NodeWatchResourcesResponse"),
}
PLUGIN_METHODS = {
    "GetInfo": ("InfoRequest", "PluginInfo"),
    "NotifyRegistrationStatus": ("RegistrationStatus", "RegistrationStatusResponse"),
}

SOCKET = "kubelet.sock"
_GLANCE = 0.1
"""Seconds after which it is seen that the kubelet, which may have accepted a call, has ended."""
_REGISTRATION_DEADLINE = 20.0
"""Seconds; the kubelet itself gives up after 10 if it cannot connect to the plugin."""
_LIST_DEADLINE = 10.0


class ClaimUse(NamedTuple):
    """A claim of pods of the node."""

    devices: set[tuple[str, str]]
    """Those of this driver, by pool and name."""
    pods: set[str]
    """NAMESPACE/NAME."""


class NoAnswer(HostError):  # noqa: N818 - the name says what the kubelet did
    """The kubelet is absent, refuses, or limits the rate of calls."""


def kubelet_stamp(directory: str) -> Stamp | None:
    """What changes if a kubelet starts; None if none accepts registrations."""
    return stamp_of(os.path.join(directory, SOCKET))


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
    socket, stamp = os.path.join(directory, SOCKET), kubelet_stamp(directory)
    work = _call(socket, REGISTER, request, DEVICES.Empty, _REGISTRATION_DEADLINE)
    task = asyncio.create_task(work)
    try:
        while not (await asyncio.wait({task}, timeout=_GLANCE))[0]:
            if kubelet_stamp(directory) != stamp:
                message = "the kubelet restarted before it answered"
                raise NoAnswer(message)
        await task
    finally:
        task.cancel()


async def pod_devices(socket: str) -> tuple[dict[Key, str], dict[str, ClaimUse]]:
    """The containers, NAMESPACE/POD/NAME, that have devices, and the claims by NAMESPACE/NAME.

    Raises:
        NoAnswer: the kubelet does not serve pod resources, or was asked too often.
    """
    request = PODS.ListPodResourcesRequest()
    found = await _call(
        socket, LIST_POD_RESOURCES, request, PODS.ListPodResourcesResponse, _LIST_DEADLINE
    )
    pods: dict[Key, str] = {}
    claims: dict[str, ClaimUse] = {}
    for pod in found.pod_resources:
        name = f"{pod.namespace}/{pod.name}"
        for container in pod.containers:
            for devices in container.devices:
                keys = ((devices.resource_name, device) for device in devices.device_ids)
                pods.update(dict.fromkeys(keys, f"{name}/{container.name}"))
            for claim in container.dynamic_resources:
                _add_claim(claims, claim, name)
                others = (e for e in claim.claim_resources if e.driver_name != DRIVER)
                keys = ((each.driver_name, each.device_name) for each in others)
                pods.update(dict.fromkeys(keys, f"{name}/{container.name}"))
    return pods, claims


def _add_claim(claims: dict[str, ClaimUse], claim: Message, pod: str) -> None:
    found = claim.claim_resources
    devices = {(e.pool_name, e.device_name) for e in found if e.driver_name == DRIVER}
    if devices:
        name = f"{claim.claim_namespace}/{claim.claim_name}"
        use = claims.setdefault(name, ClaimUse(set(), set()))
        use.devices.update(devices)
        use.pods.add(pod)


async def allocatable(socket: str) -> dict[str, set[str]] | None:
    """The healthy devices of each resource that the kubelet lists; None if it does not answer.

    Those of pods are among them (GetAllocatableDevices in pkg/kubelet/cm/devicemanager/manager.go).
    """
    request, response = PODS.AllocatableResourcesRequest(), PODS.AllocatableResourcesResponse
    try:
        found = await _call(socket, LIST_ALLOCATABLE, request, response, _LIST_DEADLINE)
    except NoAnswer:
        return None
    listed: dict[str, set[str]] = {}
    for each in found.devices:
        listed.setdefault(each.resource_name, set()).update(each.device_ids)
    return listed


async def _call(
    socket: str, method: str, request: Message, response: Message, seconds: float
) -> Message:
    """One call on a connection of its own: the socket is another one after each restart."""
    try:
        return await call(socket, method, request, response, seconds)
    except ConnectionError as error:
        message = f"no kubelet answers on {socket}"
        raise NoAnswer(message) from error
    except CallError as error:
        message = f"the kubelet did not accept {method}: {error.text}"
        raise NoAnswer(message) from error
