"""Rules about the number of virtual CPUs."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from vfiomgr.model.libvirt_feature import ADDS_EIM
from vfiomgr.model.readiness import Finding
from vfiomgr.model.version import Version
from vfiomgr.planner.guest.processors import MOST_WITHOUT_EIM, most_vcpus

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.planner.preflight.situation import Situation

_INTEL = "intel"
_Q35 = re.compile(r"pc-q35-(\d{1,3})\.(\d{1,3})")
"""Of QEMU itself: distributions have names and limits of their own."""


def too_many(situation: Situation) -> Iterator[Finding]:
    """libvirt: "more than 255 vCPUs require extended interrupt mode"; and the machine's limit.

    Since 10.10 libvirt adds the IOMMU and the mode where neither is written
    (https://libvirt.org/news.html).
    """
    domain = situation.domain
    count, line = domain.cpu.count, domain.line("vcpu")
    if not domain.is_x86 or count <= MOST_WITHOUT_EIM:
        return
    cited = f"{situation.at(line)}: {count} CPUs"
    machine = f"{situation.at(domain.line('os/type'))}: machine='{domain.machine or ''}'"
    most = _limit(domain.machine)
    if most is not None and count > most:
        yield Finding(
            "too-many-cpus",
            "blocker",
            f"the domain has {count} CPUs, and its machine {most} at most",
            (cited, machine),
            "libvirt rejects the domain",
            f"write {most} or fewer in line {line}, or a newer machine type (288 up to "
            "pc-q35-8.0, 1024 up to 8.2, then 4096)",
        )
    elif "q35" not in (domain.machine or "q35"):
        yield Finding(
            "too-many-cpus",
            "blocker",
            f"the domain has {count} CPUs, and a machine that is no q35 {MOST_WITHOUT_EIM} at most",
            (cited, machine),
            "libvirt rejects the domain",
            f"write {MOST_WITHOUT_EIM} or fewer in line {line}",
        )
    elif not _has_eim(situation):
        iommu = situation.at(domain.line("devices/iommu" if domain.iommu else "devices"))
        yield Finding(
            "too-many-cpus",
            "blocker",
            f"the domain has {count} CPUs, and no IOMMU with extended interrupt mode",
            (cited, f"{iommu}: no <iommu> with eim='on'"),
            f"libvirt before {ADDS_EIM.since} rejects the domain: interrupts reach "
            f"{MOST_WITHOUT_EIM} CPUs without it",
            "write <iommu model='intel'><driver intremap='on' caching_mode='on' eim='on'/></iommu> "
            "into <devices> and <ioapic driver='qemu'/> into <features>, or "
            f"{MOST_WITHOUT_EIM} CPUs or fewer in line {line}",
        )


def _has_eim(situation: Situation) -> bool:
    """Whether the guest gets extended interrupt mode: as written, or from libvirt itself."""
    iommu, version = situation.domain.iommu, situation.libvirt
    if version is not None and ADDS_EIM.is_in(version):
        return iommu is None or (iommu.model == _INTEL and not iommu.is_eim_off)
    return iommu is not None and iommu.has_eim


def _limit(machine: str | None) -> int | None:
    found = _Q35.fullmatch(machine or "")
    return most_vcpus(Version(int(found[1]), int(found[2]))) if found else None
