"""The safety checks before a device is attached to a domain or detached from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from vfiomgr.diagnostic import Diagnostic, blocker
from vfiomgr.guests.vf_token import diagnostics as vf_token_diagnostics
from vfiomgr.libvirt.attach.claims import disk_diagnostic, free_ports, is_express, is_given
from vfiomgr.libvirt.build import vf_token
from vfiomgr.libvirt.build.address_spaces import space_diagnostics
from vfiomgr.libvirt.build.confidential import FEATURES, QEMU_WITH_DEVICES
from vfiomgr.libvirt.build.hostdevs import without_groups
from vfiomgr.libvirt.releases import VENDOR_FUNCTION
from vfiomgr.passthrough.guards import held_by_pod, taking
from vfiomgr.passthrough.readiness_hints import as_commands, how_to_bind
from vfiomgr.paths import SCRIPT
from vfiomgr.pci.iommu import blockers

if TYPE_CHECKING:
    from vfiomgr.libvirt.attach.plan import Attachment, AttachRequest, Detachment
    from vfiomgr.libvirt.model import Domain, DomainHostdev, Hypervisor, KnownDomain
    from vfiomgr.pci.model import PciAddress, PciDevice
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.users.model import DeviceUser


def detach_diagnostics(domain: KnownDomain, items: Sequence[Detachment]) -> Iterator[Diagnostic]:
    """Why a domain cannot release a device, or not while it runs."""
    for item in items:
        hostdev = item.hostdev
        if hostdev.element == "disk":
            yield disk_diagnostic(domain, hostdev)
        elif hostdev.element == "interface":
            yield blocker(
                "device-is-interface",
                hostdev.name,
                f"{hostdev.name} is a network interface of {domain.name}",
                f"virsh detach-interface {domain.argument} hostdev",
            )
        elif item.scope.live and _is_multifunction(domain.running, hostdev):
            yield blocker(
                "multifunction-device",
                hostdev.name,
                f"cannot detach {hostdev.name} from a running guest: it belongs to a "
                "multifunction device",
                f"pass --config; the change takes effect when {domain.name} is restarted",
            )


def _is_multifunction(domain: Domain | None, hostdev: DomainHostdev) -> bool:
    """Whether qemuDomainDetachDeviceLive rejects it (src/qemu/qemu_hotplug.c)."""
    guest = hostdev.guest
    if domain is None or guest is None:
        return False
    others = [address for address in domain.taken if address.device == guest.device]
    return guest.multifunction or guest.function > 0 or len(others) > 1


def attach_diagnostics(
    host: HostSnapshot,
    hypervisor: Hypervisor,
    domain: KnownDomain,
    request: AttachRequest,
    items: Sequence[Attachment],
) -> Iterator[Diagnostic]:
    """All reasons against attaching these devices."""
    # the hook binds the devices of a domain that enables it before its next start
    defined, has_hook = domain.defined, host.files.text(SCRIPT) is not None
    is_hooked = defined is not None and defined.is_bound_by_hook and has_hook
    coming = {
        device.address
        for item in items
        for device in item.functions
        if request.managed or (is_hooked and not item.scope.live)
    }
    for item in items:
        yield from _part_diagnostics(domain, item)
        yield from _disk_diagnostics(domain, item)
        yield from without_groups(item.unit)
        if item.scope.live and not item.is_active:
            yield blocker(
                "vgpu-inactive",
                item.unit.vgpu_uuid,
                f"vGPU {item.unit.vgpu_uuid} is defined but not active, and {domain.name} is "
                "running",
                f"vfiomgr vgpu start {item.unit.vgpu_uuid}",
            )
        for device in item.functions:
            yield from _readiness(host, hypervisor, device, request, coming)
        yield from _held_elsewhere(host, hypervisor, domain, item, request)
    yield from _token_diagnostics(host, domain, items)
    yield from _confidential_diagnostics(hypervisor, domain, items)
    live = [item for item in items if item.scope.live]
    yield from _live_diagnostics(hypervisor, domain, live, request)
    for item in live:
        yield from _strangers(host, hypervisor, item)
    yield from _space_diagnostics(host, domain, items)


def _space_diagnostics(
    host: HostSnapshot, domain: KnownDomain, items: Sequence[Attachment]
) -> Iterator[Diagnostic]:
    """Address space conflicts of a guest with an IOMMU, as it runs and as it is defined."""
    live = [item.unit for item in items if item.scope.live]
    config = [item.unit for item in items if item.scope.config]
    found: list[Diagnostic] = []
    for side, coming in ((domain.running, live), (domain.defined, config)):
        found += () if side is None else space_diagnostics(host, side, coming)
    yield from dict.fromkeys(found)


def _part_diagnostics(domain: KnownDomain, item: Attachment) -> Iterator[Diagnostic]:
    """Refuse a device of which the domain already has some functions, with a fixed place."""
    sides = (
        ("--live", item.scope.live, domain.running),
        ("--config", item.scope.config, domain.defined),
    )
    for option, is_meant, side in sides:
        there = [name for name in item.names if is_given(side, name)]
        missing = [name for name in item.names if name not in there]
        if is_meant and there and missing:
            yield blocker(
                "slot-split",
                domain.name,
                f"{domain.name} has {', '.join(there)}, but not {', '.join(missing)} of the same "
                f"slot ({'the running guest' if side is domain.running else 'its definition'})",
                "detach it first, then attach the entire device: vfiomgr libvirt detach "
                f"{domain.argument} {there[0]} {option}; or attach {missing[0]} with "
                "--function-only",
            )


def _disk_diagnostics(domain: KnownDomain, item: Attachment) -> Iterator[Diagnostic]:
    """Functions that the domain uses as NVMe disks, and that the guest does not see."""
    sides = [side for side in (domain.running, domain.defined) if side is not None]
    for name in item.names:
        found = [known for side in sides if (known := side.hostdev(name)) is not None]
        yield from (disk_diagnostic(domain, one) for one in found[:1] if one.element == "disk")


def _token_diagnostics(
    host: HostSnapshot, domain: KnownDomain, items: Sequence[Attachment]
) -> Iterator[Diagnostic]:
    """Functions without the VF token that they need, which only the XML of a domain can contain.

    libvirt applies `<qemu:override>` to the command line alone (qemuBuildDeviceCommandlineFromJSON
    in src/qemu/qemu_command.c), so not to what is attached to a running domain.
    """
    has_token = domain.defined is not None and vf_token.is_in(domain.defined)
    for item in items:
        if item.scope.live or not has_token:
            yield from vf_token_diagnostics(
                host, [item.unit], None if item.scope.live else vf_token.HOW
            )


def _confidential_diagnostics(
    hypervisor: Hypervisor, domain: KnownDomain, items: Sequence[Attachment]
) -> Iterator[Diagnostic]:
    """A QEMU that maps no devices into confidential guests, neither at the start nor later."""
    qemu = hypervisor.qemu
    launch = confidential(domain, items)
    if launch is not None and qemu is not None and qemu < QEMU_WITH_DEVICES:
        yield blocker(
            "confidential-old-qemu",
            domain.name,
            f"QEMU {qemu} does not support host devices in {domain.name}, a guest with {launch}",
            f"install QEMU {QEMU_WITH_DEVICES} or later",
        )


def confidential(domain: KnownDomain, items: Sequence[Attachment]) -> str | None:
    """The kind of the domain, if it is a confidential guest where devices are attached."""
    sides = (
        domain.running if any(item.scope.live for item in items) else None,
        domain.defined if any(item.scope.config for item in items) else None,
    )
    launches = (side.launch for side in sides if side is not None and side.launch is not None)
    return next((launch.kind for launch in launches if launch.kind in FEATURES), None)


def _readiness(
    host: HostSnapshot,
    hypervisor: Hypervisor,
    device: PciDevice,
    request: AttachRequest,
    coming: set[PciAddress],
) -> Iterator[Diagnostic]:
    """Whether a guest can open a function, together with its IOMMU group.

    Functions in `coming` are bound before the guest starts: by libvirt, or by vfiomgr's hook.
    """
    if host.vgpus.is_vendor_function(device):
        yield from _vendor_diagnostics(host, hypervisor, device, request)
        return
    if device.address in coming:
        if not device.is_on_vfio:
            when = "yourself" if request.managed else "before the start"
            bind = f"bind it {when} with: vfiomgr bind {device.address}"
            then = ", and omit --managed" if request.managed else ""
            yield from as_commands(taking(host, [device]), bind, then)
    elif not device.is_on_vfio:
        yield blocker(
            "on-host-driver",
            device,
            f"{device} is on {device.driver or 'no driver'}; a guest can only open devices on a "
            "VFIO driver",
            how_to_bind(host, [device]),
        )
        return
    staying = [
        d for d in blockers(host.group_members(device.iommu_group)) if d.address not in coming
    ]
    if staying:
        names = ", ".join(f"{d} on {d.driver}" for d in staying)
        yield blocker(
            "group-not-viable",
            device,
            f"IOMMU group {device.iommu_group} also contains {names}",
            f"vfiomgr bind {device.address} --with-group (if the host does not need these devices)",
        )


def _vendor_diagnostics(
    host: HostSnapshot, hypervisor: Hypervisor, device: PciDevice, request: AttachRequest
) -> Iterator[Diagnostic]:
    """Why a virtual function on its vendor's driver cannot be attached as a vGPU."""
    if not host.vgpus.is_ready_for_guests(device):
        yield blocker(
            "vgpu-missing",
            device,
            f"{device} has no vGPU",
            f"vfiomgr vgpu create --parent {device.address} --type …",
        )
    if request.managed:
        yield blocker(
            "managed-vendor-function",
            device,
            f"{device} is a vGPU on driver {device.driver}, which libvirt must not unbind",
            "omit --managed",
        )
    if not VENDOR_FUNCTION.is_in(hypervisor.libvirt):
        yield blocker(
            "vendor-function-old-libvirt",
            device,
            f"{device} needs libvirt {VENDOR_FUNCTION.since} or later ({VENDOR_FUNCTION.what}); "
            f"this is {hypervisor.libvirt}",
            f"install libvirt {VENDOR_FUNCTION.since} or later on this host",
        )


