"""Rules about a guest with an IOMMU of its own."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from vfiomgr.model.path import IOMMU_GROUPS
from vfiomgr.model.readiness import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vfiomgr.planner.preflight.situation import Situation, Taken

_ELEMENT = "devices/iommu"
_INTEL = "intel"


def group_apart(situation: Situation) -> Iterator[Finding]:
    """QEMU: "group N used in multiple address spaces" (vfio_get_group in hw/vfio)."""
    if situation.domain.iommu is None:
        return
    groups: dict[int, list[Taken]] = defaultdict(list)
    for taken in situation.functions:
        if taken.device.iommu_group is not None:
            groups[taken.device.iommu_group].append(taken)
    for number, members in groups.items():
        if _count_places(members) < 2:  # noqa: PLR2004 - several places
            continue
        yield Finding(
            "viommu-group-apart",
            "blocker",
            f"the guest has an IOMMU, and gets IOMMU group {number} in {_count_places(members)} "
            "slots",
            (
                f"{situation.at(situation.domain.line(_ELEMENT))}: <iommu>",
                *(situation.cite(taken.hostdev) for taken in members),
                *(f"{IOMMU_GROUPS}/{number}/devices/{t.device.address}" for t in members),
            ),
            'each slot is an address space of its own then: QEMU ends with "group used in multiple '
            'address spaces"',
            "give them one slot of the guest, function 0 with multifunction='on': vfiomgr libvirt "
            f"hostdev {members[0].device.address} prints the functions of a slot so; or take "
            f"<iommu> out of line {situation.domain.line(_ELEMENT)}: only a guest that hands "
            "devices on needs one",
        )


def _count_places(members: Sequence[Taken]) -> int:
    placed = {(t.hostdev.guest.bus, t.hostdev.guest.slot) for t in members if t.hostdev.guest}
    return len(placed) + sum(t.hostdev.guest is None for t in members)


def caching_mode(situation: Situation) -> Iterator[Finding]:
    """QEMU: "We need to set caching-mode=on for intel-iommu" (hw/i386/intel_iommu.c)."""
    iommu = situation.domain.iommu
    if iommu is None or iommu.model != _INTEL or iommu.has_caching_mode or not situation.hostdevs:
        return
    line = situation.domain.line(_ELEMENT)
    yield Finding(
        "viommu-caching-mode",
        "blocker",
        "the guest's IOMMU has no caching mode, which devices of the host need",
        (f"{situation.at(line)}: <iommu model='{_INTEL}'> without caching_mode='on'",),
        "without it QEMU does not learn what the guest maps, and ends",
        f"write <driver intremap='on' caching_mode='on'/> into the <iommu> of line {line}",
    )
