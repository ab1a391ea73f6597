"""Resizable BARs: `resourceN_resize` of functions that have one (drivers/pci/pci-sysfs.c).

__resource_resize_store answers EBUSY while a driver or virtual functions are there, and removes
the firmware's framebuffer from a VGA function (aperture_remove_conflicting_pci_devices). It then
releases all BARs of the same window. pci_resize_resource answers 524 (ENOTSUPP) where the
firmware's assignment is preserved, EINVAL for a size that is not offered, ENOENT where the window
of the bridge has something else in it, and ENOSPC where it cannot grow as needed. After a failure
the BARs are as before; after a success they are assigned anew.
"""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from tests.fakes.sysfs import READ_ONLY, Sysfs, reject, unsigned
from vfiomgr.pci.model import PciAddress

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.fakes.drivers import Drivers
    from tests.fakes.functions import Functions
    from tests.fakes.reactions import Store
    from vfiomgr.paths import HostPath

ENOTSUPP = 524
"""include/linux/errno.h; user space has no name for it."""
_LARGE = 0x14220C
"""IORESOURCE_MEM_64 | IORESOURCE_SIZEALIGN | IORESOURCE_PREFETCH | IORESOURCE_MEM, and the bits of
the register."""
_MIB = 1 << 20
_WINDOW = 1 << 44
_VGA = "0300"
_IOMEM = "/proc/iomem"
_OF_FIRMWARE = re.compile(
    r"^ *([0-9a-f]+)-([0-9a-f]+) : (?:BOOTFB|efifb|simpledrm)\n?", re.MULTILINE
)


@dataclass(frozen=True)
class FakeBar:
    """A 64-bit prefetchable BAR, and the sizes in MiB that it offers; none if it has one size."""

    index: int
    mib: int
    offered: tuple[int, ...] = ()


class Bars:
    """The BARs of functions whose sizes can be changed; `resource` is their memory."""

    def __init__(self, sysfs: Sysfs, functions: Functions, drivers: Drivers) -> None:
        self._sysfs = sysfs
        self._functions = functions
        self._drivers = drivers
        self.room: dict[str, int] = {}
        """The MiB that the bridges above a function can have at most."""
        self.pinned: set[str] = set()
        """Functions whose window also has something else in it, e.g. a BAR of a switch."""
        self.is_preserved = False
        """Whether the firmware forbids another assignment (_DSM 5 of the host bridge)."""

    def stores(self) -> dict[str, Store]:
        """What acts on a write, by attribute."""
        return {f"resource{index}_resize": partial(self._resize, index) for index in range(6)}

    def add(self, address: str, bars: Iterable[FakeBar]) -> None:
        """Give a function such BARs."""
        directory = self._functions.directory(address)
        assert directory is not None
        for bar in bars:
            if bar.offered:
                mask = sum(size for size in bar.offered)  # of sizes that are powers of two
                self._sysfs.put(directory / f"resource{bar.index}_resize", f"{mask:016x}")
            self.show(directory, {**self._sizes(directory), bar.index: bar.mib})

    def _resize(self, index: int, directory: HostPath, text: str) -> None:
        order = unsigned(text)
        virtual = self._sysfs.get(directory / "sriov_numvfs") or "0"
        if self._drivers.driver_of(directory.name) or virtual != "0":
            reject(errno.EBUSY)
        if self._functions.known[directory.name].class_code.startswith(_VGA):
            self._evict(directory)
        if self.is_preserved:
            reject(ENOTSUPP)
        offered = int(self._sysfs.get(directory / f"resource{index}_resize"), 16)
        if not offered >> order & 1:
            reject(errno.EINVAL)
        if directory.name in self.pinned:
            reject(errno.ENOENT)
        sizes = {**self._sizes(directory), index: 1 << order}
        if sum(sizes.values()) > self.room.get(directory.name, 1 << 20):
            reject(errno.ENOSPC)
        self.show(directory, sizes)

    def _lines(self, directory: HostPath) -> list[str]:
        return self._sysfs.get(directory / "resource").splitlines()

    def _ranges(self, directory: HostPath) -> dict[int, tuple[int, int]]:
        """The first and last address of each large BAR."""
        fields = [[int(field, 16) for field in line.split()] for line in self._lines(directory)]
        return {i: (start, end) for i, (start, end, flags) in enumerate(fields) if flags == _LARGE}

    def _sizes(self, directory: HostPath) -> dict[int, int]:
        ranges = self._ranges(directory).items()
        return {index: (end - start + 1) // _MIB for index, (start, end) in ranges}

    def show(self, directory: HostPath, sizes: dict[int, int]) -> None:
        """Assign addresses, the largest first, so that each BAR is aligned to its size."""
        lines = self._lines(directory)
        start = _WINDOW + (PciAddress.parse(directory.name).routing_id << 44)
        for index, size in sorted(sizes.items(), key=lambda pair: -pair[1]):
            end = start + size * _MIB - 1
            lines[index] = f"0x{start:016x} 0x{end:016x} 0x{_LARGE:016x}"
            start = end + 1
        self._sysfs.put(directory / "resource", "\n".join(lines), READ_ONLY)

    def _evict(self, directory: HostPath) -> None:
        """Remove the firmware's framebuffer from the BARs of a function."""
        ranges = self._ranges(directory).values()

        def without(found: re.Match[str]) -> str:
            first, last = int(found[1], 16), int(found[2], 16)
            is_here = any(start <= first and last <= end for start, end in ranges)
            return "" if is_here else found[0]

        self._sysfs.put(_IOMEM, _OF_FIRMWARE.sub(without, self._sysfs.get(_IOMEM)))
