"""The commands' side of a running agent: requests to its own socket."""

from __future__ import annotations

import http.client
import json
import socket

from vfiomgr.documents.jsonable import from_jsonable
from vfiomgr.errors import HostError, NeedsRoot, UsageError
from vfiomgr.node.status import NodeStatus

_DEADLINE = 10.0
_NOT_FOUND = 404


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=_DEADLINE)
        self._path = path

    def connect(self) -> None:
        """Connect to the socket."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def read_status(path: str) -> NodeStatus:
    """The state of the agent with this socket.

    Raises:
        HostError: no agent answers.

    """
    _, text = _ask(path, "GET", "/status")
    return from_jsonable(NodeStatus, json.loads(text))


def release(path: str, device: str) -> None:
    """End the quarantine of a device, and forgive its errors.

    Raises:
        UsageError: the agent does not offer it.
        HostError: no agent answers.

    """
    status, text = _ask(path, "POST", "/release", device)
    if status == _NOT_FOUND:
        raise UsageError(text.strip(), "vfiomgr node status lists the devices")


def _ask(path: str, method: str, page: str, body: str = "") -> tuple[int, str]:
    connection = _UnixConnection(path)
    try:
        connection.request(method, page, body)
        response = connection.getresponse()
        return response.status, response.read().decode()
    except PermissionError:
        what = "asking the agent"
        raise NeedsRoot(what) from None
    except (OSError, http.client.HTTPException) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        message = f"no agent answers on {path}: {reason}"
        raise HostError(message, "start it with: vfiomgr node run") from None
    finally:
        connection.close()
