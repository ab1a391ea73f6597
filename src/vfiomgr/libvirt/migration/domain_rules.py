"""What prevents the migration of a domain, whichever host it goes to.

QEMU refuses with these reasons (vfio_migration_realize in hw/vfio/migration.c, sev.c, QEMU 11.1),
and libvirt passes them on (query-migrate's blocked-reasons, qemuMigrationSrcIsAllowed).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vfiomgr.diagnostic import Diagnostic, Severity, finding, problem, warning
from vfiomgr.libvirt.migration.devices import Migratability, migratability_of, vgpu_migratability
from vfiomgr.libvirt.preflight.settings import mac_addresses
from vfiomgr.rules.runner import RuleSet, register, rule
from vfiomgr.units import Version

if TYPE_CHECKING:
    from vfiomgr.libvirt.model import DomainHostdev
    from vfiomgr.libvirt.preflight.context import PreflightContext

FIRST_QEMU = Version(8, 1)
"""The QEMU whose migration of VFIO devices is no experiment any more."""
SEVERAL_QEMU = Version(8, 2)
"""The QEMU that migrates several VFIO devices, if all support P2P."""
RELAXED_QEMU = Version(11, 0)
"""The QEMU that migrates guests with an IOMMU, if the host's IOMMU tracks dirty pages (iommufd)."""
REASONS_QEMU = Version(6, 0)
"""The QEMU whose query-migrate has blocked-reasons (qapi/migration.json)."""
UNKNOWN = "migration-unknown"
_BLOCKED = "QEMU refuses to migrate the guest"
_TRACKS = "dirty-tracking"
"""Devices that log the pages that they write (vfio_device_features_read of the kernel)."""


def staying(context: PreflightContext) -> list[DomainHostdev]:
    """The devices that QEMU does not unplug for a migration."""
    return [h for h in context.hostdevs if h.element != "disk" and h.partner is None]


def migratability(context: PreflightContext, hostdev: DomainHostdev) -> Migratability | None:
    """Whether a device of a domain can migrate; None if the host does not have it."""
    host = context.host
    if hostdev.kind == "mdev":
        vgpu = host.vgpus.named(hostdev.name)
        return None if vgpu is None else vgpu_migratability(host, vgpu)
    device = host.device_named(hostdev.name)
    return None if device is None else migratability_of(host, device)


def devices(context: PreflightContext) -> Iterator[Diagnostic]:
    """Devices that cannot migrate, are not ready for it, or of which it is unknown."""
    for hostdev in staying(context):
        found = migratability(context, hostdev)
        if found is not None and not hostdev.is_unassigned:
            yield from _judged(context, hostdev, found)


def _judged(
    context: PreflightContext, hostdev: DomainHostdev, found: Migratability
) -> Iterator[Diagnostic]:
    """The finding about one device; none if it can migrate."""
    name = hostdev.name
    rule: str
    severity: Severity = "blocker"
    if found.is_possible is None:
        rule, severity = UNKNOWN, "warning"
        summary = f"whether {name} can migrate is unknown: {found.why}"
        why = "QEMU asks its driver when the guest starts"
        remedy = found.remedy or "as root, read /sys/kernel/debug/vfio (CONFIG_VFIO_DEBUGFS)"
    elif not found.is_possible:
        rule, summary, why = "migration-device", f"{name} cannot migrate: {found.why}", _BLOCKED
        remedy = f"{found.remedy}; or " if found.remedy else ""
        remedy += f"before the migration: {context.removal(hostdev)}; a network device can be "
        remedy += "paired with a virtio interface: vfiomgr libvirt hostdev --teaming"
    elif found.remedy:
        rule, why, remedy = "migration-driver", _BLOCKED, found.remedy
        summary = f"{name} is not on the driver that migrates it"
    elif found.condition:
        rule, severity, remedy = "migration-condition", "info", ""
        summary = f"{name} can migrate, with a condition: {found.condition}"
        why = "vfiomgr cannot see whether it is met"
    else:
        return
    evidence = (context.cite(hostdev), *found.evidence)
    yield finding(rule, severity, summary, evidence, why, remedy, subject=name)


