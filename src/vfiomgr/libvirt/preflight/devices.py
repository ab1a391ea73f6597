"""Rules about other users of a device: domains, processes, members of its IOMMU group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.diagnostic import Diagnostic, finding
from vfiomgr.expressions import expression
from vfiomgr.guests.nvlink import nvlink_share
from vfiomgr.libvirt.preflight.context import addresses, driver_of, sysfs
from vfiomgr.libvirt.preflight.presence import seen
from vfiomgr.listing import first_of
from vfiomgr.passthrough.guards import UNKNOWN, held_by_pod
from vfiomgr.passthrough.readiness_hints import diagnostics_to_bind, how_to_bind
from vfiomgr.paths import IOMMU_GROUPS
from vfiomgr.pci.iommu import blockers
from vfiomgr.pci.model import CLASS_DISPLAY
from vfiomgr.users.node_agent import CONTROL
from vfiomgr.users.pod_devices import RECORD

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vfiomgr.libvirt.model import DomainHostdev, KnownDomain
    from vfiomgr.libvirt.preflight.context import AssignedFunction, DeviceOwner, PreflightContext
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.users.model import DeviceUser
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
        starting = [other.argument for other in others if other.autostarts]
        yield finding(
            "claimed-by-domain",
            "warning",
            f"{_counted(others)} {hostdev.name}",
            (
                context.cite(hostdev),
                *(_defined(other, hostdev.name) for other in known),
                *more,
            ),
            "the domain that starts first gets the device; the other one fails to start",
            "do not run them at the same time, or assign different devices"
            + (
                f"; disable the autostart of one: virsh autostart --disable {starting[0]}"
                if starting
                else ""
            ),
            subject=hostdev.name,
        )


_SHOWN = 4
"""The number of domains to list; a host may have hundreds."""


def _counted(others: Sequence[KnownDomain]) -> str:
    if len(others) == 1:
        return f"domain {others[0].name} also claims"
    return f"{len(others)} other domains also claim"


def _defined(domain: KnownDomain, device: str) -> str:
    start = ", and starts at boot" if domain.autostarts else ""
    return f"domain {domain.name} is defined, with {device}{start}"


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
            yield finding(
                "held-by-process",
                "blocker",
                f"{holder} is in use by {', '.join(dict.fromkeys(map(str, users)))}",
                (
                    context.cite(hostdev),
                    *dict.fromkeys(f"/proc/{user.pid}/fd: {user.node}" for user in users),
                ),
                'libvirt does not know this process; QEMU fails with "Device or resource busy"',
                "end that guest or process; vfiomgr show lists it",
                subject=holder,
            )


def by_pod(context: PreflightContext) -> Iterator[Diagnostic]:
    """Report devices of pods: the kubelet does not ask libvirt before it starts their guests."""
    for hostdev, holder in _holders(context):
        for diagnostic in held_by_pod(context.host, holder):
            is_unknown = diagnostic.rule == UNKNOWN
            reported = () if is_unknown else (_reporter(context.host),)
            yield finding(
                diagnostic.rule,
                "warning" if is_unknown else "blocker",
                diagnostic.summary,
                (context.cite(hostdev), *reported),
                "only one guest can use a device at a time",
                str(diagnostic.remedies[0]),
                subject=holder,
            )


def _reporter(host: HostSnapshot) -> str:
    """The source of the pods of devices."""
    if host.users.running_agent is not None:
        return f"the node agent reports it: {CONTROL}"
    return f"the kubelet's record has it: {RECORD}"


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


_NVIDIA = "10de"
_BEFORE_465 = expression(r"\b(?:NV\d|G[89]\d|GT2\d\d|GF1\d\d)")
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
            f"{hostdev.name} has a boot order, but <os> has one too",
            (
                context.cite(hostdev, f"<boot order='{hostdev.boot_order}'>"),
                f"{context.at(line)}: <boot dev>",
            ),
            "libvirt rejects a domain with both",
            f"remove <boot dev> in line {line} and give the disk a <boot order> instead",
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
                f"the ROM of {hostdev.name} has a relative path: {path}",
                (context.cite(hostdev, f"<rom file='{path}'>"),),
                "QEMU looks for it among its own files and exits if it is missing; libvirt's "
                "schema rejects it",
                f"write an absolute path in line {hostdev.line}",
                subject=hostdev.name,
            )
        elif context.files is not None and not context.files.get(path, True):
            yield finding(
                "rom-missing",
                "blocker",
                f"the ROM of {hostdev.name} does not exist: {path}",
                (context.cite(hostdev, f"<rom file='{path}'>"), f"no such file: {path}"),
                'QEMU exits with "failed to find romfile"',
                f"install the ROM file, or remove <rom file> in line {hostdev.line} (most cards "
                "do not need it)",
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
        f"the domain has {own} of {gpus} GPUs",
    )
    if share.is_divided:
        yield finding(
            "fabric-divided",
            "warning",
            f"the domain has only {len(share.own_switches)} of {len(share.switches)} NVSwitches "
            f"and {own} of {gpus} GPUs",
            evidence,
            "a fabric cannot be divided: with a part of it CUDA does not start (error 802)",
            "assign all GPUs and all NVSwitches, or only GPUs",
        )
    elif share.needs_partition:
        yield finding(
            "fabric-partition",
            "info",
            f"{own} GPUs of an NVLink fabric are assigned without its switches",
            evidence,
            "only the Fabric Manager knows whether they form a partition; without one CUDA does "
            "not start (error 802)",
            "activate their partition on the host before the start: fmpm -a ID (fmpm -l lists "
            "them)",
        )


def _cite_switch(switch: PciDevice, *, is_own: bool) -> str:
    return f"{sysfs(switch)}: NVSwitch{', in the domain' if is_own else ''}"


def code_43(context: PreflightContext) -> Iterator[Diagnostic]:
    """Drivers before 465 stop in a guest that reports KVM."""
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
            "all drivers for a GeForce of this generation refuse to run on KVM (fixed in 465)",
            "write <kvm><hidden state='on'/></kvm> into <features>, like vfiomgr libvirt domain "
            "--hide-kvm",
            subject=device,
        )


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
        yield finding(
            "group-not-viable",
            "blocker",
            f"IOMMU group {number} of {names} also contains devices on host drivers",
            (
                *(context.cite(taken.hostdev) for taken in own),
                *(f"{IOMMU_GROUPS}/{number}/devices/{d.address}: on {d.driver}" for d in staying),
            ),
            'all devices of a group must be available to the guest: QEMU exits with "group is '
            'not viable"',
            _clearance(context.host, own, staying),
        )


def _clearance(
    host: HostSnapshot, own: Sequence[AssignedFunction], staying: Sequence[PciDevice]
) -> str:
    """How to make a group viable: bind entire slots, with the group, or use another slot."""
    if any(device.is_bridge for device in staying):
        return (
            "move the device to a slot with its own IOMMU group, or enable ACS in the firmware "
            "setup: the group contains a bridge, which stays on the host"
        )
    slots = {taken.device.address.slot for taken in own}
    if all(device.address.slot in slots for device in staying):
        return how_to_bind(host, staying)
    first = own[0].device
    is_refused = diagnostics_to_bind(host, [first], with_group=True)
    gone = "" if is_refused else " (the host can then no longer use these devices)"
    return (
        f"{how_to_bind(host, [first], with_group=True)}{gone}; or move the device to a slot with "
        "its own IOMMU group"
    )


def shared_with_running(context: PreflightContext) -> Iterator[Diagnostic]:
    """Libvirt checks the entire group (virHostdevIsPCINodeDeviceUsed)."""
    for number in sorted(context.groups):
        for device, claim in _held_members(context, number):
            other = claim.domain
            own = [t for t in context.functions if t.device.iommu_group == number]
            yield finding(
                "group-held-by-domain",
                "blocker",
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


def _held_members(
    context: PreflightContext, number: int
) -> Iterator[tuple[PciDevice, DeviceOwner]]:
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
        others = [d for d in _on_its_bus(context, device) if not _is_owned(context, d)]
        if not others:
            continue
        yield finding(
            "no-reset",
            "warning",
            f"cannot reset {device}, alone or with the other functions of its bus",
            (
                f"{sysfs(device)}/reset_method is missing or empty",
                *(f"{driver_of(other)}, on the same bus" for other in others),
            ),
            "the guest finds the device in its last state, and may fail to start it a second time",
            f"assign all functions of its bus to the domain: {addresses(others)}",
            subject=device,
        )


def _on_its_bus(context: PreflightContext, device: PciDevice) -> list[PciDevice]:
    """The other functions below the same port, which are reset together."""
    return [
        other
        for other in context.host.beside(device)
        if other.bridge_path == device.bridge_path and not other.is_bridge
    ]


def _is_owned(context: PreflightContext, device: PciDevice) -> bool:
    return device.address in context.addresses or device.iommu_group in context.groups
