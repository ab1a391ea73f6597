"""Whether SELinux lets libvirt's daemon run the hook of vfiomgr."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.host import selinux
from vfiomgr.paths import SCRIPT, HostPath
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree

_SOCKETS = HostPath("/run/libvirt")


class HookSecurity(Value):
    """What an enforcing SELinux needs for the hook."""

    type: str | None
    """The type of the script; None if it is not readable."""
    may_run: bool | None
    """The boolean of the policy; None if it is not readable."""


def read_hook_security(tree: HostTree) -> HookSecurity | None:
    """What SELinux needs for the hook; None where it denies nothing.

    A policy without the boolean has no type for hooks either. libvirtd, if it is not divided into
    virtqemud and others, is unconfined (virtd_t in virt.te); virtproxyd has its socket, too.
    """
    is_divided = tree.exists(_SOCKETS / "virtqemud-sock")
    if not is_divided and tree.exists(_SOCKETS / "libvirt-sock"):
        return None
    known = tree.exists(selinux.boolean_file(selinux.HOOKS_BOOLEAN))
    if not known or not selinux.is_enforcing(tree):
        return None
    return HookSecurity(selinux.type_of(tree, SCRIPT), selinux.boolean(tree, selinux.HOOKS_BOOLEAN))
