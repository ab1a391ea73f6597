"""Sockets of this process and of others, and the connections of a server.

A limit of connections leaves descriptors for everything else in the process.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

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
        self._open[transport] = _peer(transport), is_idle
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


def _peer(transport: asyncio.WriteTransport) -> str:
    """The address of a client; all clients of a Unix socket count as one."""
    name = transport.get_extra_info("peername")
    return str(name[0]) if isinstance(name, tuple) else ""
