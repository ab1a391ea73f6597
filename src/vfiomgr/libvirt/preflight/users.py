"""Rules about other users of a device: domains, processes, pods, members of its IOMMU group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from vfiomgr.diagnostic import Diagnostic, finding, problem, warning
from vfiomgr.libvirt.preflight.context import addresses, driver_of, sysfs
from vfiomgr.listing import first_of
from vfiomgr.passthrough.guards import INSTEAD, UNKNOWN, held_by_pod
from vfiomgr.passthrough.isolation import reserved_region
from vfiomgr.passthrough.readiness_hints import diagnostics_to_bind, how_to_bind
from vfiomgr.paths import IOMMU_GROUPS
from vfiomgr.pci.iommu import blockers
from vfiomgr.pci.slots import chipset_role
from vfiomgr.users.node_agent import CONTROL, RECORD

if TYPE_CHECKING:
    from vfiomgr.libvirt.model import DomainHostdev
    from vfiomgr.libvirt.preflight.context import AssignedFunction, Claim, PreflightContext
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.users.model import DeviceUser
    from vfiomgr.vgpu.model import Vgpu

_SHOWN = 4
"""The number of domains to list; a host may have hundreds."""


def by_running_domain(context: PreflightContext) -> Iterator[Diagnostic]:
    """Libvirt: "PCI device … is in use by driver QEMU, domain …"."""
    for hostdev in context.hostdevs:
        for claim in context.claims_of_others(hostdev.name):
            if not claim.is_held:
                continue
            other = claim.domain.name
            yield problem(
                "held-by-domain",
                f"{hostdev.name} is in use by the running domain {other}",
                (context.cite(hostdev), f"domain {other} is running with {hostdev.name}"),
                "only one guest can use a device at a time",
                f"virsh shutdown {claim.domain.argument}, or "
                f"vfiomgr libvirt detach {claim.domain.argument} {hostdev.name}",
                subject=hostdev.name,
            )


def by_defined_domain(context: PreflightContext) -> Iterator[Diagnostic]:
    """Libvirt itself checks only running domains."""
    for hostdev in context.hostdevs:
        claims = context.claims_of_others(hostdev.name)
        others = [c.domain for c in claims if c.defined is not None and not c.is_held]
        if not others:
            continue
        known, more = first_of(others, _SHOWN, ": vfiomgr libvirt list")
        lines = [
            f"domain {other.name} is defined, with {hostdev.name}"
            + (", and starts at boot" if other.autostarts else "")
            for other in known
        ]
        who = f"domain {others[0].name} also claims"
        if len(others) > 1:
            who = f"{len(others)} other domains also claim"
        fix = "do not run them at the same time, or assign different devices"
        starting = [other.argument for other in others if other.autostarts]
        if starting:
            fix += f"; disable the autostart of one: virsh autostart --disable {starting[0]}"
        yield warning(
            "claimed-by-domain",
            f"{who} {hostdev.name}",
            (context.cite(hostdev), *lines, *more),
            "the domain that starts first gets the device; the other one fails to start",
            fix,
            subject=hostdev.name,
        )


def by_process(context: PreflightContext) -> Iterator[Diagnostic]:
    """VFIO: a group or a cdev has one owner (vfio_group_open, EBUSY)."""
    known = {d.name for d in context.known_domains if d.is_active and d is not context.itself}
    for hostdev, holder in _holders(context):
        nodes = context.host.guest_nodes(holder)
        users = [
            user
            for user in context.host.users.of_nodes(nodes)
            if user.guest not in known and not _is_itself(context, user)
        ]
        if users:
            yield problem(
                "held-by-process",
                f"{holder} is in use by {', '.join(dict.fromkeys(map(str, users)))}",
                (
                    context.cite(hostdev),
                    *dict.fromkeys(f"/proc/{user.pid}/fd: {user.node}" for user in users),
                ),
                f"{context.fix('libvirt does not know this process; ', '')}QEMU fails with "
                '"Device or resource busy"',
                "end that guest or process; vfiomgr show lists it",
                subject=holder,
            )


def by_pod(context: PreflightContext) -> Iterator[Diagnostic]:
    """Report devices of pods: the kubelet does not ask libvirt before it starts their guests."""
    reporter = f"the kubelet's record has it: {RECORD}"
    if context.host.users.running_agent is not None:
        reporter = f"the node agent reports it: {CONTROL}"
    for hostdev, holder in _holders(context):
        for diagnostic in held_by_pod(context.host, holder):
            is_unknown = diagnostic.rule == UNKNOWN
            reported = () if is_unknown else (reporter,)
            yield finding(
                diagnostic.rule,
                "warning" if is_unknown else "blocker",
                diagnostic.summary,
                (context.cite(hostdev), *reported),
                "only one guest can use a device at a time",
                str(diagnostic.remedies[0]),
                subject=holder,
            )


def _holders(context: PreflightContext) -> Iterator[tuple[DomainHostdev, PciDevice | Vgpu]]:
    for taken in context.functions:
        yield taken.hostdev, taken.device
    yield from context.vgpus


def _is_itself(context: PreflightContext, user: DeviceUser) -> bool:
    """Whether it is this domain's own QEMU, as far as known."""
    if user.guest != context.domain.name:
        return False
    itself = context.itself
    return context.hypervisor is None or (itself is not None and itself.is_active)