def several(context: PreflightContext) -> Iterator[Diagnostic]:
    """Several devices must all support P2P (vfio_block_multiple_devices_migration)."""
    pairs = [(h, migratability(context, h)) for h in staying(context) if not h.is_unassigned]
    if len(pairs) < 2:  # noqa: PLR2004 - several
        return
    without = [h for h, found in pairs if found is not None and found.has_p2p is False]
    unknown = [h for h, found in pairs if found is None or found.has_p2p is None]
    evidence = tuple(context.cite(hostdev) for hostdev, _ in pairs)
    if without:
        yield problem(
            "migration-several",
            f"{len(pairs)} devices migrate together only if all support P2P; "
            f"{', '.join(h.name for h in without)} does not",
            evidence,
            _BLOCKED,
            f"before the migration: {context.removal(without[0])}",
        )
    elif unknown:
        yield warning(
            "migration-several",
            f"{len(pairs)} devices migrate together only if all support P2P; unknown: "
            f"{', '.join(h.name for h in unknown)}",
            evidence,
            f"otherwise {_BLOCKED}, before {SEVERAL_QEMU} always",
            "as root, read /sys/kernel/debug/vfio/DEVICE/migration/features (Linux 6.18)",
        )


def confidential(context: PreflightContext) -> Iterator[Diagnostic]:
    """QEMU: "SEV: Migration is not implemented"; it cannot read private memory of TDX either."""
    launch = context.domain.launch
    if launch is not None:
        yield problem(
            "migration-confidential",
            f"a confidential guest does not migrate: {launch.kind}",
            (f"{context.at(launch.line)}: <launchSecurity type='{launch.kind}'>",),
            "QEMU cannot read its memory",
            "shut it down, and start it on the other host",
        )


def nvme_disks(context: PreflightContext) -> Iterator[Diagnostic]:
    """libvirt: "Migration without shared storage is unsafe" (qemuMigrationSrcIsSafe)."""
    for hostdev in context.hostdevs:
        if hostdev.element == "disk":
            yield problem(
                "migration-disk",
                f"disk {hostdev.disk_target} is an NVMe controller of this host: {hostdev.name}",
                (context.cite(hostdev),),
                "its content is not on the other host",
                f"before the migration: {context.removal(hostdev)}",
                subject=hostdev.name,
            )


def teaming(context: PreflightContext) -> Iterator[Diagnostic]:
    """A device that is unplugged for a migration needs its partner, by the alias of that."""
    for hostdev in context.hostdevs:
        if hostdev.partner is None or context.domain.interface_of(hostdev) is not None:
            continue
        yield problem(
            "teaming-partner-missing",
            f"{hostdev.name} is paired with {hostdev.partner}, and no interface has that alias",
            (context.cite(hostdev, f"<teaming type='transient' persistent='{hostdev.partner}'>"),),
            "QEMU unplugs it only if a virtio interface with failover replaces it",
            "add <teaming type='persistent'/> and "
            f"<alias name='{hostdev.partner}'/> to a virtio interface",
            subject=hostdev.name,
        )


def viommu(context: PreflightContext) -> Iterator[Diagnostic]:
    """QEMU: "Migration is currently not supported with vIOMMU enabled".

    From 11.0 on only for devices that track the pages that they write; for others the IOMMU of the
    host must do so, through iommufd (vfio_migration_realize). An accelerated SMMUv3 blocks it too
    (smmu_realize in hw/arm/smmuv3.c).
    """
    iommus = context.domain.iommus
    if not iommus or not staying(context):
        return
    uses_iommufd = context.domain.has_iommufd or all(h.iommufd for h in staying(context))
    known = context.qemu
    found = ((h, migratability(context, h)) for h in staying(context))
    tracking = [h.name for h, one in found if one is not None and _TRACKS in (one.features or ())]
    accelerated = any(iommu.is_accelerated for iommu in iommus)
    is_new = uses_iommufd and (known is None or known >= RELAXED_QEMU) and not accelerated
    why = f"it migrates only with iommufd, QEMU {RELAXED_QEMU} or later, and an IOMMU of the host "
    why += "that tracks dirty pages"
    if accelerated:
        why = "QEMU does not migrate an accelerated SMMUv3"
    if is_new and tracking:
        why = f"{_BLOCKED} with devices that track dirty pages themselves: {', '.join(tracking)}"
    yield finding(
        "migration-viommu",
        "warning" if is_new and not tracking else "blocker",
        "the guest has a virtual IOMMU and host devices",
        tuple(map(context.cite_iommu, iommus)),
        why,
        "remove the <iommu>" if len(iommus) == 1 else "remove each <iommu>",
    )


