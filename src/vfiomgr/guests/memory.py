"""What a guest needs for its devices: memory that QEMU locks, and a window for large BARs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from msgspec.structs import replace

from vfiomgr.diagnostic import blocker, refusal, refuse
from vfiomgr.guests.model import GuestDevice, GuestRequest, MmioWindow, Reason
from vfiomgr.pci.memory import (
    DEFAULT_WINDOW,
    TCG_BITS,
    NoRoom,
    bar_window,
    fitting_window,
    large_bytes,
    memory_end,
)
from vfiomgr.units import GIB, MIB, size

if TYPE_CHECKING:
    from vfiomgr.snapshot.model import HostSnapshot

    _Request = TypeVar("_Request", bound=GuestRequest)


RESERVE = GIB
"""For mapped BARs and for QEMU itself, as libvirt adds (qemuDomainGetMemLockLimitBytes)."""


def needed_lock(memory_bytes: int, devices: int, *, has_viommu: bool, own_mappings: int = 0) -> int:
    """Bytes that QEMU locks for VFIO `devices`, and for NVMe disks and vDPA (`own_mappings`).

    Devices share one mapping of the guest's memory, but have one each behind a virtual IOMMU; NVMe
    disks and vDPA interfaces always have one each.
    """
    times = (devices if has_viommu else min(devices, 1)) + own_mappings
    return memory_bytes * times + RESERVE if times else 0


_OVMF_BITS = 46
"""The address limit of OVMF (PlatformAddressWidthFromCpuid in PlatformInitLib)."""
_OVMF_SHARE = 3
"""Its window is an eighth of the addresses, at their end (PlatformDynamicMmioWindow)."""
_TRUSTED_BITS = 41
"""From this width on OVMF trusts the CPU; below, it uses its knowledge of the vendor's CPUs."""
_TRUSTED = {"GenuineIntel": (36, 39), "AuthenticAMD": (40,)}


def plan_mmio_window(
    host: HostSnapshot,
    request: GuestRequest,
    units: Sequence[GuestDevice],
    emulated: int = 0,
) -> tuple[MmioWindow, tuple[Reason, ...], tuple[str, ...]]:
    """How the guest gets a window for the BARs of its devices, with reasons and notes.

    Raises:
        Refusal: the guest's addresses are too narrow.
    """
    window = bar_window([unit.functions for unit in units], emulated)
    bits = guest_bits(host, request)
    reasons, notes = [], []
    if window and bits is None:
        notes.append("cannot check whether the BARs fit: the address width of the CPU is unknown")
    told = _why_window(units, window)
    is_efi = request.firmware == "efi"
    vendor = "AuthenticAMD" if request.kind == "qemu" else host.kernel.cpu_vendor
    own = ovmf_window(bits, vendor) if is_efi else DEFAULT_WINDOW
    whose = "OVMF" if is_efi else "q35"
    written = None
    _check_space(host, request, bits)
    if request.has_fixed_aperture or window > own:
        reach = min(bits, _OVMF_BITS) if bits is not None and is_efi else bits
        written = _fitting(host, request, max(window, DEFAULT_WINDOW), reach, told)
        text = f"{told}; the default of {whose} is {size(own)}"
        reasons.append(Reason("fw_cfg" if is_efi else "hole", text))
    elif window:
        reasons.append(
            Reason("firmware", f"{told}; the default of {whose}, {size(own)}, is large enough")
        )
    planned = MmioWindow(
        address_bits=bits,
        hole_bytes=None if is_efi else written,
        firmware_mib=written // MIB if written is not None and is_efi else None,
    )
    return planned, tuple(reasons), tuple(notes)


def guest_bits(host: HostSnapshot, request: GuestRequest) -> int | None:
    """The width of the guest's addresses; None if that of the host's CPU is unknown."""
    own = TCG_BITS if request.kind == "qemu" else host.kernel.cpu_address_bits
    known = [bits for bits in (own, request.address_bits) if bits is not None]
    return min(known, default=None)


def within_iommu(host: HostSnapshot, request: _Request, units: Sequence[GuestDevice]) -> _Request:
    """The request, with addresses that the host's IOMMU translates, if devices use it.

    OVMF places BARs at the end of the guest's addresses, and VFIO maps them (EINVAL beyond the
    IOMMU's width). Which unit a device is behind is unknown, so the narrowest counts.
    """
    widths = {} if host.readiness is None else host.readiness.iommu_widths
    own, width = host.kernel.cpu_address_bits, min(widths.values(), default=None)
    is_open = request.address_bits is None and request.kind == "kvm"
    if not is_open or own is None or width is None or own <= width:
        return request
    is_mapped = any(unit.is_seen and unit.functions for unit in units)
    return replace(request, address_bits=width) if is_mapped else request


def ovmf_window(bits: int | None, vendor: str | None) -> int:
    """The 64-bit window that OVMF (2022.11 and later) uses by default in a guest of that width."""
    if bits is None:
        return DEFAULT_WINDOW
    if bits < _TRUSTED_BITS and bits not in _TRUSTED.get(vendor or "", ()):
        return DEFAULT_WINDOW
    return max(DEFAULT_WINDOW, 1 << (min(bits, _OVMF_BITS) - _OVMF_SHARE))


def _end_of_memory(host: HostSnapshot, request: GuestRequest, window: int) -> int:
    """The end of memory in a guest with such a window; with OVMF it is not QEMU's window."""
    is_amd = request.kind == "kvm" and host.kernel.cpu_vendor == "AuthenticAMD"
    hole = window if request.firmware == "bios" else DEFAULT_WINDOW
    return memory_end(request.memory_bytes, hole, is_amd=is_amd)


def _check_space(host: HostSnapshot, request: GuestRequest, bits: int | None) -> None:
    """Refuse what QEMU 7.1 and later would: its own window has no place (pc_memory_init)."""
    end = _end_of_memory(host, request, DEFAULT_WINDOW) + DEFAULT_WINDOW
    if bits is not None and end > 1 << bits:
        message = (
            f"{size(request.memory_bytes)} of memory and q35's window of {size(DEFAULT_WINDOW)} "
            f"end at {size(end)}, but the guest has only {bits} address bits ({size(1 << bits)})"
        )
        remedy = (
            "pass less --memory, or use KVM" if request.kind == "qemu" else "pass less --memory"
        )
        refuse("address-space-too-small", request.name, message, remedy)


def _fitting(
    host: HostSnapshot, request: GuestRequest, window: int, bits: int | None, told: str
) -> int:
    """The window to write."""
    try:
        return fitting_window(window, bits, lambda each: _end_of_memory(host, request, each))
    except NoRoom as none:
        message = (
            f"{told}, above {size(request.memory_bytes)} of memory up to {size(none.end)}, but "
            f"the guest has only {bits} address bits ({size(1 << (bits or 0))})"
        )
        remedy = "assign fewer of these devices, or pass less --memory"
        remedy += ", or use KVM" if request.kind == "qemu" else ""
        raise refusal([blocker("aperture-too-small", request.name, message, remedy)]) from None


def _why_window(units: Sequence[GuestDevice], window: int) -> str:
    shares = ((unit.name, large_bytes(unit.functions)) for unit in units)
    bars = ", ".join(f"{name} {size(share)}" for name, share in shares if share)
    if not window:
        return "no device has a 64-bit prefetchable BAR"
    return f"64-bit prefetchable BARs ({bars}; resource in sysfs) need a window of {size(window)}"
