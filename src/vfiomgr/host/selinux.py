"""SELinux on a host: whether it denies accesses, its booleans, and the types of files.

The policy gives libvirt's hooks a type of their own, and since 2024 has a boolean for them
(fedora-selinux/selinux-policy, policy/modules/contrib/virt.te and virt.fc, pull request 2195).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from vfiomgr.paths import HostPath

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree

HOOK_TYPE = "virt_hook_t"
"""The type of everything below /etc/libvirt/hooks."""
HOOKS_BOOLEAN = "virt_hooks_unconfined"
"""Lets hooks run, in a domain that may do everything; off by default."""

_MOUNT = HostPath("/sys/fs/selinux")
_ENFORCE = _MOUNT / "enforce"
_ATTRIBUTE = "security.selinux"


def is_enabled(tree: HostTree) -> bool:
    """Whether files have labels, enforced or not."""
    return tree.exists(_ENFORCE)


def is_enforcing(tree: HostTree) -> bool:
    """Whether accesses are denied, not only logged."""
    return tree.read(_ENFORCE) == "1"


def boolean_file(name: str) -> HostPath:
    """The file of a boolean; absent if the policy does not have it."""
    return _MOUNT / "booleans" / name


def boolean(tree: HostTree, name: str) -> bool | None:
    """The current value of a boolean, the first number in its file; None if it is not readable."""
    current = (tree.read(boolean_file(name)) or "").partition(" ")[0]
    return {"0": False, "1": True}.get(current)


def type_of(tree: HostTree, path: HostPath) -> str | None:
    """The type in the label USER:ROLE:TYPE[:RANGE] of a file; None if it is not readable."""
    try:
        label = os.getxattr(tree.locate(path), _ATTRIBUTE, follow_symlinks=False)
    except (OSError, ValueError):
        return None
    parts = label.rstrip(b"\0").decode(errors="replace").split(":", 3)
    return parts[2] if len(parts) > 2 else None  # noqa: PLR2004 - the third part
