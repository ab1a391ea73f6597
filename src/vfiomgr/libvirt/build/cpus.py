"""How many CPUs a domain can have, and what many CPUs need."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.diagnostic import refuse
from vfiomgr.libvirt.model import INTERRUPTS_ONLY
from vfiomgr.units import Version

if TYPE_CHECKING:
    from vfiomgr.libvirt.build.model import DomainRequest

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
