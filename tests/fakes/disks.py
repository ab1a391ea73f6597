"""Disks as those who use them have them: mounted in some namespace, or claimed by no table."""

from __future__ import annotations

from typing import TYPE_CHECKING
from zlib import crc32

from vfiomgr.paths import HostPath

if TYPE_CHECKING:
    from tests.fakes.sysfs import Sysfs

_BLOCK = "/sys/class/block"
_MAJOR = 259
"""BLOCK_EXT_MAJOR (include/uapi/linux/major.h)."""
_MINORS = 0xFFFFF
_HOST, _OTHER = "mnt:[4026531841]", "mnt:[4026532{pid:03}]"


def number_of(name: str) -> str:
    """major:minor of a block device, the same whenever it comes."""
    return f"{_MAJOR}:{crc32(name.encode()) & _MINORS}"


class Disks:
    """Who has claimed block devices (bd_prepare_to_claim in block/bdev.c)."""

    def __init__(self, sysfs: Sysfs) -> None:
        self._sysfs = sysfs
        self.claimed: set[str] = set()
        """Names in /sys/class/block."""

    def claim(self, node: str) -> None:
        """Have a device for oneself, as a file system that is mounted has."""
        self.claimed.add(HostPath(node).name)

    def release(self, node: str) -> None:
        """End that, as an unmount does."""
        self.claimed.discard(HostPath(node).name)

    def is_claimed(self, node: str) -> bool:
        """Whether open(2) with O_EXCL answers EBUSY: a claimed partition keeps its disk, too."""
        name = HostPath(node).name
        own = {name, *self._sysfs.names(f"{_BLOCK}/{name}")}
        disk = self._sysfs.target(f"{_BLOCK}/{name}")
        return not self.claimed.isdisjoint(own | ({disk.parent.name} if disk else set()))

    def mount_privately(self, node: str, where: str, *, pid: int, command: str) -> None:
        """Mount in the mount namespace of a process of its own, where PID 1 does not see it."""
        self.claim(node)
        own = f"/proc/{pid}"
        self._sysfs.drop("/proc/1/ns/mnt")
        self._sysfs.link_absolute("/proc/1/ns/mnt", _HOST)
        self._sysfs.link_absolute(f"{own}/ns/mnt", _OTHER.format(pid=pid))
        self._sysfs.link_absolute(f"{own}/root", "/")
        self._sysfs.make(f"{own}/fd")
        self._sysfs.put(f"{own}/comm", command)
        number = number_of(HostPath(node).name)
        row = f"50 40 {number} / {where} rw,relatime - ext4 {node} rw"
        self._sysfs.put(f"{own}/mountinfo", f"40 1 0:30 / / rw shared:1 - overlay none rw\n{row}")

    def end(self, node: str, *, pid: int) -> None:
        """The process ends, and its namespace with it."""
        self.release(node)
        self._sysfs.drop(f"/proc/{pid}")