def _held_elsewhere(
    host: HostSnapshot,
    hypervisor: Hypervisor,
    domain: KnownDomain,
    item: Attachment,
    request: AttachRequest,
) -> Iterator[Diagnostic]:
    """Other domains of this libvirt that have the device, or another device of its group."""
    groups = {device.iommu_group for device in item.functions} - {None}
    mates = {str(d.address) for group in groups for d in host.group_members(group)}
    for other in hypervisor.domains:
        if other.uuid == domain.uuid:
            continue
        used = _names(other.running)
        for name in item.names:
            if name in used and item.scope.live:
                yield blocker(
                    "held-by-domain",
                    name,
                    f"{name} is in use by the running domain {other.name}",
                    f"vfiomgr libvirt detach {other.argument} {name}, or stop that domain",
                )
            elif name in used | _names(other.defined) and not request.allow_claimed:
                state = "runs" if name in used else "is off"
                yield blocker(
                    "claimed-by-domain",
                    name,
                    f"{name} is claimed by domain {other.name}, which {state}",
                    f"vfiomgr libvirt detach {other.argument} {name} --config; or pass --allow "
                    "claimed if the domains never run at the same time",
                )
        for name in sorted((mates & used) - set(item.names)) if item.scope.live else ():
            yield blocker(
                "group-held-by-domain",
                name,
                f"{name} of the same IOMMU group is in use by the running domain {other.name}",
                f"stop {other.name}, or assign both devices to one domain",
            )


