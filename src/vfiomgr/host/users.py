"""Who uses a device: open device nodes by process, and by the unit that the process runs in."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from vfiomgr.host.uses import functions_below
from vfiomgr.model.path import HostPath
from vfiomgr.model.snapshot import DeviceUser

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from vfiomgr.host.tree import HostTree
    from vfiomgr.model.pci import PciAddress

_PROC = HostPath("/proc")
_WATCHED = ("/dev/vfio/", "/dev/dri/", "/dev/accel/", "/dev/snd/", "/dev/nvidia", "/dev/kfd")
_FIRST_NAMESPACE = 0xEFFFFFFC
"""PROC_PID_INIT_INO (include/linux/proc_ns.h)."""
_CLASSES = ("block", "nvme", "scsi_generic")
"""Classes whose nodes rest on functions in more than one way: partitions, LVM, RAID."""


def read_users(tree: HostTree) -> tuple[DeviceUser, ...] | None:
    """Processes that have a watched node open; None where some process cannot be looked into.

    The descriptors of other users' processes can be read by root alone; a recording has none.
    """
    pids = [name for name in tree.children(_PROC) if name.isdecimal()]
    if not pids or not _shows_all(tree):
        return None
    disks = _nodes_of_disks(tree)
    try:
        return tuple(user for pid in pids for user in _users_of_process(tree, pid, disks))
    except PermissionError:
        return None


def _shows_all(tree: HostTree) -> bool:
    """Whether /proc is the host's: in a PID namespace of its own it hides all other processes."""
    try:
        namespace = os.stat(tree.locate(_PROC / "self/ns/pid")).st_ino
    except OSError:
        return True  # a tree of another host, or a simulated one
    return namespace == _FIRST_NAMESPACE


def _nodes_of_disks(tree: HostTree) -> dict[str, tuple[PciAddress, ...]]:
    """Nodes of disks, partitions and volumes, each with the functions that it rests on."""
    found: dict[str, tuple[PciAddress, ...]] = {}
    for kind in _CLASSES:
        directory = HostPath("/sys/class") / kind
        for name in tree.children(directory):
            functions = tuple(functions_below(tree, directory / name))
            if functions:
                found["/dev/" + name.replace("!", "/")] = functions
    return found


def _users_of_process(
    tree: HostTree, pid: str, disks: Mapping[str, tuple[PciAddress, ...]]
) -> Iterator[DeviceUser]:
    directory = _PROC / pid / "fd"
    try:
        names = os.listdir(tree.locate(directory / ""))
    except (FileNotFoundError, ProcessLookupError):
        return  # it ended meanwhile
    targets = {tree.link(directory / name) for name in names}
    nodes = sorted(t for t in targets if t is not None and (t.startswith(_WATCHED) or t in disks))
    if not nodes:
        return
    command = tree.read(_PROC / pid / "comm") or "?"
    unit = _unit(tree.read(_PROC / pid / "cgroup"))
    for node in nodes:
        yield DeviceUser(node, int(pid), command, unit, disks.get(node, ()))


def _unit(cgroups: str | None) -> str | None:
    """The innermost unit of a process; a line is hierarchy:controllers:path (cgroups(7))."""
    for line in (cgroups or "").splitlines():
        path = line.split(":", 2)[-1]
        units = [part for part in path.split("/") if part.endswith((".service", ".scope"))]
        if units:
            return units[-1]
    return None
