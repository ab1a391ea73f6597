"""Check the migration of a domain: what its host says, and which other hosts fit; pure.

A guest keeps its devices when it migrates: each needs one of the same model, on the same driver, or
a vGPU of the same type. The element in the domain may name another address or UUID there (virsh
migrate --xml); libvirt compares only the guest's side (virDomainHostdevDefCheckABIStability in
src/conf/domain_conf.c), from 11.0 on also between a mediated device and a virtual function.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.libvirt.migration import domain_rules, target_rules
from vfiomgr.libvirt.migration.devices import migratability_of
from vfiomgr.libvirt.migration.target_rules import Comparison
from vfiomgr.libvirt.preflight.context import PreflightContext, claims_of
from vfiomgr.libvirt.preflight.plan import preflight
from vfiomgr.pci.model import PciAddress, PciDevice, is_address
from vfiomgr.rules.runner import Report
from vfiomgr.value import Value
from vfiomgr.vgpu.capacity import gpus, room
from vfiomgr.vgpu.model import Vgpu, types_called

if TYPE_CHECKING:
    from vfiomgr.libvirt.model import Domain, DomainHostdev, Hypervisor
    from vfiomgr.snapshot.model import HostSnapshot


class MigrationTarget(Value):
    """A host that the domain could go to."""

    name: str
    """The file of its snapshot."""
    places: tuple[MigrationPlace, ...]
    report: Report

    @property
    def fits(self) -> bool | None:
        """Whether no blocker was found; None if the counterpart of a device is unknown."""
        if self.report.is_blocked:
            return False
        return None if any(place.is_ready is None for place in self.places) else True


class MigrationReport(Value):
    """Whether a domain can migrate, and to which hosts."""

    domain: str
    source: str
    """The file or the domain that was read."""
    report: Report
    """What prevents it on its present host."""
    targets: tuple[MigrationTarget, ...] = ()

    @property
    def unknown(self) -> tuple[str, ...]:
        """Facts that decide the result and could not be read."""
        return self.report.unknown

    @property
    def is_blocked(self) -> bool:
        """Whether it cannot migrate: its own host prevents it, or no target fits."""
        no_target = bool(self.targets) and not any(target.fits for target in self.targets)
        return self.report.is_blocked or no_target


def check(
    host: HostSnapshot,
    domain: Domain,
    targets: Mapping[str, HostSnapshot],
    hypervisor: Hypervisor | None = None,
    blocked_reasons: Iterable[str] | None = None,
) -> MigrationReport:
    """All findings about the migration of a domain; `targets` are other hosts by name.

    `blocked_reasons` are those of its QEMU, None if it was not asked.
    """
    reasons = None if blocked_reasons is None else tuple(blocked_reasons)
    claims = claims_of(hypervisor)
    context = PreflightContext(host, domain, claims, hypervisor, blocked_reasons=reasons)
    own = {(one.rule, one.summary) for one in preflight(host, [domain], hypervisor)[0].findings}
    return MigrationReport(
        domain=domain.name,
        source=domain.source,
        report=domain_rules.RULES.run(context),
        targets=tuple(_target(context, name, target, own) for name, target in targets.items()),
    )


def _target(
    context: PreflightContext, name: str, target: HostSnapshot, own: set[tuple[str, str]]
) -> MigrationTarget:
    places = places_on(target, context)
    pair = Comparison(context, target, name, places)
    # what would prevent a start of the domain there, with its devices of there
    (start,) = preflight(target, [_moved(context.domain, places)])
    found = (one for one in start.findings if one.severity in ("blocker", "warning"))
    at_start = (one for one in found if (one.rule, one.summary) not in own)
    return MigrationTarget(name, places, target_rules.RULES.run(pair, *at_start))


def _moved(domain: Domain, places: Iterable[MigrationPlace]) -> Domain:
    """The domain with the devices that are ready on the other host."""
    by_name = {place.device: place.target for place in places if place.is_ready}
    kept = (h for h in domain.hostdevs if h.name in by_name)
    return replace(domain, hostdevs=tuple(_renamed(h, by_name[h.name] or "") for h in kept))


def _renamed(hostdev: DomainHostdev, name: str) -> DomainHostdev:
    if is_address(name):
        return replace(hostdev, kind="pci", address=PciAddress.parse(name), uuid=None)
    return replace(hostdev, kind="mdev", uuid=name, address=None)


class MigrationPlace(Value):
    """Where a device of the domain finds its counterpart."""

    device: str
    """The address or UUID in the domain."""
    target: str | None
    """The address or UUID on the other host; None if it must be created there, or none fits."""
    is_ready: bool | None
    """Whether nothing needs to be created or bound there before the migration; None if unknown."""
    text: str
    """What it is, or why none fits."""
    remedy: str = ""
    """The command on the other host that makes it ready."""

    @property
    def moves(self) -> bool:
        """Whether the device has another name on the other host."""
        return self.target is not None and self.target != self.device


def places_on(target: HostSnapshot, context: PreflightContext) -> tuple[MigrationPlace, ...]:
    """A place for each device of the domain, in their order."""
    taken: set[str] = set()
    created: dict[str, int] = {}
    found = []
    for hostdev in context.hostdevs:
        if hostdev.element == "disk":
            continue
        place = _place(target, context.host, hostdev, taken, created)
        found.append(place)
        taken.add(place.target or "")
    return tuple(found)


def _place(
    target: HostSnapshot,
    host: HostSnapshot,
    hostdev: DomainHostdev,
    taken: Collection[str],
    created: dict[str, int],
) -> MigrationPlace:
    """The place of one device; unknown without the device, which has the facts to compare."""
    vgpu = host.vgpus.named(hostdev.name)
    if vgpu is not None:
        return _vgpu_place(target, vgpu, taken, created)
    device = host.device_named(hostdev.name) if hostdev.kind == "pci" else None
    if device is not None:
        return _function_place(target, host, device, taken)
    text = "its counterpart is unknown: this host does not have it"
    return MigrationPlace(hostdev.name, None, is_ready=None, text=text)


def _function_place(
    target: HostSnapshot, host: HostSnapshot, device: PciDevice, taken: Collection[str]
) -> MigrationPlace:
    name = str(device.address)
    same = [other for other in target.devices if _is_same_model(device, other)]
    if not same:
        ids = f"{device.vendor_id}:{device.device_id}"
        kind = "virtual function" if device.physical_function else "device"
        text = f"it has no {kind} of this model: {ids} {device.name}, subsystem "
        text += device.subsystem_id
        return MigrationPlace(name, None, is_ready=False, text=text)
    reasons = {other: why for other in same if (why := _why_busy(target, other, taken))}
    free = [other for other in same if other not in reasons]
    if not free:
        text = "; ".join(f"{other.address} {why}" for other, why in reasons.items())
        return MigrationPlace(name, None, is_ready=False, text=text)
    # the driver that the device needs on the other host, in module spelling; None for any
    is_needed = device.is_on_vfio and migratability_of(host, device).is_possible
    wanted = _spelt(device.driver) if is_needed else None

    def rank(other: PciDevice) -> tuple[bool, bool, bool, str]:
        """The best first: on the driver, at the same address, on the same NUMA node."""
        is_far = other.numa_node != device.numa_node
        is_moved = other.address != device.address
        return (not _is_on(other, wanted), is_moved, is_far, str(other.address))

    return _chosen(target, name, min(free, key=rank), wanted)


def _is_same_model(one: PciDevice, other: PciDevice) -> bool:
    """Whether a guest sees the same device: identifiers, and both virtual functions or none."""
    if (one.physical_function is None) != (other.physical_function is None):
        return False
    return (one.vendor_id, one.device_id, one.subsystem_id, one.class_code) == (
        other.vendor_id,
        other.device_id,
        other.subsystem_id,
        other.class_code,
    )


def _is_on(device: PciDevice, wanted: str | None) -> bool:
    return device.is_on_vfio and (wanted is None or _spelt(device.driver) == wanted)


def _spelt(name: str | None) -> str:
    return (name or "").replace("-", "_")


def _why_busy(target: HostSnapshot, device: PciDevice, taken: Collection[str]) -> str | None:
    if str(device.address) in taken:
        return "is for another device of the domain"
    users = target.holders(device) if device.is_for_guests else ()
    if users:
        return f"is in use by {users[0]}"
    owner = target.pod_of(device) or target.claim_of(device)
    if owner:
        return f"belongs to {owner}"
    unknown = target.unknown_users_of(device)
    if unknown:
        return f"may be in use: {unknown[0].why}"
    if device.iommu_group is None:
        return "has no IOMMU group"
    return None


def _chosen(target: HostSnapshot, name: str, best: PciDevice, wanted: str | None) -> MigrationPlace:
    address = str(best.address)
    if _is_on(best, wanted):
        return MigrationPlace(name, address, is_ready=True, text=f"{best} on {best.driver}")
    known = {_spelt(variant.module) for variant in target.variants}
    if wanted is not None and wanted not in known and target.knows_variants:
        text = f"{best} needs {wanted}, which the kernel {target.kernel.release} does not have"
        return MigrationPlace(name, None, is_ready=False, text=text)
    option = "" if wanted is None else f" --driver {wanted}"
    text = f"{best} on {best.driver or 'no driver'}"
    return MigrationPlace(
        name, address, is_ready=False, text=text, remedy=f"vfiomgr bind {address}{option}"
    )


def _vgpu_place(
    target: HostSnapshot, vgpu: Vgpu, taken: Collection[str], created: dict[str, int]
) -> MigrationPlace:
    kind = vgpu.type_name or vgpu.type
    # by name, which is the same for every family and driver
    same = [other for other in target.vgpus.active if (other.type_name or other.type) == kind]
    usable = [other for other in same if other.name not in taken]
    free = [
        other
        for other in usable
        if not (target.pod_of(other) or target.claim_of(other))
        and not (target.holders(other) or target.unknown_users_of(other))
    ]
    if free:
        best = min(free, key=lambda o: (o.name != vgpu.name, o.family != vgpu.family, o.name))
        return MigrationPlace(vgpu.name, best.name, is_ready=True, text=f"vGPU {kind} is active")
    reasons = [f"{other.name} is in use" for other in usable]
    for gpu in gpus(target):
        for known in types_called(gpu.types, kind):
            found = room(gpu, known)
            left = found.more - created.get(gpu.name, 0)
            if left > 0:
                created[gpu.name] = created.get(gpu.name, 0) + 1
                text = f"{gpu} has capacity for {left} of {kind}"
                uuid = f" {vgpu.uuid}" if vgpu.uuid and gpu.family == "mdev" else ""
                remedy = f"vfiomgr vgpu create{uuid} --parent {gpu.name} --type {shlex.quote(kind)}"
                return MigrationPlace(vgpu.name, None, is_ready=False, text=text, remedy=remedy)
            reasons.append(f"{gpu}: {found.unavailable_because or 'no capacity for another one'}")
    text = (
        f"no capacity for a vGPU of type {kind}: {'; '.join(reasons) or 'no GPU offers this type'}"
    )
    return MigrationPlace(vgpu.name, None, is_ready=False, text=text)
