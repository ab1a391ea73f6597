"""Calls that the kernel has not returned from: marks in /run/vfiomgr/stuck, one per device.

Until it returns, the kernel holds the device's lock: readers of its driver_override or sriov_numvfs
wait too (driver_override_show in drivers/pci/pci-sysfs.c).
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from vfiomgr.documents.parsed import parse_json
from vfiomgr.paths import RUNTIME, HostPath

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree

_MARKS = RUNTIME / "stuck"
_PROC = HostPath("/proc")
_START_TIME = 19
"""Index of starttime after the command name (proc(5), /proc/PID/stat)."""


def mark(tree: HostTree, device: str, pid: int, what: str) -> None:
    """Record that a process waits in the kernel for a device."""
    import json  # noqa: PLC0415 - slow to import, and lists need none

    tree.make_directory(_MARKS)
    record = {"pid": pid, "started": _start_time(tree, pid), "what": what}
    tree.replace(_MARKS / device, json.dumps(record).encode())


def read_marks(tree: HostTree) -> dict[str, str]:
    """What each stuck device is stuck in."""
    names = tree.children(_MARKS)
    if not names:
        return {}

    found: dict[str, str] = {}
    for name in names:
        text = tree.read(_MARKS / name)
        if name.startswith(".") or (text is None and not tree.exists(_MARKS / name)):
            continue  # not in its place yet, or removed meanwhile
        try:
            record = parse_json(text or "")
            if _start_time(tree, record["pid"]) == record["started"] is not None:
                found[name] = f"{record['what']} (PID {record['pid']})"
        except (ValueError, KeyError, TypeError):
            warnings.warn(f"ignoring {_MARKS / name}: not a record of vfiomgr", stacklevel=2)
    return found


def _start_time(tree: HostTree, pid: int) -> str | None:
    """The start time of a process, which distinguishes reused PIDs; None if it ended."""
    _, _, fields = (tree.read(_PROC / str(pid) / "stat") or "").rpartition(")")
    words = fields.split()
    if len(words) <= _START_TIME or words[0] == "Z":
        return None
    return words[_START_TIME]
