"""Sockets and their connections, and the kubelet's directories: a lock, old sockets, changes.

A limit of connections leaves descriptors for everything else in the process. A kubelet that starts
creates its sockets again, and the agent registers again.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import os
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from vfiomgr.engine.locks import is_lock, open_lock
from vfiomgr.errors import Refusal, UsageError
from vfiomgr.paths import RUNTIME

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree

Stamp = tuple[int, int]


def stamp_of(path: str) -> Stamp | None:
    """The identity of a socket file, which changes if it is created again; None without a file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_ctime_ns


def is_served(path: str) -> bool:
    """Whether a process listens on a socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(0)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except BlockingIOError:
            return True  # its queue is full
    return True


LONGEST_TEXT = 1024
"""Bytes of an error for a peer; encoding an HTTP/2 header takes quadratic time."""
LONGEST_NAME = 80
"""Characters of a name that an error quotes from a request."""


def cut(text: str) -> str:
    """An error for a peer, with at most `LONGEST_TEXT` bytes."""
    if len(text) <= LONGEST_TEXT // 4:
        return text
    data = text.encode(errors="replace")
    if len(data) <= LONGEST_TEXT:
        return text
    return f"{data[: LONGEST_TEXT - 3].decode(errors='ignore')}…"


def quoted_name(name: str) -> str:
    """A name from a request, cut if it is longer than that of any device."""
    return name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}…"


class Clients:
    """At most `most` connections; another one closes the oldest idle one of the peer with the most.

    A peer that opens many connections thus only loses its own.
    """

    def __init__(self, server: str, most: int, tell: Callable[[str], None]) -> None:
        self._server = server
        self._most = most
        self._tell = tell
        self._open: dict[asyncio.WriteTransport, tuple[str, Callable[[], bool]]] = {}
        """The peer of each connection, and whether it is idle; the oldest is first."""
        self._is_told = False

    def add(self, transport: asyncio.WriteTransport, is_idle: Callable[[], bool]) -> None:
        """Count a new connection, and close one if there are too many."""
        name = transport.get_extra_info("peername")
        # All clients of a Unix socket count as one.
        self._open[transport] = str(name[0]) if isinstance(name, tuple) else "", is_idle
        if len(self._open) > self._most:
            self._end_one(transport)

    def remove(self, transport: asyncio.WriteTransport) -> None:
        """Remove a connection that has ended."""
        self._open.pop(transport, None)
        if len(self._open) <= self._most // 2:
            self._is_told = False

    def abort(self) -> None:
        """Close all connections, including those of clients that do not read."""
        for transport in tuple(self._open):
            transport.abort()

    def _end_one(self, newest: asyncio.WriteTransport) -> None:
        if not self._is_told:
            self._is_told = True
            self._tell(f"{self._server}: more than {self._most} connections; idle ones are closed")
        idle = {t: peer for t, (peer, is_idle) in self._open.items() if t is newest or is_idle()}
        counts = Counter(peer for peer, _ in self._open.values())
        ended = max(idle, key=lambda transport: counts[idle[transport]])  # the first of equal ones
        del self._open[ended]
        ended.abort()


PREFIX = "vfiomgr-"
"""The beginning of the names of the agent's sockets in the kubelet's directories."""
HIDDEN = f".{PREFIX}"
"""The beginning of names that the kubelet ignores."""
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
        list_directory(self._directory, "--plugin-directory")
        found = os.stat(self._directory)
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


def remove_stale(directory: str, prefix: str, option: str) -> None:
    """Remove the sockets of processes that were killed: the kubelet connects to all it finds.

    Raises:
        UsageError: there is no such directory.
    """
    for name in list_directory(directory, option):
        path = os.path.join(directory, name)
        is_ours = name.startswith(prefix) and name.endswith(".sock")
        if (is_ours or name.startswith(HIDDEN)) and not is_served(path):
            with suppress(FileNotFoundError):
                os.unlink(path)


def list_directory(directory: str, option: str) -> list[str]:
    """The names in a directory of the kubelet.

    Raises:
        UsageError: there is no such directory.
    """
    try:
        return os.listdir(directory)
    except OSError as error:
        message = f"cannot use the kubelet's directory {directory}: {error.strerror}"
        raise UsageError(message, f"start the kubelet first, or pass {option}") from None


def refuse_served(path: str) -> None:
    """Require that no process listens on a socket.

    Raises:
        Refusal: one does.
    """
    if is_served(path):
        message = f"another process serves {path}"
        raise Refusal(message, "stop that process first; find it with fuser")


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
