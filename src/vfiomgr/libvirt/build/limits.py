"""What a domain needs for its devices: memory that QEMU locks, and a window for large BARs.

The locked memory limit follows qemuDomainGetMemLockLimitBytes of libvirt. The 64-bit window is
computed here for new domains (`plan_mmio_window`) and for existing ones (libvirt/preflight).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from vfiomgr.diagnostic import blocker, refusal, refuse
from vfiomgr.libvirt.build.model import Reason
from vfiomgr.libvirt.model import LOCKS_PER_DEVICE, MAXPHYSADDR, MAXPHYSADDR_LIMIT
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
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vfiomgr.guests.device import GuestDevice
    from vfiomgr.libvirt.build.model import DomainRequest
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.units import Version


RESERVE = GIB
"""What libvirt adds for mapped BARs and for QEMU itself."""


def needed_lock(memory_bytes: int, devices: int, *, has_viommu: bool, own_mappings: int = 0) -> int:
    """Bytes that QEMU locks for VFIO `devices`, and for NVMe disks and vDPA (`own_mappings`).

    Devices share one mapping of the guest's memory, but have one each behind a virtual IOMMU; NVMe
    disks and vDPA interfaces always have one each.
    """
    times = (devices if has_viommu else min(devices, 1)) + own_mappings
    return memory_bytes * times + RESERVE if times else 0


class Lock(Value):
    """How much QEMU locks, and the limit to write; None if libvirt sets it."""

    needed_bytes: int
    limit_bytes: int | None
    reasons: tuple[Reason, ...] = ()


def plan_lock(request: DomainRequest, devices: int, libvirt: Version) -> Lock:
    """Compute the locked memory, and the limit if libvirt's own is too low.

    Raises:
        Refusal: the requested limit is too low.

    """
    needed = needed_lock(request.memory_bytes, devices, has_viommu=request.viommu is not None)
    if not needed:
        return Lock(0, request.hard_limit_bytes)
    times = f"{devices} x " if request.viommu is not None else ""
    told = f"{times}{size(request.memory_bytes)} of memory and {size(RESERVE)}: {size(needed)}"
    limit = request.hard_limit_bytes
    if limit is not None and limit < needed:
        message = f"a hard limit of {size(limit)} is less than VFIO needs: {told}"
        remedy = f"pass --hard-limit {-(-needed // GIB)}G, or omit it: libvirt then sets the limit"
        refuse("hard-limit-too-low", request.name, message, remedy)
    if limit is not None or request.is_locked:
        return Lock(needed, limit, (Reason("memtune", f"VFIO needs {told}"),))
    if request.viommu is not None and devices > 1 and not LOCKS_PER_DEVICE.is_in(libvirt):
        told += f"; libvirt {libvirt} would only allow for one device"
        return Lock(needed, needed, (Reason("memtune", f"VFIO needs {told}"),))
    told = f"QEMU will lock {told}; libvirt sets the limit"
    return Lock(needed, None, (Reason("memory", told),))


_OVMF_BITS = 46
"""The address limit of OVMF (PlatformAddressWidthFromCpuid in PlatformInitLib)."""
_OVMF_SHARE = 3
"""Its window is an eighth of the addresses, at their end (PlatformDynamicMmioWindow)."""
_TRUSTED_BITS = 41
"""From this width on OVMF trusts the CPU; below, it uses its knowledge of the vendor's CPUs."""
_TRUSTED = {"GenuineIntel": (36, 39), "AuthenticAMD": (40,)}


class MmioWindow(Value):
    """The parts of the window that must be written."""

    address_width: Literal["passthrough", "emulate"] | None
    address_bits: int | None
    hole64_kib: int | None
    fw_cfg_mib: int | None
    reasons: tuple[Reason, ...]
    notes: tuple[str, ...]


def plan_mmio_window(
    host: HostSnapshot,
    request: DomainRequest,
    units: Sequence[GuestDevice],
    libvirt: Version,
    emulated: int = 0,
) -> MmioWindow:
    """How the guest gets a window for the BARs of its devices.

    Raises:
        Refusal: the guest's addresses are too narrow.

    """
    window = bar_window([unit.functions for unit in units], emulated)
    bits = guest_bits(host, request)
    width = _width(host, request, libvirt, has_devices=bool(units))
    reasons = list(_why_bits(host, request, width=width, is_asked=bool(units), libvirt=libvirt))
    notes = []
    if window and bits is None:
        notes.append("cannot check whether the BARs fit: the address width of the CPU is unknown")
    told = _why_window(units, window)
    is_efi = request.firmware == "efi"
    vendor = "AuthenticAMD" if request.kind == "qemu" else host.cpu_vendor
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
    return MmioWindow(
        address_width=width,
        address_bits=bits if request.address_bits is not None else None,
        hole64_kib=written >> 10 if written is not None and not is_efi else None,
        fw_cfg_mib=written // MIB if written is not None and is_efi else None,
        reasons=tuple(reasons),
        notes=tuple(notes),
    )


