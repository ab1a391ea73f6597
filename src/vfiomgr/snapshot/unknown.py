"""What could name the users of devices, and could not be read."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Literal

from vfiomgr.pci.model import PciAddress
from vfiomgr.value import Value


class UnknownUsers(Value):
    """Users that devices may have, since what would name them could not be read."""

    kind: Literal["pods", "processes", "disks", "network", "persistence-mode"]
    """`pods` of what guests can open; `processes` with nodes of host drivers; uses of `disks` and
    of the `network`; NVIDIA's persistence mode."""
    why: str
    """`cannot ask the node agent on /run/vfiomgr/node.sock: timed out`."""
    lift: str
    """What would make it readable."""
    functions: tuple[PciAddress, ...] = ()
    """The functions that it is about, besides all that guests can open (pods), that have nodes
    (processes) or that are network adapters."""


Report = Callable[[UnknownUsers], None]
"""Receives what a reader could not read."""


def warn(unknown: UnknownUsers) -> None:
    """Report it where nothing depends on it: in lists."""
    warnings.warn(unknown.why, stacklevel=3)
