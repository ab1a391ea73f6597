"""Address spaces behind an IOMMU of the guest's own, and groups of the host that have one each.

A function of PCI Express has a space of its own there, also in one slot with others; all that is
behind a bridge to conventional PCI has one (pci_device_iommu_address_space in hw/pci/pci.c). VFIO
gives a group to one space: "group N used in multiple address spaces" (vfio_get_group).
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from vfiomgr.diagnostic import Diagnostic, blocker
from vfiomgr.libvirt.model.domain import TO_PCI
from vfiomgr.value import Value
from vfiomgr.vgpu.guest_device import GuestDevice

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from vfiomgr.libvirt.model.domain import Domain
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot


class RootPortSlot(Value):
    """Units behind one root port: one, or several that share an address space."""

    units: tuple[GuestDevice, ...]
    is_shared: bool = False
    """Whether they sit behind a bridge to conventional PCI."""

    @property
    def first(self) -> GuestDevice:
        """The unit that tells where the seat is near."""
        return self.units[0]

    @property
    def names(self) -> str:
        """All functions."""
        return ", ".join(unit.names for unit in self.units)


def seats_of(units: Sequence[GuestDevice], *, has_viommu: bool) -> tuple[RootPortSlot, ...]:
    """A seat for each unit; one for all that share a group, where the guest has an IOMMU."""
    if not has_viommu:
        return tuple(RootPortSlot((unit,)) for unit in units)
    shared = set(_several(function for unit in units for function in unit.functions))
    seats: list[tuple[list[GuestDevice], set[int]]] = []
    for unit in units:
        own = {f.iommu_group for f in unit.functions if f.iommu_group is not None} & shared
        with_it = [seat for seat in seats if own & seat[1]]
        if not with_it:
            seats.append(([unit], own))
            continue
        first, *others = with_it
        for seat in others:
            seats.remove(seat)
        first[0].extend([*(u for seat in others for u in seat[0]), unit])
        first[1].update(own, *(seat[1] for seat in others))
    return tuple(RootPortSlot(tuple(inside), bool(groups)) for inside, groups in seats)


def _several(functions: Iterable[PciDevice]) -> dict[int, list[PciDevice]]:
    """The groups that several of some functions are in."""
    groups: dict[int, list[PciDevice]] = defaultdict(list)
    for function in functions:
        if function.iommu_group is not None:
            groups[function.iommu_group].append(function)
    return {number: members for number, members in groups.items() if len(members) > 1}


def space_notes(seats: Iterable[RootPortSlot]) -> Iterator[str]:
    """What functions behind a bridge lack."""
    for seat in seats:
        if seat.is_shared:
            yield (
                f"{seat.names} share an IOMMU group, which is one address space, and behind a "
                "virtual IOMMU only a bridge to conventional PCI makes one of them: the guest sees "
                "them without PCI Express (no resizable BARs, no ATS, no link state). One of them "
                f"alone keeps it: --device {seat.first.function_names[0]},only"
            )


def space_diagnostics(
    host: HostSnapshot, domain: Domain, units: Iterable[GuestDevice]
) -> Iterator[Diagnostic]:
    """Functions that cannot come into a domain that has an IOMMU, each behind a port of pcie.0."""
    if domain.iommu is None or domain.iommu.bus is not None:
        return
    coming = {f.address: f for unit in units if unit.is_seen for f in unit.functions}
    seen = (h for h in domain.hostdevs if h.address is not None and h.is_seen)
    there = (host.device_named(hostdev.name) for hostdev in seen)
    all_ = {**{f.address: f for f in there if f is not None}, **coming}
    for number, members in _several(all_.values()).items():
        new = [str(member.address) for member in members if member.address in coming]
        if not new:
            continue
        shown = ", ".join(str(member.address) for member in members)
        yield blocker(
            "viommu-group-apart",
            domain.name,
            f"{domain.name} has an IOMMU, behind which each function of PCI Express is an address "
            f"space of its own, and {shown} are of IOMMU group {number}, which has one",
            f"give it one of them, with --only; or take <iommu> out of it: only a guest that hands "
            "devices on needs one; or put them behind one <controller type='pci' "
            f"model='{TO_PCI}'/>, as vfiomgr libvirt domain --viommu does",
        )
