"""Plans for the MSI-X vectors of virtual functions (sriov_vf_msix_count, since Linux 5.13)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.diagnostic import Diagnostic, blocker, refuse_if_any
from vfiomgr.engine.locks import device_lock
from vfiomgr.engine.plan import Plan
from vfiomgr.engine.registry import plans
from vfiomgr.paths import echo
from vfiomgr.pci.model import pci_device
from vfiomgr.sriov.steps import ChangeVectors, SetVectors
from vfiomgr.units import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot


@plans(ChangeVectors)
def plan_vectors(host: HostSnapshot, request: ChangeVectors) -> Plan:
    """Set the MSI-X vectors of one virtual function, or of all those of a physical function.

    Raises:
        Refusal: the driver cannot set them, the device has fewer, or a function has a driver.
        UnknownDevice: the address is not found.

    """
    named = host.device(request.address)
    physical = host.device(named.physical_function or named.address)
    every = [host.device(address) for address in physical.virtual_functions]
    chosen = every if named is physical else [named]
    refuse_if_any(_none_there(physical))
    counts = [
        request.vectors if each in chosen else host.vectors_of(each.address) or 0 for each in every
    ]
    refuse_if_any(impossible(physical, counts))
    steps = exchange(host, physical, chosen, request.vectors)
    who = f"all virtual functions of {physical}" if named is physical else str(named)
    return Plan(
        f"set the MSI-X vectors of {who} to {request.vectors}",
        steps,
        tuple(sorted({device_lock(physical), *map(device_lock, chosen)})),
        resolves=(str(named.address),),
        already=() if steps else (f"{who} already has {request.vectors} MSI-X vectors",),
    )


def present(host: HostSnapshot, physical: PciDevice) -> tuple[int | None, ...]:
    """The vectors of the existing functions in order; empty if none is known."""
    found = tuple(host.vectors_of(address) for address in physical.virtual_functions)
    return found if any(found) else ()


def exchange(
    host: HostSnapshot, physical: PciDevice, chosen: Sequence[PciDevice], count: int | None
) -> tuple[SetVectors, ...]:
    """The step that sets the vectors of existing functions; none if they have that many.

    Raises:
        Refusal: one of them has a driver.

    """
    if count is None:
        return ()
    now = {each.address: host.vectors_of(each.address) for each in chosen}
    changing = [each for each in chosen if now[each.address] not in (None, count)]
    refuse_if_any(_on_drivers(changing))
    addresses = {each.address for each in changing}
    functions = physical.virtual_functions
    step = SetVectors(
        physical.identity,
        before=tuple(now[a] if a in addresses else None for a in functions),
        after=tuple(count if a in addresses else None for a in functions),
    )
    return (step,) if changing else ()


def impossible(physical: PciDevice, counts: Sequence[int]) -> Iterator[Diagnostic]:
    """Refuse vectors that the driver cannot set, or that the device does not have."""
    total = physical.sriov_vf_total_msix
    if total == 0 and physical.driver is not None and not physical.is_on_vfio:
        yield unavailable(physical, "sriov_vf_total_msix is 0")
    elif total and sum(counts) > total:
        yield blocker(
            "vectors-exceeded",
            physical,
            f"{physical} has {total} MSI-X vectors for its virtual functions, not {sum(counts)}",
            f"request at most {total // len(counts)} for each of "
            f"{counted(len(counts), 'virtual function')}",
        )


def unavailable(physical: PciDevice, why: str) -> Diagnostic:
    """The refusal of a driver that cannot set vectors."""
    return blocker(
        "vectors-unavailable",
        physical,
        f"driver {physical.driver} of {physical} cannot set the MSI-X vectors of virtual functions "
        f"({why})",
        "leave out the vectors; mlx5_core and ice can set them, if the firmware supports it",
    )


def _none_there(physical: PciDevice) -> Iterator[Diagnostic]:
    if not physical.virtual_functions:
        yield blocker(
            "no-virtual-functions",
            physical,
            f"{physical} has no virtual functions",
            f"create them: vfiomgr sriov set {physical.address} COUNT",
        )


def _on_drivers(functions: Sequence[PciDevice]) -> Iterator[Diagnostic]:
    """Refuse functions with drivers, which use their vectors (EBUSY)."""
    for each in functions:
        if each.driver is not None:
            unbind = echo(str(each.address), pci_device(each.address) / "driver/unbind")
            yield blocker(
                "vectors-in-use",
                each,
                f"{each} is on {each.driver}, and its MSI-X vectors can only be set without driver",
                f"vfiomgr unbind {each.address}" if each.is_on_vfio else f"unbind it: {unbind}",
            )
