"""Who may open the nodes of a function: its group's and its own."""

from __future__ import annotations

import warnings
from errno import EACCES, EBUSY, EDQUOT, ENOSPC, EPERM, EROFS
from functools import partial
from typing import TYPE_CHECKING

from vfiomgr import paths
from vfiomgr.engine.registry import performs
from vfiomgr.errors import HostError
from vfiomgr.host import udev
from vfiomgr.paths import HostPath
from vfiomgr.persistence import installed_layout
from vfiomgr.persistence.facts import has_systemd
from vfiomgr.persistence.model import RULES, UNIT, UNITS
from vfiomgr.persistence.steps import RebuildInitramfs, ReplaceFile, SetNodeAccess

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vfiomgr.host.tree import HostTree

_UNIT_DIRECTORIES = frozenset({UNITS, installed_layout.WANTED.parent})
"""Where systemd finds what acts at the next boot."""


@performs(SetNodeAccess)
def set_node_access(tree: HostTree, step: SetNodeAccess) -> None:
    """Give the nodes that are there to their new owner.

    Raises:
        HostError: a node did not take it.

    """
    for node in _nodes(tree, step):
        if tree.access(node) == step.after:
            continue
        tree.change_access(node, step.after)
        if tree.access(node) not in (step.after, None):
            message = f"{node} belongs to {tree.access(node)}, not to {step.after}, after chown"
            raise HostError(message, "a rule of udev may have given it to somebody else")


def _nodes(tree: HostTree, step: SetNodeAccess) -> Iterator[paths.HostPath]:
    """None of them where the function has gone back to the host."""
    cdevs = paths.pci_device(step.device.address) / "vfio-dev"
    nodes = [paths.VFIO_CDEVS / name for name in tree.children(cdevs)]
    if step.group is not None:
        nodes.append(paths.vfio_group_node(step.group))
    return (node for node in nodes if tree.exists(node))


_PATIENCE = 10.0
"""Seconds for systemd or udevd to take notice."""
_REMEDY = "see dmesg for the file system's words; is it mounted, and writable?"
_ROOM = "make room on its file system, then run the command again"
_LOCKED = "is it immutable (lsattr), or the file system another's? then run the command again"
_REMEDIES = {
    EBUSY: "it is mounted there by itself (findmnt): change the file that it is mounted from",
    ENOSPC: _ROOM,
    EDQUOT: _ROOM,
    EROFS: "its file system is read-only: remount it, or change what it is made from",
    EACCES: _LOCKED,
    EPERM: _LOCKED,
}


@performs(ReplaceFile)
def replace_file(tree: HostTree, step: ReplaceFile) -> None:
    """Put the text after in the place of the text before; any other is somebody else's."""
    target = HostPath(step.path)
    current = tree.read_text(target)
    if current not in (step.before, step.after):
        message = f"{target} was changed meanwhile, and not by this run"
        raise HostError(message, "look at it, then run the command again")
    try:
        if step.after is None:
            tree.remove(target)
        elif current != step.after:
            tree.make_directory(target.parent)
            tree.replace(target, step.after.encode(), step.mode)
    except OSError as error:
        what = "removed" if step.after is None else "written"
        message = f"{target} cannot be {what}: {error.strerror or error}"
        raise HostError(message, _REMEDIES.get(error.errno or 0, _REMEDY)) from error
    if tree.read_text(target) != step.after:
        message = f"{target} does not hold what was written to it"
        raise HostError(message, _REMEDY)
    _tell_readers(tree, target, is_there=step.after is not None)


@performs(RebuildInitramfs)
def rebuild_initramfs(tree: HostTree, step: RebuildInitramfs) -> None:
    """Run the tool that makes the initramfs."""
    if not tree.is_machine:
        message = f"the initramfs of {tree.root} is not made from here"
        raise HostError(message, f"run there: {' '.join(step.command)}")
    tree.call(*step.command, limit=None)  # whoever runs the step has a deadline


def _tell_readers(tree: HostTree, target: HostPath, *, is_there: bool) -> None:
    """Have the file read now. It is in its place either way, so nothing is undone where it is not.

    Udevd notices changes by itself, but up to three seconds later; systemd at the next boot.
    """
    state = "written" if is_there else "removed"
    for tell in _readers(tree, target, is_there=is_there):
        try:
            tell()
        except HostError as error:
            text = f"{target} is {state}, but its reader was not told: {error.message}"
            warnings.warn(f"{text}; {error.hint}", stacklevel=2)


def _readers(tree: HostTree, target: HostPath, *, is_there: bool) -> Iterator[Callable[[], None]]:
    """What tells those who read a file of this machine."""
    if not tree.is_machine:
        return
    if target.parent == RULES:
        yield partial(udev.reload_rules, tree, _PATIENCE)
    elif target == UNIT and has_systemd(tree):
        systemctl = partial(tree.call, "systemctl", limit=_PATIENCE)
        if not is_there:
            yield partial(systemctl, "--no-block", "stop", UNIT.name)
        yield partial(systemctl, "daemon-reload")
        if is_there:
            yield partial(systemctl, "--no-block", "start", UNIT.name)
    elif target.parent in _UNIT_DIRECTORIES and has_systemd(tree):
        systemctl = partial(tree.call, "systemctl", limit=_PATIENCE)
        is_watch = target == installed_layout.WATCH
        if is_watch and not is_there:
            yield partial(systemctl, "--no-block", "stop", target.name)
        yield partial(systemctl, "daemon-reload")  # what they start is for the next boot
        if is_watch and is_there:
            yield partial(systemctl, "--no-block", "try-restart", target.name)
