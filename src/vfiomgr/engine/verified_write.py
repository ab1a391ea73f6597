"""What the actions share: writes whose errors are explained, and making sure of the target."""

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
    """Make sure that a host's own programs can be run.

    Raises:
        HostError: the tree is not the one that vfiomgr runs on.

    """
    if not tree.runs_programs:
        message = f"{program} of {tree.root} cannot be run from here"
        raise HostError(message, "run vfiomgr on the host itself")


def require_same_device(tree: HostTree, expected: DeviceIdentity) -> None:
    """Make sure that the device of a step is still the one at its address.

    Raises:
        HostError: it is gone, or it is another one.

    """
    found = pci_facts.read_identity(tree, expected.address, with_serial=expected.serial is not None)
    if found is None:
        message = f"{expected} is gone"
        raise HostError(message, "it was unplugged or powered off; vfiomgr list --all")
    if not found.is_same_as(expected):
        message = f"another device is at this address now: {found} instead of {expected}"
        raise HostError(message, "look with vfiomgr show, then run the command again")


def becomes_true(condition: Callable[[], bool], limit: float) -> bool:
    """Wait for a condition, at most `limit` seconds."""
    deadline = time.monotonic() + limit
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL)
    return True
