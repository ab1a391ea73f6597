"""Rules about who else has a device: domains, processes, members of its IOMMU group."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from vfiomgr.diagnostic import Diagnostic, finding
from vfiomgr.libvirt.build.hostdevs import nvlink_share
from vfiomgr.libvirt.preflight.context import addresses, driver_of, sysfs
from vfiomgr.libvirt.preflight.presence import seen
from vfiomgr.passthrough.readiness_hints import diagnostics_to_bind, how_to_bind
from vfiomgr.paths import IOMMU_GROUPS
from vfiomgr.pci.iommu import blockers
from vfiomgr.pci.model import CLASS_DISPLAY

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vfiomgr.libvirt.hostdev import DomainHostdev
    from vfiomgr.libvirt.model import KnownDomain
    from vfiomgr.libvirt.preflight.context import AssignedFunction, DeviceOwner, PreflightContext
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import DeviceUser, HostSnapshot
    from vfiomgr.vgpu.model import Vgpu


def by_running_domain(context: PreflightContext) -> Iterator[Diagnostic]:
    """Libvirt: "PCI device … is in use by driver QEMU, domain …"."""
    for hostdev in context.hostdevs:
        for claim in context.claims_of_others(hostdev.name):
            if not claim.is_held:
                continue
            other = claim.domain.name
            yield finding(
                "held-by-domain",
                "blocker",
                f"the running domain {other} has {hostdev.name}",
                (context.cite(hostdev), f"domain {other} is running, with {hostdev.name}"),
                "a device serves one guest at a time",
                f"virsh shutdown {claim.domain.argument}, or "
                f"vfiomgr libvirt detach {claim.domain.argument} {hostdev.name}",
                subject=hostdev.name,
            )


def by_defined_domain(context: PreflightContext) -> Iterator[Diagnostic]:
    """Libvirt itself looks at running domains alone."""
    for hostdev in context.hostdevs:
        claims = context.claims_of_others(hostdev.name)
        others = [c.domain for c in claims if c.defined is not None and not c.is_held]
        if not others:
            continue
        starting = [other.argument for other in others if other.autostarts]
        yield finding(
            "claimed-by-domain",
            "warning",
            f"{_counted(others)} {hostdev.name} too",
            (
                context.cite(hostdev),
                *(_defined(other, hostdev.name) for other in others[:_SHOWN]),
                *_beyond(others),
            ),
            "whichever starts first has it, and the other one does not start",
            "keep them from running at once, or give them different devices"
            + (f"; virsh autostart --disable {starting[0]} for one of them" if starting else ""),
            subject=hostdev.name,
        )


_SHOWN = 4
"""Domains to name; a host may have hundreds."""


def _counted(others: Sequence[KnownDomain]) -> str:
    if len(others) == 1:
        return f"the domain {others[0].name} claims"
    return f"{len(others)} other domains claim"


def _defined(domain: KnownDomain, device: str) -> str:
    start = ", and starts with the host" if domain.autostarts else ""
    return f"domain {domain.name} is defined, with {device}{start}"


def _beyond(others: Sequence[KnownDomain]) -> tuple[str, ...]:
    more = len(others) - _SHOWN
    return (f"and {more} more: vfiomgr libvirt list",) if more > 0 else ()


def by_process(context: PreflightContext) -> Iterator[Diagnostic]:
    """VFIO: a group or a cdev has one owner (vfio_group_open, EBUSY)."""
    known = {d.name for d in _domains(context) if d.is_active and d is not context.itself}
    for hostdev, holder in _holders(context):
        nodes = context.host.guest_nodes(holder)
        users = [
            user
            for user in context.host.users_of(nodes)
            if user.guest not in known and not _is_itself(context, user)
        ]
        if users:
            yield finding(
                "held-by-process",
                "blocker",
                f"{holder} is held by {', '.join(dict.fromkeys(map(str, users)))}",
                (
                    context.cite(hostdev),
                    *dict.fromkeys(f"/proc/{user.pid}/fd: {user.node}" for user in users),
                ),
                "libvirt knows nothing of it, and QEMU finds the device busy",
                "end that guest or process: vfiomgr show names it",
                subject=holder,
            )


def _domains(context: PreflightContext) -> tuple[KnownDomain, ...]:
    return context.hypervisor.domains if context.hypervisor else ()


def _holders(context: PreflightContext) -> Iterator[tuple[DomainHostdev, PciDevice | Vgpu]]:
    for taken in context.functions:
        yield taken.hostdev, taken.device
    yield from context.vgpus


def _is_itself(context: PreflightContext, user: DeviceUser) -> bool:
    """Whether it is this domain's own QEMU, by all that is known."""
    if user.guest != context.domain.name:
        return False
    itself = context.itself
    return context.hypervisor is None or (itself is not None and itself.is_active)