def programs(context: PreflightContext) -> Iterator[Diagnostic]:
    """QEMU before 8.1 has the migration of VFIO devices only as an experiment."""
    known = context.qemu
    if known is None or known >= FIRST_QEMU or not staying(context):
        return
    yield problem(
        "migration-old-qemu",
        f"QEMU {known} does not migrate VFIO devices",
        (f"{context.hypervisor.uri if context.hypervisor else 'program'}: QEMU {known}",),
        "its migration of VFIO devices is an experiment that is off",
        f"install QEMU {FIRST_QEMU} or later",
    )


def not_on_host(context: PreflightContext) -> Iterator[Diagnostic]:
    """Devices that this host does not have, so that nothing is known about them."""
    for hostdev in context.hostdevs:
        host = context.host
        if (
            host.device_named(hostdev.name) is not None
            or host.vgpus.named(hostdev.name) is not None
        ):
            continue
        own = "correct its name, or start the vGPU: vfiomgr vgpu start"
        if hostdev.address is not None:
            own = "correct its address, or plug it in"
        yield problem(
            "migration-device-missing",
            f"this host does not have {hostdev.name}",
            (context.cite(hostdev),),
            "migration depends on the device",
            f"{own}; or name the host that has it: --snapshot FILE",
            subject=hostdev.name,
        )


def blocked_by_qemu(context: PreflightContext) -> Iterator[Diagnostic]:
    """Reasons of the running guest, in QEMU's words: blockers, and devices without a state."""
    name = context.domain.name
    for reason in context.blocked_reasons or ():
        yield problem(
            "migration-blocked",
            f"QEMU refuses to migrate {name}: {reason}",
            (f"query-migrate of QEMU of {name}: blocked-reasons",),
            "QEMU says so about the guest as it runs now",
            "detach what the reason names, or shut the guest down and start it on the other host",
        )


def _unknown(context: PreflightContext) -> Iterator[str]:
    """The devices of which it is unknown whether they can migrate."""
    for hostdev in staying(context):
        found = migratability(context, hostdev)
        if found is not None and found.is_possible is None and not hostdev.is_unassigned:
            yield f"whether {hostdev.name} can migrate: {found.why}"


def _not_checked(context: PreflightContext) -> Iterator[str]:
    yield "disks, networks and other devices: libvirt checks them"
    is_running = context.itself is not None and context.itself.is_active
    if context.blocked_reasons is None and is_running:
        yield "whether QEMU of the running guest refuses: pass --ask-qemu (it taints the domain)"
    support = context.host.guest_support
    if support is None or support.migration is None:
        yield "what the kernel says about migration: no /sys/kernel/debug/vfio, or not root"
    if context.qemu is None and (support is None or support.qemu is None):
        yield "the version of QEMU: unknown"


RULES: RuleSet[PreflightContext] = register(
    RuleSet(
        "the migration of a domain",
        rules=(
            rule(confidential, "migration-confidential"),
            rule(devices, UNKNOWN, "migration-device", "migration-driver", "migration-condition"),
            rule(several, "migration-several"),
            rule(nvme_disks, "migration-disk"),
            rule(teaming, "teaming-partner-missing"),
            rule(mac_addresses, "teaming-mac"),
            rule(viommu, "migration-viommu"),
            rule(programs, "migration-old-qemu"),
            rule(not_on_host, "migration-device-missing"),
            rule(blocked_by_qemu, "migration-blocked"),
        ),
        not_checked=(_not_checked,),
        unknown=(_unknown,),
    )
)
