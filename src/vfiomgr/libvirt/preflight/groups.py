"""Rules about IOMMU groups and resets: what else goes with a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.diagnostic import Diagnostic, finding
from vfiomgr.libvirt.preflight.context import addresses, driver_of, sysfs
from vfiomgr.passthrough.readiness_hints import diagnostics_to_bind, how_to_bind
from vfiomgr.paths import IOMMU_GROUPS
from vfiomgr.pci.iommu import blockers

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vfiomgr.libvirt.preflight.context import AssignedFunction, DeviceOwner, PreflightContext
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot


def not_viable(situation: PreflightContext) -> Iterator[Diagnostic]:
    """QEMU: "group N is not viable"; libvirt does not look (vfio_group_set_container)."""
    for number in sorted(situation.groups):
        members = situation.host.group_members(number)
        staying = [d for d in blockers(members) if d.address not in situation.addresses]
        if not staying:
            continue
        own = [taken for taken in situation.functions if taken.device.iommu_group == number]
        if any(taken.device.address in situation.hook_needs.functions for taken in own):
            continue  # what it cannot bind, the rules of the hook tell
        names = ", ".join(str(taken.device) for taken in own)
        yield finding(
            "group-not-viable",
            "blocker",
            f"IOMMU group {number} of {names} also holds what host drivers have",
            (
                *(situation.cite(taken.hostdev) for taken in own),
                *(f"{IOMMU_GROUPS}/{number}/devices/{d.address}: on {d.driver}" for d in staying),
            ),
            'a group goes to one guest as a whole: QEMU ends with "group is not viable"',
            _clearance(situation.host, own, staying),
        )


def _clearance(
    host: HostSnapshot, own: Sequence[AssignedFunction], staying: Sequence[PciDevice]
) -> str:
    """What makes a group viable: a bind of whole slots, with the group, or another slot."""
    if any(device.is_bridge for device in staying):
        return (
            "a bridge with a driver of its own stays with the host: move the device to a slot that "
            "has a group of its own, or enable ACS in the firmware setup"
        )
    slots = {taken.device.address.slot for taken in own}
    if all(device.address.slot in slots for device in staying):
        return how_to_bind(host, staying)
    first = own[0].device
    is_refused = diagnostics_to_bind(host, [first], with_group=True)
    gone = "" if is_refused else ", after which the host has none of these any more"
    return (
        f"{how_to_bind(host, [first], with_group=True)}{gone}; or move the device to a slot that "
        "has a group of its own"
    )


def shared_with_running(situation: PreflightContext) -> Iterator[Diagnostic]:
    """Libvirt looks at the whole group (virHostdevIsPCINodeDeviceUsed)."""
    for number in sorted(situation.groups):
        for device, claim in _held_members(situation, number):
            other = claim.domain
            own = [t for t in situation.functions if t.device.iommu_group == number]
            yield finding(
                "group-held-by-domain",
                "blocker",
                f"IOMMU group {number} belongs to the running domain {other.name}, "
                f"which has {device}",
                (
                    *(situation.cite(taken.hostdev) for taken in own),
                    f"{IOMMU_GROUPS}/{number}/devices/{device.address}",
                    f"domain {other.name} is running, with {device.address}",
                ),
                "a group goes to one guest as a whole",
                f"virsh shutdown {other.argument}, or give both devices to one domain",
                subject=device,
            )


def _held_members(
    situation: PreflightContext, number: int
) -> Iterator[tuple[PciDevice, DeviceOwner]]:
    """Members of a group that other domains have, and this one does not ask for."""
    for device in situation.host.group_members(number):
        if device.address not in situation.addresses:
            for claim in situation.claims_of_others(str(device.address)):
                if claim.is_held:
                    yield device, claim


def no_reset(situation: PreflightContext) -> Iterator[Diagnostic]:
    """VFIO resets all below a port at once where the guest owns all (VFIO_DEVICE_PCI_HOT_RESET)."""
    if not any(device.reset_method for device in situation.host.devices):
        return  # a kernel before 5.15, or a recording without the attribute
    for taken in situation.functions:
        device = taken.device
        if device.reset_method or device.physical_function or device.is_bridge:
            continue
        if not device.is_responsive:
            continue
        others = [d for d in _on_its_bus(situation, device) if not _is_owned(situation, d)]
        if not others:
            continue
        yield finding(
            "no-reset",
            "warning",
            f"{device} cannot be reset: neither by itself nor with its neighbours",
            (
                f"{sysfs(device)}/reset_method is absent or empty",
                *(f"{driver_of(other)}, on the same bus" for other in others),
            ),
            "a guest may find it as the last one left it, and fail to start it a second time",
            f"give all functions of its bus to the domain: {addresses(others)}",
            subject=device,
        )


def _on_its_bus(situation: PreflightContext, device: PciDevice) -> list[PciDevice]:
    """The other functions below the same port, which its reset takes along."""
    return [
        other
        for other in situation.host.devices
        if other is not device
        and other.address.bus == device.address.bus
        and other.bridge_path == device.bridge_path
        and not other.is_bridge
    ]


def _is_owned(situation: PreflightContext, device: PciDevice) -> bool:
    return device.address in situation.addresses or device.iommu_group in situation.groups