_NVIDIA = "10de"
_BEFORE_465 = re.compile(r"\b(?:NV\d|G[89]\d|GT2\d\d|GF1\d\d)")
"""Chips whose last drivers are older than 465: GeForce 8 to 500."""


def boot_order(context: PreflightContext) -> Iterator[Diagnostic]:
    """libvirt: "per-device boot elements cannot be used together with os/boot elements" (67)."""
    if not context.domain.has_os_boot:
        return
    for hostdev in context.domain.hostdevs:
        if hostdev.boot_order is None:
            continue
        line = context.domain.line("os/boot")
        yield finding(
            "boot-order-twice",
            "blocker",
            f"{hostdev.name} has a boot order, and <os> has one too",
            (
                context.cite(hostdev, f"<boot order='{hostdev.boot_order}'>"),
                f"{context.at(line)}: <boot dev>",
            ),
            "libvirt rejects the domain: the two contradict each other",
            f"take <boot dev> out of line {line}, and give the disk a <boot order> too",
            subject=hostdev.name,
        )


def rom_file(context: PreflightContext) -> Iterator[Diagnostic]:
    """QEMU reads it as it starts: "failed to find romfile"."""
    for hostdev in context.domain.hostdevs:
        path = hostdev.rom_file
        if path is None:
            continue
        if not path.startswith("/"):
            yield finding(
                "rom-relative",
                "warning",
                f"the ROM of {hostdev.name} is named by the relative path {path}",
                (context.cite(hostdev, f"<rom file='{path}'>"),),
                "QEMU looks for it among its own files, and ends where it is not there; libvirt's "
                "schema rejects it",
                f"write the path from / in line {hostdev.line}",
                subject=hostdev.name,
            )
        elif context.files is not None and not context.files.get(path, True):
            yield finding(
                "rom-missing",
                "blocker",
                f"the ROM of {hostdev.name} is not there: {path}",
                (context.cite(hostdev, f"<rom file='{path}'>"), f"{path} is no file"),
                'QEMU ends with "failed to find romfile"',
                f"put the ROM there, or take <rom file> out of line {hostdev.line}: most cards "
                "need none",
                subject=hostdev.name,
            )


def nvlink(context: PreflightContext) -> Iterator[Diagnostic]:
    """GPUs behind NVSwitches: all with all switches, or a partition of the fabric manager."""
    share = nvlink_share(context.host, {taken.device.address for taken in seen(context)})
    if share is None or not (share.own_gpus or share.own_switches):
        return
    own, gpus = len(share.own_gpus), len(share.gpus)
    evidence = (
        *(_cite_switch(switch, is_own=switch in share.own_switches) for switch in share.switches),
        f"{own} of {gpus} GPUs go to the domain",
    )
    if share.is_divided:
        yield finding(
            "fabric-divided",
            "warning",
            f"the domain takes {len(share.own_switches)} of {len(share.switches)} NVSwitches and "
            f"{own} of {gpus} GPUs",
            evidence,
            "a fabric is one machine's: with a part of it CUDA fails to start (error 802)",
            "give the domain all GPUs and all NVSwitches, or GPUs alone and no switch",
        )
    elif share.needs_partition:
        yield finding(
            "fabric-partition",
            "info",
            f"{own} GPUs of an NVLink fabric go to the domain without its switches",
            evidence,
            "whether they form a partition only the fabric manager tells; without one CUDA fails "
            "to start (error 802)",
            "activate their partition on the host before the start: fmpm -a ID (fmpm -l lists "
            "them)",
        )


def _cite_switch(switch: PciDevice, *, is_own: bool) -> str:
    return f"{sysfs(switch)}: NVSwitch{', of the domain' * is_own}"


