"""Checks whether this process can change the host."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from vfiomgr.errors import HostError, NeedsRoot, UsageError
from vfiomgr.paths import PCI_DRIVERS_PROBE

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree


def require_file_rights(tree: HostTree) -> None:
    """Require the permission to change the host's configuration files; any tree has files.

    Raises:
        NeedsRoot: this user may not.

    """
    if tree.is_machine and os.geteuid() != 0:
        message = "changing configuration files of the host"
        raise NeedsRoot(message)


def without_kernel(tree: HostTree) -> str:
    """The reason why devices cannot be changed in a tree that is not live."""
    return f"a recorded host cannot be changed: {tree.root}"


def require_rights(tree: HostTree) -> None:
    """Require the permission to change the host.

    Raises:
        UsageError: the tree is a recording.
        HostError: sysfs is mounted read-only.
        NeedsRoot: this user may not.

    """
    if not tree.is_live:
        raise UsageError(without_kernel(tree), "pass --dry-run to see the plan")
    if os.access(tree.locate(PCI_DRIVERS_PROBE), os.W_OK):
        return
    if os.geteuid() != 0:
        raise NeedsRoot
    message = "cannot change devices: /sys is mounted read-only"
    raise HostError(message, "run vfiomgr on the host, or in a privileged container")
