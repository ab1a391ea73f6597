"""Shared by actions: writes with explained errors, and verification of the target device."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from vfiomgr.engine.errno_hints import explained
from vfiomgr.errors import HostError, WriteFailed
from vfiomgr.pci import facts as pci_facts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vfiomgr.engine.errno_hints import Operation
    from vfiomgr.host.tree import HostTree
    from vfiomgr.pci.model import DeviceIdentity

_POLL = 0.05


@contextmanager
def explaining(operation: Operation, subject: str) -> Iterator[None]:
    """Add cause and remedy to the error of a write."""
    try:
        yield
    except WriteFailed as error:
        raise explained(error, operation, subject) from error


def require_runnable(tree: HostTree, program: str) -> None:
    """Require that programs of the host can be run.

    Raises:
        HostError: the tree is not the machine that vfiomgr runs on.

    """
    if not tree.runs_programs:
        message = f"cannot run {program}: {tree.root} is not this machine"
        raise HostError(message, "run vfiomgr on that host")


def require_same_device(tree: HostTree, expected: DeviceIdentity) -> None:
    """Require that the device of a step still is at its address.

    Raises:
        HostError: it is gone or was replaced.

    """
    found = pci_facts.read_identity(tree, expected.address, with_serial=expected.serial is not None)
    if found is None:
        message = f"{expected} is gone"
        raise HostError(
            message, "it was unplugged or powered off; list the present devices: vfiomgr list --all"
        )
    if not found.is_same_as(expected):
        message = f"another device is at this address: {found} instead of {expected}"
        raise HostError(message, "check it with vfiomgr show, then run the command again")


def becomes_true(condition: Callable[[], bool], limit: float) -> bool:
    """Wait up to `limit` seconds for a condition."""
    deadline = time.monotonic() + limit
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL)
    return True