def code_43(context: PreflightContext) -> Iterator[Diagnostic]:
    """Drivers before 465 stop in a guest that shows itself as one of KVM."""
    if context.domain.kind != "kvm" or context.domain.cpu.hides_kvm:
        return
    for taken in context.functions:
        device = taken.device
        is_graphics = device.class_code.startswith(CLASS_DISPLAY)
        if device.vendor_id != _NVIDIA or not is_graphics or "GeForce" not in device.name:
            continue
        if not _BEFORE_465.search(device.name):
            continue
        yield finding(
            "code-43",
            "info",
            f"the driver of {device} may stop with Code 43 in a guest",
            (context.cite(taken.hostdev), f"{sysfs(device)}: {device.name}"),
            "all drivers for a GeForce of this age look for KVM; since 465 none does",
            "write <kvm><hidden state='on'/></kvm> into <features>, as vfiomgr libvirt domain "
            "--hide-kvm does",
            subject=device,
        )


def not_viable(context: PreflightContext) -> Iterator[Diagnostic]:
    """QEMU: "group N is not viable"; libvirt does not look (vfio_group_set_container)."""
    for number in sorted(context.groups):
        members = context.host.group_members(number)
        staying = [d for d in blockers(members) if d.address not in context.addresses]
        if not staying:
            continue
        own = [taken for taken in context.functions if taken.device.iommu_group == number]
        if any(taken.device.address in context.hook_needs.functions for taken in own):
            continue  # what it cannot bind, the rules of the hook tell
        names = ", ".join(str(taken.device) for taken in own)
        yield finding(
            "group-not-viable",
            "blocker",
            f"IOMMU group {number} of {names} also holds what host drivers have",
            (
                *(context.cite(taken.hostdev) for taken in own),
                *(f"{IOMMU_GROUPS}/{number}/devices/{d.address}: on {d.driver}" for d in staying),
            ),
            'a group goes to one guest as a whole: QEMU ends with "group is not viable"',
            _clearance(context.host, own, staying),
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


def shared_with_running(context: PreflightContext) -> Iterator[Diagnostic]:
    """Libvirt looks at the whole group (virHostdevIsPCINodeDeviceUsed)."""
    for number in sorted(context.groups):
        for device, claim in _held_members(context, number):
            other = claim.domain
            own = [t for t in context.functions if t.device.iommu_group == number]
            yield finding(
                "group-held-by-domain",
                "blocker",
                f"IOMMU group {number} belongs to the running domain {other.name}, "
                f"which has {device}",
                (
                    *(context.cite(taken.hostdev) for taken in own),
                    f"{IOMMU_GROUPS}/{number}/devices/{device.address}",
                    f"domain {other.name} is running, with {device.address}",
                ),
                "a group goes to one guest as a whole",
                f"virsh shutdown {other.argument}, or give both devices to one domain",
                subject=device,
            )


def _held_members(
    context: PreflightContext, number: int
) -> Iterator[tuple[PciDevice, DeviceOwner]]:
    """Members of a group that other domains have, and this one does not ask for."""
    for device in context.host.group_members(number):
        if device.address not in context.addresses:
            for claim in context.claims_of_others(str(device.address)):
                if claim.is_held:
                    yield device, claim


def no_reset(context: PreflightContext) -> Iterator[Diagnostic]:
    """VFIO resets all below a port at once where the guest owns all (VFIO_DEVICE_PCI_HOT_RESET)."""
    if not any(device.reset_method for device in context.host.devices):
        return  # a kernel before 5.15, or a recording without the attribute
    for taken in context.functions:
        device = taken.device
        if device.reset_method or device.physical_function or device.is_bridge:
            continue
        if not device.is_responsive:
            continue
        others = [d for d in _on_its_bus(context, device) if not _is_owned(context, d)]
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


def _on_its_bus(context: PreflightContext, device: PciDevice) -> list[PciDevice]:
    """The other functions below the same port, which its reset takes along."""
    return [
        other
        for other in context.host.devices
        if other is not device
        and other.address.bus == device.address.bus
        and other.bridge_path == device.bridge_path
        and not other.is_bridge
    ]


def _is_owned(context: PreflightContext, device: PciDevice) -> bool:
    return device.address in context.addresses or device.iommu_group in context.groups
