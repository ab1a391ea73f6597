"""Room for large BARs: the width of the guest's addresses and its 64-bit window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vfiomgr.errors import Refusal
from vfiomgr.model.guest import GIB, MIB, Reason
from vfiomgr.model.libvirt_feature import MAXPHYSADDR
from vfiomgr.planner.guest.nodes import size

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vfiomgr.model.guest import DomainWish
    from vfiomgr.model.libvirt_feature import Version
    from vfiomgr.model.snapshot import HostSnapshot
    from vfiomgr.planner.guest.units import Unit

TCG_BITS = 40
"""Of a CPU that QEMU itself emulates (TCG_PHYS_ADDR_BITS in target/i386/cpu.h)."""
DEFAULT_WINDOW = 32 * GIB
"""Of q35 (pci-hole64-size), and of OVMF where it does not trust the width (PcdPciMmio64Size)."""
_OVMF_BITS = 46
"""As far as OVMF goes (PlatformAddressWidthFromCpuid in OvmfPkg/Library/PlatformInitLib)."""
_OVMF_SHARE = 3
"""Its window is an eighth of the addresses, at their end (PlatformDynamicMmioWindow)."""
_TRUSTED_BITS = 41
"""From here on it takes a width for true; below, what it knows of the vendor's CPUs."""
_TRUSTED = {"GenuineIntel": (36, 39), "AuthenticAMD": (40,)}
_BELOW_4G = 2 * GIB
"""Of the guest's memory: what does not fit lies above 4 GiB (pc_q35_init in hw/i386/pc_q35.c)."""


@dataclass(frozen=True, slots=True)
class Aperture:
    """What of it has to be written."""

    passes_address_bits: bool
    hole64_kib: int | None
    fw_cfg_mib: int | None
    reasons: tuple[Reason, ...]
    notes: tuple[str, ...]


def bar_window(units: Iterable[Unit]) -> int:
    """The 64-bit window that the units need, each behind a bridge, in whole GiB.

    64-bit prefetchable BARs alone go there. A virtual function has its share of the BARs of its
    physical one as its own; what that one has for its functions, QEMU shows to no guest, and a
    resizable BAR goes as large as it is now (vfio_add_ext_cap in hw/vfio/pci.c).
    """
    end = 0
    for sizes in sorted(map(_large, units), key=_largest, reverse=True):
        end = _aligned(end, _largest(sizes) or 1) + sum(sizes)
    return _aligned(end, GIB)


def _largest(sizes: Sequence[int]) -> int:
    """The largest, which all of a unit are aligned to."""
    return max(sizes, default=0)


def _large(unit: Unit) -> tuple[int, ...]:
    return tuple(
        bar.size
        for function in unit.functions
        for bar in function.bars
        if bar.is_memory and bar.is_64bit and bar.is_prefetchable
    )


def _aligned(number: int, to: int) -> int:
    """Upward."""
    return -(-number // to) * to


def _power_of_two(number: int) -> int:
    """The next one up."""
    return 1 << (number - 1).bit_length()


def plan_aperture(
    host: HostSnapshot, wish: DomainWish, units: Sequence[Unit], libvirt: Version
) -> Aperture:
    """How the guest gets a window for its devices' BARs.

    Raises:
        Refusal: its addresses are too narrow for it.

    """
    window = bar_window(units)
    bits = TCG_BITS if wish.kind == "qemu" else host.cpu_address_bits
    passes = wish.kind == "kvm" and bool(units) and MAXPHYSADDR.is_in(libvirt)
    reasons = list(_why_bits(host, wish, passes=passes, is_asked=bool(units), libvirt=libvirt))
    notes = []
    if window and bits is None:
        notes.append("whether the CPU's addresses suffice for the BARs: it does not tell its width")
    told = _why_window(units, window)
    is_efi = wish.firmware == "efi"
    vendor = "AuthenticAMD" if wish.kind == "qemu" else host.cpu_vendor
    own = ovmf_window(bits, vendor) if is_efi else DEFAULT_WINDOW
    whose = "OVMF" if is_efi else "q35"
    written = None
    if wish.has_fixed_aperture or window > own:
        reach = min(bits, _OVMF_BITS) if bits is not None and is_efi else bits
        written = _fitting(wish, max(window, DEFAULT_WINDOW), reach, told)
        text = f"{told}; by itself {whose} would take {size(own)}"
        reasons.append(Reason("fw_cfg" if is_efi else "hole", text))
    elif window:
        reasons.append(Reason("firmware", f"{told}; {whose}'s own, of {size(own)}, has room"))
    return Aperture(
        passes_address_bits=passes,
        hole64_kib=written >> 10 if written is not None and not is_efi else None,
        fw_cfg_mib=written // MIB if written is not None and is_efi else None,
        reasons=tuple(reasons),
        notes=tuple(notes),
    )


def ovmf_window(bits: int | None, vendor: str | None) -> int:
    """The 64-bit window that OVMF (from 2022.11 on) takes by itself in a guest of that width."""
    if bits is None:
        return DEFAULT_WINDOW
    if bits < _TRUSTED_BITS and bits not in _TRUSTED.get(vendor or "", ()):
        return DEFAULT_WINDOW
    return max(DEFAULT_WINDOW, 1 << (min(bits, _OVMF_BITS) - _OVMF_SHARE))


def _fitting(wish: DomainWish, window: int, bits: int | None, told: str) -> int:
    """The window to write: a power of two where there is room for one, else what is needed.

    Raises:
        Refusal: the addresses above the memory are too few.

    """
    sizes = (_power_of_two(window), window)
    top = 4 * GIB + max(0, wish.memory_bytes - _BELOW_4G)
    ends = [_aligned(top, 1 << (each.bit_length() - 1)) + each for each in sizes]
    if bits is None or ends[0] <= 1 << bits:
        return sizes[0]
    if ends[1] <= 1 << bits:
        return sizes[1]
    message = (
        f"{told}, above {size(wish.memory_bytes)} of memory up to {size(ends[1])}: the guest's "
        f"addresses have {bits} bits ({size(1 << bits)})"
    )
    remedy = "give it fewer of these devices, or less --memory"
    raise Refusal(message, f"{remedy}, or use KVM" if wish.kind == "qemu" else remedy)


def _why_window(units: Sequence[Unit], window: int) -> str:
    bars = ", ".join(f"{unit.name} {size(sum(_large(unit)))}" for unit in units if _large(unit))
    if not window:
        return "no device has a 64-bit prefetchable BAR"
    return f"64-bit prefetchable BARs ({bars}; resource in sysfs) need a window of {size(window)}"


def _why_bits(
    host: HostSnapshot, wish: DomainWish, *, passes: bool, is_asked: bool, libvirt: Version
) -> Iterable[Reason]:
    bits = host.cpu_address_bits
    width = f"{bits} bits (/proc/cpuinfo)" if bits else "as wide as it is"
    if passes:
        yield Reason("maxphysaddr", f"physical addresses like the host's CPU: {width}")
    elif is_asked and wish.kind == "kvm":
        since = f"<maxphysaddr> is for libvirt {MAXPHYSADDR.since}, this is {libvirt}"
        yield Reason("cpu", f"the host's CPU, with its width of addresses: {width}; {since}")
    elif is_asked:
        yield Reason("cpu", f"without KVM physical addresses have {TCG_BITS} bits")
