"""Whether this process may change devices, and why a reset failed."""

from __future__ import annotations

import os
from errno import EACCES, EPERM, EROFS
from typing import TYPE_CHECKING

from vfiomgr.errors import NeedsRoot, UsageError, WriteFailed
from vfiomgr.paths import PCI_DEVICES

if TYPE_CHECKING:
    from vfiomgr.errors import VfiomgrError
    from vfiomgr.host.tree import HostTree

_FORBIDDEN = frozenset({EACCES, EPERM, EROFS})


def may_reset(tree: HostTree) -> bool:
    """Whether attributes of devices can be written: in a pod, /sys is read-only."""
    return tree.is_live and os.access(tree.locate(PCI_DEVICES), os.W_OK)


def is_of_device(error: VfiomgrError) -> bool:
    """Whether a reset failed because of the device, not because this process may not write."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, NeedsRoot | UsageError):
            return False
        if isinstance(cause, OSError | WriteFailed) and cause.errno in _FORBIDDEN:
            return False
        cause = cause.__cause__
    return True
