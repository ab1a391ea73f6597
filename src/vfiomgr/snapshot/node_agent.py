"""The agent of a Kubernetes node for other commands: its state, and requests to its socket."""

from __future__ import annotations

import time

import msgspec

from vfiomgr.diagnostic import Diagnostic
from vfiomgr.documents.jsonable import Misfit, from_jsonable
from vfiomgr.errors import HostError, NeedsRoot, UsageError
from vfiomgr.paths import RUNTIME
from vfiomgr.value import Value

CONTROL = RUNTIME / "node.sock"
"""The agent's own socket."""
_DEADLINE = 10.0
_MOST_BYTES = 64 << 20
_NOT_FOUND = 404


class DeviceStatus(Value):
    """A device that is offered to the kubelet."""

    id: str
    addresses: tuple[str, ...]
    numa_nodes: tuple[int, ...]
    is_healthy: bool
    used_by: str
    """A pod as NAMESPACE/NAME/CONTAINER, a guest or a process."""
    reasons: tuple[Diagnostic, ...] = ()
    """Why it is not healthy."""


class ResourceStatus(Value):
    """A resource, and whether the kubelet lists its devices."""

    name: str
    consumer: str
    is_registered: bool
    devices: tuple[DeviceStatus, ...] = ()


class NodeStatus(Value):
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


def read_status(path: str) -> NodeStatus:
    """The state of the agent with this socket.

    Raises:
        HostError: no agent answers.

    """
    try:
        _, text = _ask(path, "GET", "/status")
        return from_jsonable(NodeStatus, msgspec.json.decode(text))
    except (Misfit, msgspec.DecodeError) as error:
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


def _ask(path: str, method: str, page: str, body: str = "") -> tuple[int, bytes]:
    """The status and the body of an answer.

    Raises:
        HostError: no agent answers.

    """
    try:
        return _exchange(path, method, page, body.encode(), _DEADLINE)
    except PermissionError:
        what = "asking the agent"
        raise NeedsRoot(what) from None
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
