"""The sockets of the DRA plugin: none replaces or removes that of another process."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from typing import TYPE_CHECKING

from vfiomgr.errors import Refusal, UsageError
from vfiomgr.node.rpc import Server
from vfiomgr.node.serving import PREFIX, require_short
from vfiomgr.node.sockets import is_served, stamp_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from vfiomgr.node.rpc import Methods

_HIDDEN = f".{PREFIX}"
_OWNER_ONLY = 0o600


class Socket:
    """A server on a path.

    It is made at a hidden path, which the kubelet ignores, and renamed when it answers: the kubelet
    finds no socket that does not, and one of a process that has ended is replaced at once.
    """

    def __init__(self, path: str, tell: Callable[[str], None]) -> None:
        self.path = path
        self._tell = tell
        self._server: Server | None = None
        self._inode = 0

    @property
    def is_there(self) -> bool:
        """Whether the socket is the one of this server."""
        stamp = stamp_of(self.path)
        return stamp is not None and stamp[0] == self._inode

    async def start(self, *methods: Methods) -> None:
        """Serve; a socket of a process that has ended is replaced.

        Raises:
            Refusal: another process serves this path.
            UsageError: the path cannot be used.

        """
        hidden = os.path.join(os.path.dirname(self.path), f"{_HIDDEN}{secrets.token_hex(4)}")
        for path in (self.path, hidden):
            require_short(path, "--kubelet-root")
        if is_served(self.path):
            message = f"another process serves {self.path}"
            raise Refusal(message, "stop that process first; find it with fuser")
        server = Server(*methods, tell=self._tell)
        try:
            await server.serve(hidden)
            os.chmod(hidden, _OWNER_ONLY)
            os.rename(hidden, self.path)
        except OSError as error:
            await server.stop()
            with suppress(OSError):
                os.unlink(hidden)
            message = f"cannot serve {self.path}: {error}"
            raise UsageError(message, "check that the directory exists and is writable") from None
        stamp = stamp_of(self.path)
        self._server, self._inode = server, 0 if stamp is None else stamp[0]

    async def stop(self) -> None:
        """Remove the socket, and end the calls."""
        self.remove()
        server, self._server = self._server, None
        if server is not None:
            await server.stop()

    def remove(self) -> None:
        """Remove the socket if it is the one of this server; connections stay."""
        if self.is_there:
            with suppress(FileNotFoundError):
                os.unlink(self.path)


def remove_stale(directory: str, prefix: str) -> None:
    """Remove the sockets of processes that were killed: the kubelet connects to all it finds.

    Raises:
        UsageError: there is no such directory.

    """
    try:
        names = os.listdir(directory)
    except OSError as error:
        message = f"cannot use the kubelet's directory {directory}: {error.strerror}"
        raise UsageError(message, "start the kubelet first, or pass --kubelet-root") from None
    for name in names:
        path = os.path.join(directory, name)
        is_ours = name.startswith(prefix) and name.endswith(".sock")
        if (is_ours or name.startswith(_HIDDEN)) and not is_served(path):
            with suppress(FileNotFoundError):
                os.unlink(path)