def guest_bits(host: HostSnapshot, request: DomainRequest) -> int | None:
    """The width of the guest's addresses; None if that of the host's CPU is unknown."""
    own = TCG_BITS if request.kind == "qemu" else host.cpu_address_bits
    known = [bits for bits in (own, request.address_bits) if bits is not None]
    return min(known, default=None)


def _width(
    host: HostSnapshot, request: DomainRequest, libvirt: Version, *, has_devices: bool
) -> Literal["passthrough", "emulate"] | None:
    """The mode of `<maxphysaddr>`; for libvirt before 9.3 a limit is written as a width."""
    asked = request.address_bits
    if asked is None:
        passes = request.kind == "kvm" and has_devices and MAXPHYSADDR.is_in(libvirt)
        return "passthrough" if passes else None
    if request.kind == "qemu":
        message = f"cannot set the address width without KVM: it is always {TCG_BITS} bits"
        remedy = "omit --address-bits, or use KVM"
        refuse("address-bits-without-kvm", request.name, message, remedy)
    if MAXPHYSADDR_LIMIT.is_in(libvirt):
        return "passthrough"
    MAXPHYSADDR.require(libvirt, f"an address width of {asked} bits for the guest")
    if host.cpu_address_bits is None:
        message = f"a limit of {asked} bits on a CPU of unknown address width"
        MAXPHYSADDR_LIMIT.require(libvirt, message)
    return "emulate"


def ovmf_window(bits: int | None, vendor: str | None) -> int:
    """The 64-bit window that OVMF (2022.11 and later) uses by default in a guest of that width."""
    if bits is None:
        return DEFAULT_WINDOW
    if bits < _TRUSTED_BITS and bits not in _TRUSTED.get(vendor or "", ()):
        return DEFAULT_WINDOW
    return max(DEFAULT_WINDOW, 1 << (min(bits, _OVMF_BITS) - _OVMF_SHARE))


def _end_of_memory(host: HostSnapshot, request: DomainRequest, window: int) -> int:
    """The end of memory in a guest with such a window; with OVMF it is not QEMU's window."""
    is_amd = request.kind == "kvm" and host.cpu_vendor == "AuthenticAMD"
    hole = window if request.firmware == "bios" else DEFAULT_WINDOW
    return memory_end(request.memory_bytes, hole, is_amd=is_amd)


def _check_space(host: HostSnapshot, request: DomainRequest, bits: int | None) -> None:
    """Refuse what QEMU 7.1 and later would: its own window has no place (pc_memory_init)."""
    end = _end_of_memory(host, request, DEFAULT_WINDOW) + DEFAULT_WINDOW
    if bits is not None and end > 1 << bits:
        message = (
            f"{size(request.memory_bytes)} of memory and q35's window of {size(DEFAULT_WINDOW)} "
            f"end at {size(end)}, but the guest has only {bits} address bits ({size(1 << bits)})"
        )
        remedy = "pass less --memory" + ", or use KVM" * (request.kind == "qemu")
        refuse("address-space-too-small", request.name, message, remedy)


def _fitting(
    host: HostSnapshot, request: DomainRequest, window: int, bits: int | None, told: str
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
        remedy += ", or use KVM" * (request.kind == "qemu")
        raise refusal([blocker("aperture-too-small", request.name, message, remedy)]) from None


def _why_window(units: Sequence[GuestDevice], window: int) -> str:
    shares = ((unit.name, large_bytes(unit.functions)) for unit in units)
    bars = ", ".join(f"{name} {size(share)}" for name, share in shares if share)
    if not window:
        return "no device has a 64-bit prefetchable BAR"
    return f"64-bit prefetchable BARs ({bars}; resource in sysfs) need a window of {size(window)}"


def _why_bits(
    host: HostSnapshot,
    request: DomainRequest,
    *,
    width: str | None,
    is_asked: bool,
    libvirt: Version,
) -> Iterable[Reason]:
    bits = host.cpu_address_bits
    shown = f"{bits} bits (/proc/cpuinfo)" if bits else "unknown width"
    if width is not None and request.address_bits is not None:
        text = f"physical addresses limited to {request.address_bits} bits; the host's CPU: {shown}"
        yield Reason("maxphysaddr", text)
    elif width is not None:
        yield Reason("maxphysaddr", f"physical addresses like the host's CPU: {shown}")
    elif is_asked and request.kind == "kvm":
        since = f"<maxphysaddr> needs libvirt {MAXPHYSADDR.since}, this is {libvirt}"
        yield Reason("cpu", f"the host's CPU, with its address width: {shown}; {since}")
    elif is_asked:
        yield Reason("cpu", f"without KVM physical addresses have {TCG_BITS} bits")
