"""The kubelet's gRPC messages and methods, described in tables.

The messages are built at run time, in a pool of descriptors of their own: every version of protobuf
can do that, and other libraries with files or packages of the same names do not interfere.

Sources: api.proto in pkg/apis/deviceplugin/v1beta1 and pkg/apis/podresources/v1 of k8s.io/kubelet.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

if TYPE_CHECKING:
    from collections.abc import Mapping

Message = Any
"""A message, or its class: built at run time, so that a type checker does not know its fields."""
_SCALARS = {
    "bool": FieldDescriptorProto.TYPE_BOOL,
    "int32": FieldDescriptorProto.TYPE_INT32,
    "int64": FieldDescriptorProto.TYPE_INT64,
    "string": FieldDescriptorProto.TYPE_STRING,
}
_MAP = "map"
"""map<string, string>; on the wire a repeated message with the fields `key` and `value`."""
_ENTRY = "Entry"

VERSION = "v1beta1"
"""The version of the device plugin API."""
HEALTHY, UNHEALTHY = "Healthy", "Unhealthy"
LONGEST_ID = 63
MOST_BYTES = 16 << 20
"""The largest message of the pod resources API (the kubelet's own clients have this limit)."""

REGISTER = "/v1beta1.Registration/Register"
LIST_POD_RESOURCES = "/v1.PodResourcesLister/List"
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
    is_repeated = kind.endswith("*") or kind == _MAP
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
    if kind == _MAP:
        entry = name.title().replace("_", "") + _ENTRY
        field.type_name = f".{package}.{message.name}.{entry}"
        nested = message.nested_type.add(name=entry)
        nested.options.map_entry = True
        for position, part in enumerate(("key:string", "value:string"), 1):
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
            "envs:map mounts:Mount* devices:DeviceSpec* annotations:map cdi_devices:CDIDevice*"
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
        "ContainerResources": "name:string devices:ContainerDevices*",
        "PodResources": "name:string namespace:string containers:ContainerResources*",
        "ListPodResourcesResponse": "pod_resources:PodResources*",
    },
)
"""Pod resources, v1: the part of it that names pods and their devices."""

METHODS: dict[str, tuple[str, str]] = {
    "GetDevicePluginOptions": ("Empty", "DevicePluginOptions"),
    "ListAndWatch": ("Empty", "ListAndWatchResponse"),
    "GetPreferredAllocation": ("PreferredAllocationRequest", "PreferredAllocationResponse"),
    "Allocate": ("AllocateRequest", "AllocateResponse"),
    "PreStartContainer": ("PreStartContainerRequest", "PreStartContainerResponse"),
}
"""The methods of a device plugin, with the messages of their requests and responses."""
