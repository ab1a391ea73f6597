"""What a change needs first: rights, and locks in /run/vfiomgr, which exclude other writers."""

from __future__ import annotations

import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from errno import EISDIR, ELOOP, ENODEV, ENXIO
from typing import TYPE_CHECKING

from vfiomgr.errors import HostError, NeedsRoot, StuckInKernel, UsageError
from vfiomgr.paths import PCI_DRIVERS_PROBE, RUNTIME

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree
    from vfiomgr.pci.model import PciDevice


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


_LOCKS = RUNTIME / "locks"
DEADLINE = 300.0
"""Seconds to wait for another writer."""
_POLL = 0.1
_IN_THE_WAY = frozenset({EISDIR, ELOOP, ENODEV, ENXIO})
"""The answers of open() for a directory, a link, and a socket or a device without driver."""


@contextmanager
def hold(
    tree: HostTree, names: Iterable[str], on_wait: Callable[[str], None], *, wait: bool = True
) -> Iterator[None]:
    """Hold the named locks; they are taken in a fixed order, so that two plans never deadlock.

    `on_wait` is called once per lock that another process holds. A caller that already holds locks
    must not `wait` for others.

    Raises:
        HostError: another process kept a lock longer than the deadline, or holds it.
    """
    with ExitStack() as stack:
        for name in sorted(set(names)):
            stack.enter_context(_held(tree, name, on_wait, DEADLINE if wait else 0))
        yield


@contextmanager
def _held(
    tree: HostTree, name: str, on_wait: Callable[[str], None], patience: float
) -> Iterator[None]:
    descriptor = open_lock(tree, name)
    try:
        _acquire(descriptor, name, on_wait, patience)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    except StuckInKernel as error:
        _leave(descriptor, name, error)
        raise
    finally:
        os.close(descriptor)


def open_lock(tree: HostTree, name: str) -> int:
    """The file of a lock.

    Raises:
        HostError: something else exists at its path.
    """
    tree.make_directory(_LOCKS)
    try:
        descriptor = tree.open(_LOCKS / name, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK)
    except OSError as error:
        if error.errno not in _IN_THE_WAY:
            raise
        raise _not_a_lock(name) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _not_a_lock(name)
    return descriptor


def is_held(tree: HostTree, name: str) -> bool:
    """Whether somebody holds a lock."""
    descriptor = open_lock(tree, name)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def is_lock(tree: HostTree, name: str, descriptor: int) -> bool:
    """Whether an open file is still the file of a lock, which may have been removed and created."""
    opened = os.fstat(descriptor)
    try:
        found = os.stat(tree.locate(_LOCKS / name), follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(opened, found)


def _not_a_lock(name: str) -> HostError:
    message = f"cannot lock {_LOCKS / name}: not a regular file"
    return HostError(message, f"move it away: mv {_LOCKS / name} /root/")


def _leave(descriptor: int, name: str, error: StuckInKernel) -> None:
    """Leave the lock of a stuck device to the child that is stuck in it, and no other lock.

    A child that was forked in the meantime has the same open file, so closing it here is no
    release.
    """
    if name in error.locks:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(error.pid).encode(), 0)
    else:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def _acquire(descriptor: int, name: str, on_wait: Callable[[str], None], patience: float) -> None:
    deadline = time.monotonic() + patience
    told = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace") or "?"
            if time.monotonic() > deadline:
                message = f"{name} is being changed by vfiomgr with PID {holder}"
                raise HostError(message, "wait until that process has finished") from None
            if not told:
                on_wait(f"waiting for PID {holder}, which is changing {name}")
                told = True
            time.sleep(_POLL)
        else:
            return


def device_lock(device: PciDevice) -> str:
    """The lock of its IOMMU group; without a group, its own."""
    if device.iommu_group is None:
        return f"device-{device.address}"
    return f"group-{device.iommu_group}"
