"""The agent of a Kubernetes node for other commands: its state, and requests to its socket."""

from __future__ import annotations

import time
import warnings
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec

from vfiomgr.diagnostic import Diagnostic
from vfiomgr.documents.jsonable import from_jsonable
from vfiomgr.errors import HostError, NeedsRoot, UsageError
from vfiomgr.paths import RUNTIME
from vfiomgr.pci.model import is_address
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vfiomgr.host.tree import HostTree

CONTROL = RUNTIME / "node.sock"
"""The agent's own socket."""
_DEADLINE = 10.0
_PATIENCE = 1.0
"""Seconds that commands wait which do not depend on an agent."""
_ABSENT = (FileNotFoundError, ConnectionRefusedError, PermissionError)
"""No agent runs, or this user may not ask it."""
_MOST_BYTES = 64 << 20
_OK, _NOT_FOUND = 200, 404


class DeviceStatus(Value):
    """A device that is offered to the kubelet."""

    id: str
    addresses: tuple[str, ...]
    numa_nodes: tuple[int, ...]
    is_healthy: bool
    used_by: str
    """A pod as NAMESPACE/NAME/CONTAINER, a guest or a process."""
    pod: str = ""
    """The container that the kubelet gave it to, NAMESPACE/NAME/CONTAINER."""
    reasons: tuple[Diagnostic, ...] = ()
    """Why it is not healthy."""


class ResourceStatus(Value):
    """A resource, and whether the kubelet lists its devices."""

    name: str
    consumer: str
    is_registered: bool
    devices: tuple[DeviceStatus, ...] = ()


class NodeStatus(Value, dict=True):
    """The state of an agent."""

    pid: int
    plugin_directory: str
    has_kubelet: bool
    """Whether a kubelet accepts registrations."""
    resources: tuple[ResourceStatus, ...] = ()
    notes: tuple[Diagnostic, ...] = ()
    """Devices that are not offered, and why."""
    error: str = ""
    """Why the last scan failed."""

    @cached_property
    def pods(self) -> Mapping[str, str]:
        """The pods, NAMESPACE/NAME, by the addresses and UUIDs of the devices that they have."""
        devices = (d for resource in self.resources for d in resource.devices if d.pod)
        return {
            name: device.pod.rpartition("/")[0]
            for device in devices
            for name in (device.addresses if is_address(device.id) else (device.id,))
        }


def find_status(tree: HostTree) -> NodeStatus | None:
    """The state of the agent of a host; None if none runs, or this user may not ask it."""
    if not tree.exists(CONTROL):
        return None
    path = tree.locate(CONTROL)
    try:
        return _read(*_exchange(path, "GET", "/status", b"", _PATIENCE))
    except _ABSENT:
        return None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error) or "timed out"
        text = f"cannot ask the node agent on {CONTROL} which pods have devices: {why}"
        warnings.warn(text, stacklevel=2)
        return None


def read_status(path: str) -> NodeStatus:
    """The state of the agent with this socket.

    Raises:
        HostError: no agent answers.

    """
    try:
        return _read(*_ask(path, "GET", "/status"))
    except ValueError as error:
        message = f"cannot read the answer of the agent on {path}: {error}"
        raise HostError(message, "restart the agent, so that it has the same version") from None


def release(path: str, device: str) -> None:
    """End the quarantine of a device, and forgive its errors.

    Raises:
        UsageError: the agent does not offer it.
        HostError: no agent answers.

    """
    status, text = _ask(path, "POST", "/release", device)
    if status == _NOT_FOUND:
        raise UsageError(text.decode().strip(), "vfiomgr node status lists the devices")


def _read(status: int, content: bytes) -> NodeStatus:
    """Read an answer.

    Raises:
        ValueError: it is an error, incomplete, or that of another version.

    """
    if status != _OK:
        raise ValueError(content.decode(errors="replace").strip())
    return from_jsonable(NodeStatus, msgspec.json.decode(content))


def _ask(path: str, method: str, page: str, body: str = "") -> tuple[int, bytes]:
    """The status and the body of an answer.

    Raises:
        HostError: no agent answers.

    """
    try:
        return _exchange(path, method, page, body.encode(), _DEADLINE)
    except PermissionError:
        what = "querying the agent"
        raise NeedsRoot(what, has_plan=False) from None
    except OSError as error:
        message = f"no agent answers on {path}: {error.strerror or error}"
        raise HostError(message, "start it with: vfiomgr node run") from None


def _exchange(path: str, method: str, page: str, body: bytes, seconds: float) -> tuple[int, bytes]:
    """A request of HTTP over a Unix socket; the server closes the connection after its answer.

    Raises:
        OSError: the agent does not answer in time, or the answer is not one of HTTP.

    """
    import socket  # noqa: PLC0415 - most hosts have no agent

    end = time.monotonic() + seconds
    answer = bytearray()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(seconds)
        connection.connect(path)
        head = f"{method} {page} HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        while data := connection.recv(1 << 16):
            answer += data
            left = end - time.monotonic()
            if left <= 0 or len(answer) > _MOST_BYTES:
                raise TimeoutError
            connection.settimeout(left)
    first, _, content = bytes(answer).partition(b"\r\n\r\n")
    words = first.split(None, 2)
    if len(words) < 2 or not words[1].isdigit():  # noqa: PLR2004 - the version and the status
        message = "its answer is not HTTP"
        raise OSError(message)
    return int(words[1]), content
