"""Lock the kubelet's directory of device plugins; remove the sockets of agents that were killed."""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from contextlib import suppress

from vfiomgr.errors import Refusal, UsageError
from vfiomgr.node.serving import PREFIX

LOCK = "vfiomgr.lock"
_ENDING = 5.0
"""Seconds that another agent, which may be ending, has to release its lock."""
_GLANCE = 0.1


async def locked(directory: str) -> int:
    """Lock the directory against other agents, which would take over each other's resources.

    Raises:
        Refusal: another agent has it.
        UsageError: the directory does not exist.

    """
    try:
        lock = os.open(os.path.join(directory, LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        message = f"cannot use the kubelet's directory {directory}: {error.strerror}"
        raise UsageError(message, "start the kubelet first, or pass --plugin-directory") from None
    end = time.monotonic() + _ENDING
    while True:
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        if time.monotonic() > end:
            os.close(lock)
            message = f"another agent serves the kubelet in {directory}"
            raise Refusal(message, "see vfiomgr node status, and stop it first")
        await asyncio.sleep(_GLANCE)


def remove_old_sockets(directory: str) -> None:
    """Remove the sockets of agents that were killed."""
    for name in os.listdir(directory):
        if name.startswith(PREFIX) and name.endswith(".sock"):
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(directory, name))
