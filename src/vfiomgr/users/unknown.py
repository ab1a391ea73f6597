"""Sources that could name the users of devices, and could not be read."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Literal

from vfiomgr.pci.model import PciAddress
from vfiomgr.value import Value


class UnknownUsers(Value):
    """A source that could name users of devices, and could not be read."""

    kind: Literal["pods", "processes", "open-files", "disks", "network", "persistence-mode"]
    """The users: `pods` with devices for guests, `processes` that may have mapped nodes of host
    drivers, `open-files` that may be any node, uses of `disks` or of the `network`, or NVIDIA's
    persistence mode."""
    why: str
    """`cannot ask the node agent on /run/vfiomgr/node.sock: timed out`."""
    lift: str
    """The remedy: how to make it readable."""
    functions: tuple[PciAddress, ...] = ()
    """The functions concerned, in addition to all that guests can open (pods), that have nodes
    (processes) or that are network adapters (network)."""


Report = Callable[[UnknownUsers], None]
"""Receives each unreadable source."""


def warn(unknown: UnknownUsers) -> None:
    """Report it as a warning, for lists, where no decision depends on it."""
    warnings.warn(unknown.why, stacklevel=3)
