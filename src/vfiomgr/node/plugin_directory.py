"""The kubelet's directories: a lock, sockets of agents that were killed, and changes.

A kubelet that starts creates its sockets again, and the agent registers again.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import os
import struct
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from vfiomgr.engine.locks import is_lock, open_lock
from vfiomgr.errors import Refusal, UsageError
from vfiomgr.node.serving import PREFIX
from vfiomgr.paths import RUNTIME

if TYPE_CHECKING:
    from collections.abc import Iterable

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


_CREATED, _DELETED, _MOVED_FROM, _MOVED_TO = 0x100, 0x200, 0x40, 0x80
_ONLY_DIRECTORIES = 0x01000000
_CHANGES = _CREATED | _DELETED | _MOVED_FROM | _MOVED_TO | _ONLY_DIRECTORIES
_IGNORED = 0x8000
"""The directory is gone, and is not watched any more (include/uapi/linux/inotify.h)."""
_HEADER = struct.Struct("iIII")
"""struct inotify_event: watch, mask, cookie, and the length of the name that follows."""
_BYTES = 1 << 16
_ABSENT = 1.0
"""Seconds until it is seen that an absent directory was created."""


class DirectoryChanges:
    """Wakes whoever waits when a name comes or goes in one of the directories, or when told to.

    `since` is when that was last so. Without inotify, all who wait look every `tick` seconds.
    """

    def __init__(self, directories: Iterable[str], tick: float) -> None:
        self._absent = set(directories)
        self._watched: dict[int, str] = {}
        self._tick = tick
        self._stirred = asyncio.Event()
        self._library = ctypes.CDLL(None, use_errno=True)
        self._descriptor: int = self._library.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        self.since = time.monotonic()

    def start(self) -> None:
        """Watch, in the running loop."""
        if self._descriptor >= 0:
            self._watch()
            asyncio.get_running_loop().add_reader(self._descriptor, self._read)

    def close(self) -> None:
        """Stop watching."""
        if self._descriptor >= 0:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    def stir(self) -> None:
        """Wake whoever waits."""
        stirred, self._stirred = self._stirred, asyncio.Event()
        stirred.set()

    async def wait(self, seconds: float) -> None:
        """Wait for a change, at most so many seconds."""
        if self._descriptor < 0:
            seconds = min(seconds, self._tick)
        elif self._absent:
            self._watch()
            seconds = min(seconds, _ABSENT) if self._absent else seconds
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stirred.wait()

    def _watch(self) -> None:
        for directory in tuple(self._absent):
            name = os.fsencode(directory)
            watch = self._library.inotify_add_watch(self._descriptor, name, _CHANGES)
            if watch >= 0:
                self._watched[watch] = directory
                self._absent.discard(directory)

    def _read(self) -> None:
        data = os.read(self._descriptor, _BYTES)
        while data:
            watch, mask, _, length = _HEADER.unpack_from(data)
            data = data[_HEADER.size + length :]
            if mask & _IGNORED and watch in self._watched:
                self._absent.add(self._watched.pop(watch))
        self.since = time.monotonic()
        self.stir()
