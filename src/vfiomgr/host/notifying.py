"""What systemd learns of a service: its readiness, and that it is alive (sd_notify(3))."""

from __future__ import annotations

import os
import socket
from contextlib import suppress

_SOCKET = "NOTIFY_SOCKET"
_WATCHDOG = "WATCHDOG_USEC"
_WATCHED = "WATCHDOG_PID"


def notify(state: str) -> None:
    """Send a state such as `READY=1`; no effect if systemd does not wait for one.

    It is dropped if systemd does not read: the service must not wait for it.
    """
    name = os.environ.get(_SOCKET, "")
    if not name.startswith(("/", "@")):
        return
    address = f"\0{name[1:]}" if name.startswith("@") else name
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)  # noqa: FBT003 - sockets have it so
        sender.sendto(state.encode(), address)


def watchdog_seconds() -> float | None:
    """How often systemd expects `WATCHDOG=1`; None if it does not watch this process."""
    text = os.environ.get(_WATCHDOG, "")
    if not text.isdecimal() or os.environ.get(_WATCHED, str(os.getpid())) != str(os.getpid()):
        return None
    return int(text) / 1_000_000 or None
