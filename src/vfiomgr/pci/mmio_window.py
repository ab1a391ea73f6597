"""The 64-bit window that large BARs need, and where it fits into the addresses of a guest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.units import GIB, MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from vfiomgr.pci.model import PciDevice


TCG_BITS = 40
"""Of a CPU that QEMU itself emulates (TCG_PHYS_ADDR_BITS in target/i386/cpu.h)."""
DEFAULT_WINDOW = 32 * GIB
"""Of q35 (pci-hole64-size), and of OVMF where it does not trust the width (PcdPciMmio64Size)."""
_BELOW_4G = {True: 2 * GIB, False: 3 * GIB}
"""Of the memory, where there is so much, on q35 and on i440fx (pc_q35_init, pc_init1)."""
_FITS_BELOW_4G = {True: 0xB0000000, False: 0xE0000000}
_AMD_RESERVED = 0xFD_0000_0000
"""AMD_HT_START (hw/i386/pc.c): memory whose window would reach it is moved to 1 TiB."""
_TIB = 1 << 40
_OF_EMULATED = MIB
"""Of the window for an emulated device: virtio's BAR 4 in the least that a port passes on."""


def bar_window(slots: Iterable[Sequence[PciDevice]], emulated: int = 0) -> int:
    """The 64-bit window for the functions of each slot behind a bridge, in whole GiB.

    64-bit prefetchable BARs alone go there. A virtual function has its share of the BARs of its
    physical one as its own; what that one has for its functions, QEMU shows to no guest, and a
    resizable BAR goes as large as it is now (vfio_add_ext_cap in hw/vfio/pci.c). So many emulated
    devices behind ports take some of it too, where the host's devices need one.
    """
    end = 0
    for sizes in sorted(map(_large, slots), key=_largest, reverse=True):
        end = _aligned(end, _largest(sizes) or 1) + sum(sizes)
    return _aligned(end + emulated * _OF_EMULATED, GIB) if end else 0


def _largest(sizes: Sequence[int]) -> int:
    """The largest, which all of a unit are aligned to."""
    return max(sizes, default=0)


def _large(slot: Iterable[PciDevice]) -> tuple[int, ...]:
    return tuple(
        bar.size
        for function in slot
        for bar in function.bars
        if bar.is_memory and bar.is_64bit and bar.is_prefetchable
    )


def large_bytes(slot: Iterable[PciDevice]) -> int:
    """What the BARs of some functions take of the window, gaps apart."""
    return sum(_large(slot))


def _aligned(number: int, to: int) -> int:
    """Upward."""
    return -(-number // to) * to


def _power_of_two(number: int) -> int:
    """The next one up."""
    return 1 << (number - 1).bit_length()


def memory_end(memory: int, hole: int, *, is_q35: bool = True, is_amd: bool = False) -> int:
    """Where memory ends and the 64-bit hole begins, as QEMU counts (pc_max_used_gpa).

    `is_amd` is of a host's CPU that the guest gets with KVM.
    """
    above = memory - _BELOW_4G[is_q35] if memory >= _FITS_BELOW_4G[is_q35] else 0
    end = _aligned(4 * GIB + above, GIB)
    if is_amd and end + hole >= _AMD_RESERVED:
        return _aligned(_TIB + above, GIB)
    return end


def fitting_window(needed: int, bits: int | None, end_of_memory: Callable[[int], int]) -> int:
    """The window to write: a power of two where there is room for one, else what is needed.

    `end_of_memory` tells where the memory ends before a window of some size.

    Raises:
        NoRoom: the addresses above the memory are too few.

    """
    sizes = (_power_of_two(needed), needed)
    ends = [_aligned(end_of_memory(each), 1 << (each.bit_length() - 1)) + each for each in sizes]
    for each, end in zip(sizes, ends, strict=True):
        if bits is None or end <= 1 << bits:
            return each
    raise NoRoom(ends[-1])


class NoRoom(Exception):  # noqa: N818 - an answer for callers here
    """A window would end beyond the last address."""

    def __init__(self, end: int) -> None:
        super().__init__(end)
        self.end = end
