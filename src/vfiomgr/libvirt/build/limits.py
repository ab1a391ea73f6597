"""The limit of locked memory, and the width of addresses, as libvirt writes them.

libvirt sets the limit itself (qemuDomainGetMemLockLimitBytes).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from msgspec.structs import replace

from vfiomgr.diagnostic import refuse
from vfiomgr.guests.memory import RESERVE, needed_lock
from vfiomgr.guests.model import Reason
from vfiomgr.libvirt.releases import (
    INTERRUPTS_ONLY,
    LOCKS_PER_DEVICE,
    MAXPHYSADDR,
    MAXPHYSADDR_LIMIT,
)
from vfiomgr.pci.memory import TCG_BITS
from vfiomgr.units import GIB, Version, size
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.libvirt.build.model import DomainRequest
    from vfiomgr.snapshot.model import HostSnapshot

MOST_WITHOUT_EIM = 255
"""More CPUs need the identifiers of extended interrupt mode (qemuValidateDomainDefVcpu)."""
_LIMITS = ((Version(9, 0), 4096), (Version(8, 1), 1024), (Version(0, 0), 288))
"""The CPU limit of q35 by release of the machine type (max_cpus in hw/i386/pc_q35.c)."""


def most_vcpus(machine: Version) -> int:
    """The CPU limit of a q35 machine of that QEMU release."""
    return next(count for since, count in _LIMITS if machine >= since)


def with_interrupt_remapping(request: DomainRequest, libvirt: Version) -> DomainRequest:
    """Add an IOMMU that only remaps interrupts, for more CPUs than work without one.

    It does not translate DMA (`dma-translation` of QEMU's intel-iommu), so the guest's own drivers
    are as fast as without it. An older libvirt needs `--viommu intel`, which translates.
    """
    is_needed = request.vcpus > MOST_WITHOUT_EIM and request.viommu is None
    if not (is_needed and INTERRUPTS_ONLY.is_in(libvirt)):
        return request
    return replace(request, viommu="intel", translates_dma=False)


def check_vcpus(request: DomainRequest, qemu: Version | None) -> None:
    """Make sure that libvirt accepts the number of CPUs; for an unknown QEMU any number passes.

    Raises:
        Refusal: there are too many; the message names the remedy.
    """
    if request.vcpus > MOST_WITHOUT_EIM and request.viommu != "intel":
        message = (
            f"{request.vcpus} CPUs need a virtual IOMMU with extended interrupt mode (more than "
            f"{MOST_WITHOUT_EIM})"
        )
        remedy = f"pass --viommu intel, or --vcpus {MOST_WITHOUT_EIM}"
        if request.viommu is None:
            remedy += f"; or install libvirt {INTERRUPTS_ONLY.since} or later"
        refuse("too-many-cpus", request.name, message, remedy)
    if qemu is not None and request.vcpus > most_vcpus(qemu):
        most = most_vcpus(qemu)
        message = f"{request.vcpus} CPUs are too many: q35 of QEMU {qemu} supports {most}"
        later = next(since for since, count in reversed(_LIMITS) if count > most)
        remedy = f"pass --vcpus {most}, or install QEMU {later} or later"
        refuse("too-many-cpus", request.name, message, remedy)


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


class AddressWidth(Value):
    """The mode of `<maxphysaddr>`, and why; None if it is not written."""

    mode: Literal["passthrough", "emulate"] | None = None
    reasons: tuple[Reason, ...] = ()


def plan_address_width(
    host: HostSnapshot, request: DomainRequest, libvirt: Version, *, has_devices: bool
) -> AddressWidth:
    """How the guest gets addresses as wide as the host's, or as narrow as it was asked.

    Raises:
        Refusal: libvirt or QEMU cannot set the width.
    """
    mode = _mode(host, request, libvirt, has_devices=has_devices)
    reasons = _why_mode(host, request, mode=mode, is_asked=has_devices, libvirt=libvirt)
    return AddressWidth(mode, tuple(reasons))


def _mode(
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
    if host.kernel.cpu_address_bits is None:
        message = f"a limit of {asked} bits on a CPU of unknown address width"
        MAXPHYSADDR_LIMIT.require(libvirt, message)
    return "emulate"


def _why_mode(
    host: HostSnapshot,
    request: DomainRequest,
    *,
    mode: str | None,
    is_asked: bool,
    libvirt: Version,
) -> Iterable[Reason]:
    bits = host.kernel.cpu_address_bits
    shown = f"{bits} bits (/proc/cpuinfo)" if bits else "unknown width"
    if mode is not None and request.address_bits is not None:
        widths = {} if host.readiness is None else host.readiness.iommu_widths
        shown += f"; its IOMMU: {min(widths.values())} bits" if widths else ""
        text = f"physical addresses limited to {request.address_bits} bits; the host's CPU: {shown}"
        yield Reason("maxphysaddr", text)
    elif mode is not None:
        yield Reason("maxphysaddr", f"physical addresses like the host's CPU: {shown}")
    elif is_asked and request.kind == "kvm":
        since = f"<maxphysaddr> needs libvirt {MAXPHYSADDR.since}, this is {libvirt}"
        yield Reason("cpu", f"the host's CPU, with its address width: {shown}; {since}")
    elif is_asked:
        yield Reason("cpu", f"without KVM physical addresses have {TCG_BITS} bits")
