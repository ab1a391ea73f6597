"""Whether this process can change the host at all."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from vfiomgr.errors import HostError, NeedsRoot, UsageError
from vfiomgr.paths import PCI_DRIVERS_PROBE

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree


def require_file_rights(tree: HostTree) -> None:
    """Make sure that this process can change the configuration of the host; any tree has files.

    Raises:
        NeedsRoot: this user has no right to.

    """
    if tree.is_machine and os.geteuid() != 0:
        message = "changing files of the host's configuration"
        raise NeedsRoot(message)


def without_kernel(tree: HostTree) -> str:
    """Why devices cannot be changed in a tree that is not live."""
    return f"{tree.root} is no running host: no kernel acts on what is written there"


def require_rights(tree: HostTree) -> None:
    """Make sure that this process can change the host at all.

    Raises:
        UsageError: the tree is a recording.
        HostError: sysfs is mounted read-only.
        NeedsRoot: this user has no right to.

    """
    if not tree.is_live:
        raise UsageError(without_kernel(tree), "pass --dry-run to see the plan")
    if os.access(tree.locate(PCI_DRIVERS_PROBE), os.W_OK):
        return
    if os.geteuid() != 0:
        raise NeedsRoot
    message = "the kernel's device files cannot be written: /sys is read-only here"
    raise HostError(message, "run vfiomgr on the host, or in a privileged container")
