"""Directories whose changes wake the agent: a kubelet that starts creates its sockets again."""

from __future__ import annotations

import asyncio
import ctypes
import os
import struct
import time
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

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