def _names(domain: Domain | None) -> set[str]:
    return set() if domain is None else {hostdev.name for hostdev in domain.hostdevs} - {""}


def _live_diagnostics(
    hypervisor: Hypervisor, domain: KnownDomain, items: Sequence[Attachment], request: AttachRequest
) -> Iterator[Diagnostic]:
    running = domain.running
    if running is None or not items:
        return
    if hypervisor.offers_vfio is False:
        yield blocker(
            "libvirt-without-vfio",
            "",
            "libvirt finds no VFIO support on its host",
            "vfiomgr check shows what is missing",
        )
    for item in items:
        if len(item.functions) > 1:
            names = ", ".join(item.names)
            only = "" if request.only else f", or attach only {item.names[0]} with --function-only"
            yield blocker(
                "multifunction-device",
                names,
                f"cannot attach {names} to a running guest: libvirt attaches one function at a "
                "time",
                f"pass --config and restart {domain.name}{only}",
            )
    free = [port for port in free_ports(running) if port.has_hotplug]
    if is_express(running) and len(free) < len(items):
        yield blocker(
            "no-free-port",
            domain.name,
            f"{domain.name} has {len(free) or 'no'} free root port"
            f"{'s' if len(free) > 1 else ''}, but {len(items)} needed while it runs",
            f"pass --config and restart {domain.name}: libvirt then adds one port; for more "
            "devices add <controller type='pci' model='pcie-root-port'/> to its <devices>, once "
            "per device",
        )


def _strangers(
    host: HostSnapshot, hypervisor: Hypervisor, item: Attachment
) -> Iterator[Diagnostic]:
    """Pods that have the device, and processes that use it and are not domains of this libvirt."""
    domains = {known.name for known in hypervisor.domains}
    vgpu = item.unit.vgpu
    holders = (*item.functions, *((vgpu,) if vgpu is not None else ()))
    users: dict[DeviceUser, None] = {}
    for holder in holders:
        users.update(dict.fromkeys(host.users.of_nodes(host.guest_nodes(holder))))
        yield from (found.without("allow") for found in held_by_pod(host, holder))
    strange = dict.fromkeys(str(user) for user in users if user.guest not in domains)
    if strange:
        yield blocker(
            "held-by-process",
            item.names[0],
            f"{' and '.join(item.names)} is in use by {', '.join(strange)}",
            "end the process first",
        )
