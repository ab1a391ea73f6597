"""Unix sockets of this process and of others, as their paths show them."""

from __future__ import annotations

import os
import socket

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
