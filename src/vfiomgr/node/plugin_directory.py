"""Lock the kubelet's directory of device plugins; remove the sockets of agents that were killed."""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from vfiomgr.engine.locks import is_lock, open_lock
from vfiomgr.errors import Refusal, UsageError
from vfiomgr.node.serving import PREFIX
from vfiomgr.paths import RUNTIME

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree

_ENDING = 5.0
"""Seconds that another agent, which may be ending, has to release its lock."""
_GLANCE = 0.1
_STOP_IT = "see vfiomgr node status, and stop it first"


class DirectoryLock:
    """The lock of an agent against other agents, which would take over its resources.

    The file is in /run/vfiomgr/locks, which administrators do not clean up. It is named after the
    inode of the directory, not its path, and is therefore the same inside and outside of a
    container.
    """

    def __init__(self, tree: HostTree, directory: str) -> None:
        self._tree = tree
        self._directory = directory
        self._name = ""
        self._descriptor = -1

    async def take(self) -> None:
        """Lock the directory.

        Raises:
            Refusal: another agent has locked it.
            UsageError: the directory does not exist.

        """
        try:
            found = os.stat(self._directory)
            os.listdir(self._directory)
        except OSError as error:
            message = f"cannot use the kubelet's directory {self._directory}: {error.strerror}"
            hint = "start the kubelet first, or pass --plugin-directory"
            raise UsageError(message, hint) from None
        self._name = f"node-{found.st_dev:x}-{found.st_ino:x}"
        end = time.monotonic() + _ENDING
        while not self._is_taken():
            if time.monotonic() > end:
                message = f"another agent serves the kubelet in {self._directory}"
                raise Refusal(message, _STOP_IT)
            await asyncio.sleep(_GLANCE)

    def keep(self) -> None:
        """Lock the directory again if the file of the lock was removed.

        Raises:
            Refusal: another agent has locked it in the meantime.

        """
        if is_lock(self._tree, self._name, self._descriptor):
            return
        self.close()
        if not self._is_taken():
            message = f"another agent has taken over the kubelet in {self._directory}"
            raise Refusal(message, f"{_STOP_IT}; the lock of this agent was removed")

    def close(self) -> None:
        """Release the lock; its file stays."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _is_taken(self) -> bool:
        try:
            self._descriptor = open_lock(self._tree, self._name)
        except OSError as error:
            message = f"cannot create the agent's lock in {RUNTIME}: {error.strerror}"
            raise UsageError(message, f"run as root, and make {RUNTIME} writable") from None
        with suppress(BlockingIOError):
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_lock(self._tree, self._name, self._descriptor):
                return True
        self.close()
        return False


def remove_old_sockets(directory: str) -> None:
    """Remove the sockets of agents that were killed."""
    for name in os.listdir(directory):
        if name.startswith(PREFIX) and name.endswith(".sock"):
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(directory, name))
