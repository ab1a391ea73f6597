"""How many virtual CPUs a guest can have."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.errors import Refusal
from vfiomgr.model.version import Version

if TYPE_CHECKING:
    from vfiomgr.model.guest import DomainWish

MOST_WITHOUT_EIM = 255
"""More have identities that only extended interrupt mode carries (qemuValidateDomainDefVcpu)."""
_LIMITS = ((Version(9, 0), 4096), (Version(8, 1), 1024), (Version(0, 0), 288))
"""Of q35 by the release of its machine type (max_cpus in hw/i386/pc_q35.c)."""


def most_vcpus(machine: Version) -> int:
    """The limit of a q35 machine of that release of QEMU."""
    return next(count for since, count in _LIMITS if machine >= since)


def check_vcpus(wish: DomainWish, qemu: Version | None) -> None:
    """Make sure that libvirt takes so many CPUs; an unknown QEMU may have any limit.

    Raises:
        Refusal: it does not; the message says what would lift that.

    """
    if wish.vcpus > MOST_WITHOUT_EIM and wish.viommu != "intel":
        message = (
            f"{wish.vcpus} CPUs: more than {MOST_WITHOUT_EIM} need a virtual IOMMU with extended "
            "interrupt mode"
        )
        raise Refusal(message, f"pass --viommu intel, or --vcpus {MOST_WITHOUT_EIM}")
    if qemu is not None and wish.vcpus > most_vcpus(qemu):
        most = most_vcpus(qemu)
        message = f"{wish.vcpus} CPUs: q35 has {most} at most with QEMU {qemu}"
        later = next(since for since, count in reversed(_LIMITS) if count > most)
        raise Refusal(message, f"pass --vcpus {most}, or install QEMU {later} or later")
