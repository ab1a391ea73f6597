"""Find the counterparts of a domain's devices on another host.

A guest keeps its devices when it migrates: each needs one of the same model, on the same driver, or
a vGPU of the same type. The element in the domain may name another address or UUID there (virsh
migrate --xml); libvirt compares only the guest's side (virDomainHostdevDefCheckABIStability in
src/conf/domain_conf.c), from 11.0 on also between a mediated device and a virtual function.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.libvirt.migration.devices import migratability_of
from vfiomgr.value import Value
from vfiomgr.vgpu.capacity import gpus, room
from vfiomgr.vgpu.model import types_called

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from vfiomgr.libvirt.model import DomainHostdev
    from vfiomgr.libvirt.preflight.context import PreflightContext
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.vgpu.capacity import Gpu
    from vfiomgr.vgpu.model import Vgpu


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
    reasons = {
        str(other.address): why for other in same if (why := _why_busy(target, other, taken))
    }
    free = [other for other in same if str(other.address) not in reasons]
    if not free:
        text = "; ".join(f"{address} {why}" for address, why in reasons.items())
        return MigrationPlace(name, None, is_ready=False, text=text)
    wanted = _driver_for(host, device)
    best = min(free, key=lambda other: _rank(device, wanted, other))
    return _chosen(target, name, best, wanted)


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


def _driver_for(host: HostSnapshot, device: PciDevice) -> str | None:
    """The driver that the device needs on the other host, in module spelling; None for any."""
    found = migratability_of(host, device)
    if not (found.is_possible and device.is_on_vfio) or device.driver is None:
        return None
    return device.driver.replace("-", "_")


def _rank(device: PciDevice, wanted: str | None, other: PciDevice) -> tuple[bool, bool, bool, str]:
    """The best first: on the driver, at the same address, on the same NUMA node."""
    return (
        not _is_on(other, wanted),
        other.address != device.address,
        other.numa_node != device.numa_node,
        str(other.address),
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


def _is_free(target: HostSnapshot, vgpu: Vgpu) -> bool:
    owner = target.pod_of(vgpu) or target.claim_of(vgpu)
    return not (owner or target.holders(vgpu) or target.unknown_users_of(vgpu))


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
    usable = [other for other in _same_type(target, vgpu) if other.name not in taken]
    free = [other for other in usable if _is_free(target, other)]
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
                return _creatable(vgpu, gpu, kind, left)
            reasons.append(f"{gpu}: {found.unavailable_because or 'no capacity for another one'}")
    text = (
        f"no capacity for a vGPU of type {kind}: {'; '.join(reasons) or 'no GPU offers this type'}"
    )
    return MigrationPlace(vgpu.name, None, is_ready=False, text=text)


def _creatable(vgpu: Vgpu, gpu: Gpu, kind: str, left: int) -> MigrationPlace:
    text = f"{gpu} has capacity for {left} of {kind}"
    uuid = f" {vgpu.uuid}" if vgpu.uuid and gpu.family == "mdev" else ""
    remedy = f"vfiomgr vgpu create{uuid} --parent {gpu.name} --type '{kind}'"
    return MigrationPlace(vgpu.name, None, is_ready=False, text=text, remedy=remedy)


def _same_type(target: HostSnapshot, vgpu: Vgpu) -> Iterator[Vgpu]:
    """Active vGPUs of the same type: by name, which is the same for every family and driver."""
    for other in target.vgpus.active:
        if (other.type_name or other.type) == (vgpu.type_name or vgpu.type):
            yield other


def missing(places: Iterable[MigrationPlace]) -> list[MigrationPlace]:
    """The devices without a counterpart."""
    return [place for place in places if place.target is None and not place.remedy]
