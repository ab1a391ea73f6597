"""What a container gets through its OCI configuration, and the record of what was added to one.

The fields are those of the runtime specification, config-linux.md, "Devices" and "Allowed Device
list".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from msgspec import field

from vfiomgr.documents.text import parse_json
from vfiomgr.host.owners import NodeAccess
from vfiomgr.value import Value

NodeForm = Literal["group", "cdev"]
"""How a device is opened: `/dev/vfio/N`, or `/dev/vfio/devices/vfioN` (Linux 6.6)."""
ContainerRuntime = Literal["runc", "kata"]
"""The runtime of the container: one on this kernel, or Kata in a guest."""
RULE_ACCESS = "rwm"
"""Read, write, mknod."""


class DeviceNode(Value):
    """A character device of the host."""

    path: str
    major: int
    minor: int
    access: NodeAccess

    @property
    def number(self) -> tuple[int, int]:
        """The device number of the kernel."""
        return self.major, self.minor

    def __str__(self) -> str:
        """`/dev/vfio/23 (240:0)`."""
        return f"{self.path} ({self.major}:{self.minor})"


class ContainerDevice(Value):
    """A host device for a container: the paths of its nodes, and the addresses that share them."""

    name: str
    """The address of its first function, or the UUID of the vGPU."""
    functions: tuple[str, ...]
    nodes: tuple[str, ...]


class Injection(Value):
    """A device with the numbers of its nodes, and its CDI names."""

    device: ContainerDevice
    nodes: tuple[DeviceNode, ...]
    cdi: tuple[str, ...] = ()


RECORD = "io.vfiomgr.injected"
"""The annotation; runtimes ignore unknown ones (config.md, "Annotations")."""
_VERSION = 1
Number = tuple[int, int]


class RecordedDevice(Value):
    """An added device; its nodes may have existed before."""

    functions: tuple[str, ...]
    nodes: tuple[str, ...]
    cdi: tuple[str, ...]


class Record(Value):
    """Everything that was added, and the values that its lists replaced."""

    devices: Mapping[str, RecordedDevice] = field(default_factory=dict)
    nodes: Mapping[str, DeviceNode] = field(default_factory=dict)
    """By path: the added entries of `linux.devices`."""
    rules: Mapping[str, Number] = field(default_factory=dict)
    """By path: the added rules of `linux.resources.devices`."""
    made: Mapping[str, str | None] = field(default_factory=dict)
    """By key path, joined by dots: the original text, None if there was none."""
    stood: tuple[str, ...] = ()
    """CDI names of devices that another program requested before."""

    def named(self, text: str) -> str | None:
        """The device with a name, or with a function of that name."""
        wanted = text.lower()
        for name, device in self.devices.items():
            known = (name, *device.functions)
            if wanted in known or f"0000:{wanted}" in known:
                return name
        return None

    def written(self) -> str:
        """The text of the annotation."""
        body = {
            "version": _VERSION,
            "devices": {
                name: {"functions": d.functions, "nodes": d.nodes, "cdi": d.cdi}
                for name, d in self.devices.items()
            },
            "nodes": {path: _written(node) for path, node in self.nodes.items()},
            "rules": self.rules,
            "made": self.made,
            "stood": self.stood,
        }
        return json.dumps(body, separators=(",", ":"))


def read_record(text: str) -> Record:
    """Read the record of an annotation.

    Raises:
        ValueError: vfiomgr did not write it.

    """
    try:
        body = parse_json(text)
        if body["version"] != _VERSION:
            message = f"version {body['version']!r}"
            raise ValueError(message)
        devices = {str(name): _device(entry) for name, entry in body["devices"].items()}
        nodes = {str(path): _node(str(path), entry) for path, entry in body["nodes"].items()}
        rules = _numbers(body["rules"])
        made = {str(path): None if old is None else str(old) for path, old in body["made"].items()}
        return Record(devices, nodes, rules, made, tuple(map(str, body["stood"])))
    except (KeyError, TypeError, AttributeError) as error:
        message = f"{type(error).__name__}: {error}"
        raise ValueError(message) from None


def _device(entry: Any) -> RecordedDevice:  # noqa: ANN401 - JSON has no narrower type
    return RecordedDevice(*(tuple(map(str, entry[key])) for key in ("functions", "nodes", "cdi")))


def _written(node: DeviceNode) -> tuple[int, int, int, int, int]:
    access = node.access
    return node.major, node.minor, access.mode, access.uid, access.gid


def _node(path: str, entry: Any) -> DeviceNode:  # noqa: ANN401 - as above
    major, minor, mode, uid, gid = map(int, entry)
    return DeviceNode(path, major, minor, NodeAccess(uid, gid, mode))


def _numbers(entries: Any) -> dict[str, Number]:  # noqa: ANN401 - as above
    return {str(path): (int(major), int(minor)) for path, (major, minor) in entries.items()}
