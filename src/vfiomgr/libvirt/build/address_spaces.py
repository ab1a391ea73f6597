"""Functions that cannot be added to a domain with an IOMMU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from vfiomgr.diagnostic import Diagnostic, blocker
from vfiomgr.guests.placement import functions_by_shared_group
from vfiomgr.libvirt.model import TO_PCI, Domain

if TYPE_CHECKING:
    from vfiomgr.guests.model import GuestDevice
    from vfiomgr.snapshot.model import HostSnapshot


def space_diagnostics(
    host: HostSnapshot, domain: Domain, units: Iterable[GuestDevice]
) -> Iterator[Diagnostic]:
    """Functions that cannot be added to a domain with an IOMMU, each behind a port of pcie.0."""
    if domain.whole_iommu is None:
        return
    coming = {f.address: f for unit in units if unit.is_seen for f in unit.functions}
    seen = (h for h in domain.hostdevs if h.address is not None and h.is_seen)
    there = (host.device_named(hostdev.name) for hostdev in seen)
    all_ = {**{f.address: f for f in there if f is not None}, **coming}
    for number, members in functions_by_shared_group(all_.values()).items():
        new = [str(member.address) for member in members if member.address in coming]
        if not new:
            continue
        shown = ", ".join(str(member.address) for member in members)
        yield blocker(
            "viommu-group-apart",
            domain.name,
            f"cannot add {shown} to {domain.name}: behind its IOMMU each PCI Express function "
            f"has its own address space, but IOMMU group {number} can have only one",
            "add one of them with --function-only; or remove <iommu> (only needed for "
            "passthrough inside the guest); or put them behind one <controller type='pci' "
            f"model='{TO_PCI}'/>, as vfiomgr libvirt domain --viommu does",
        )