def not_viable(context: PreflightContext) -> Iterator[Diagnostic]:
    """QEMU: "group N is not viable"; libvirt does not check it (vfio_group_set_container)."""
    for number in sorted(context.groups):
        members = context.host.group_members(number)
        staying = [d for d in blockers(members) if d.address not in context.addresses]
        if not staying:
            continue
        own = [taken for taken in context.functions if taken.device.iommu_group == number]
        if any(taken.device.address in context.hook_needs.functions for taken in own):
            continue  # what it cannot bind, the rules of the hook tell
        names = ", ".join(str(taken.device) for taken in own)
        yield problem(
            "group-not-viable",
            f"IOMMU group {number} of {names} also contains devices on host drivers",
            (
                *(context.cite(taken.hostdev) for taken in own),
                *(f"{IOMMU_GROUPS}/{number}/devices/{d.address}: on {d.driver}" for d in staying),
            ),
            'all devices of a group must be available to the guest: QEMU exits with "group is '
            'not viable"',
            _clearance(context.host, own, staying),
        )


def reserved_regions(context: PreflightContext) -> Iterator[Diagnostic]:
    """QEMU: "failed to set iommu for container" or "failed to set group container"."""
    for number in sorted(context.groups):
        own = [taken for taken in context.functions if taken.device.iommu_group == number]
        for found in reserved_region(context.host, own[0].device) if own else ():
            yield finding(
                found.rule,
                "warning" if found.override else "blocker",
                found.summary,
                (
                    *(context.cite(taken.hostdev) for taken in own),
                    f"{IOMMU_GROUPS}/{number}/reserved_regions: type direct",
                ),
                "a guest that gets the group may break the firmware's access to it"
                if found.override
                else "the kernel does not give the group to VFIO: QEMU exits",
                found.without("allow").remedy,
                subject=found.subject,
            )


def _clearance(
    host: HostSnapshot, own: Sequence[AssignedFunction], staying: Sequence[PciDevice]
) -> str:
    """How to make a group viable: bind entire devices, with the group, or use another slot."""
    if all(host.is_integrated(taken.device) for taken in own):
        elsewhere = f"remove the <hostdev>, and {INSTEAD}, or an emulated one"
    else:
        elsewhere = "move the device to a slot with its own IOMMU group"
    if any(chipset_role(device) is not None for device in staying):
        return elsewhere
    if any(device.is_bridge for device in staying):
        return (
            "move the device to a slot with its own IOMMU group, or enable ACS in the firmware "
            "setup: the group contains a bridge, which stays on the host"
        )
    along = [other for taken in own for other in host.slot(taken.device)]
    if all(device in along for device in staying):
        return how_to_bind(host, staying)
    first = own[0].device
    is_refused = diagnostics_to_bind(host, [first], with_group=True)
    gone = "" if is_refused else " (the host can then no longer use these devices)"
    return f"{how_to_bind(host, [first], with_group=True)}{gone}; or {elsewhere}"


def shared_with_running(context: PreflightContext) -> Iterator[Diagnostic]:
    """Libvirt checks the entire group (virHostdevIsPCINodeDeviceUsed)."""
    for number in sorted(context.groups):
        for device, claim in _held_members(context, number):
            other = claim.domain
            own = [t for t in context.functions if t.device.iommu_group == number]
            yield problem(
                "group-held-by-domain",
                f"IOMMU group {number} is in use by the running domain {other.name}, which has "
                f"{device}",
                (
                    *(context.cite(taken.hostdev) for taken in own),
                    f"{IOMMU_GROUPS}/{number}/devices/{device.address}",
                    f"domain {other.name} is running with {device.address}",
                ),
                "only one guest can use an IOMMU group",
                f"virsh shutdown {other.argument}, or assign both devices to one domain",
                subject=device,
            )


def _held_members(context: PreflightContext, number: int) -> Iterator[tuple[PciDevice, Claim]]:
    """Members of a group that other domains have, and that this domain does not use."""
    for device in context.host.group_members(number):
        if device.address not in context.addresses:
            for claim in context.claims_of_others(str(device.address)):
                if claim.is_held:
                    yield device, claim


def no_reset(context: PreflightContext) -> Iterator[Diagnostic]:
    """VFIO resets a bus only as one, if the guest has all of it (VFIO_DEVICE_PCI_HOT_RESET)."""
    if not any(device.reset_method for device in context.host.devices):
        return  # a kernel before 5.15, or a recording without the attribute
    for taken in context.functions:
        device = taken.device
        if device.reset_method or device.physical_function or device.is_bridge:
            continue
        if not device.is_responsive:
            continue
        others = [
            other
            for other in context.host.beside(device)
            if other.bridge_path == device.bridge_path
            and not (other.is_bridge or other.address in context.addresses)
            and other.iommu_group not in context.groups
        ]
        if not others:
            continue
        yield warning(
            "no-reset",
            f"cannot reset {device}, alone or with the other functions of its bus",
            (
                f"{sysfs(device)}/reset_method is missing or empty",
                *(f"{driver_of(other)}, on the same bus" for other in others),
            ),
            "the guest finds the device in its last state, and may fail to start it a second time",
            f"assign all functions of its bus to {context.guest}: {addresses(others)}",
            subject=device,
        )
