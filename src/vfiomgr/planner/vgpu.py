"""vGPU instances: create and remove."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from vfiomgr.errors import Refusal, UnknownDevice, UsageError
from vfiomgr.model.pci import PciAddress
from vfiomgr.model.plan import Plan
from vfiomgr.model.step import CreateMdev, RemoveMdev
from vfiomgr.planner.guards import held_by_guest, refuse_if_any
from vfiomgr.planner.locks import device_lock

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vfiomgr.model.intent import CreateVgpu, RemoveVgpu
    from vfiomgr.model.snapshot import HostSnapshot
    from vfiomgr.model.vgpu import VgpuParent, VgpuType


def plan_create(host: HostSnapshot, intent: CreateVgpu) -> Plan:
    """Make one instance of a type on a parent.

    Raises:
        UnknownDevice: no such parent or type.
        Refusal: the type has no room left, or the UUID is taken.

    """
    parent = find_parent(host, intent.parent)
    vgpu_type = _type(parent, intent.type)
    uuid = intent.uuid.lower()
    summary = f"create vGPU {uuid} of type {vgpu_type.id} on {parent.name}"
    existing = host.vgpu(uuid)
    if existing is not None:
        if (existing.parent, existing.type) != (parent.name, vgpu_type.id):
            message = f"vGPU {uuid} exists: a {existing.type} on {existing.parent}"
            raise Refusal(message, "leave out --uuid to get a fresh one, or remove that one first")
        locks = _locks(host, [(parent.name, uuid)])
        return Plan(summary, (), locks, already=(f"vGPU {uuid} exists already",), settles=(uuid,))
    if vgpu_type.available_instances == 0:
        message = f"{parent.name} has no room for another {vgpu_type.id} ({vgpu_type.name})"
        raise Refusal(
            message, "remove one with vfiomgr vgpu remove; vfiomgr vgpu types shows what fits"
        )
    step = CreateMdev(parent.name, parent.path, vgpu_type.id, uuid)
    return Plan(summary, (step,), _locks(host, [(parent.name, uuid)]), settles=(uuid,))


def plan_remove(host: HostSnapshot, intent: RemoveVgpu) -> Plan:
    """Remove instances; one that is gone already is no error.

    Raises:
        Refusal: a guest holds one of them.

    """
    found = {uuid: host.vgpu(uuid) for uuid in intent.uuids}
    active = [vgpu for vgpu in found.values() if vgpu is not None]
    held = [o for vgpu in active for o in held_by_guest(host, vgpu)]
    refuse_if_any(held, frozenset())
    paths = {parent.name: parent.path for parent in host.vgpu_parents}
    return Plan(
        summary=f"remove vGPU {', '.join(intent.uuids)}",
        steps=tuple(
            RemoveMdev(vgpu.parent, paths[vgpu.parent], vgpu.type, vgpu.uuid) for vgpu in active
        ),
        locks=_locks(host, [(v.parent if v else None, uuid) for uuid, v in found.items()]),
        already=tuple(f"there is no vGPU {uuid}" for uuid, v in found.items() if v is None),
        settles=intent.uuids,
    )


def _locks(host: HostSnapshot, instances: Iterable[tuple[str | None, str]]) -> tuple[str, ...]:
    """The UUID, since one may be asked for on two parents, and the parent or its IOMMU group."""
    names: set[str] = set()
    for parent, uuid in instances:
        names.add(f"vgpu-{uuid}")
        if parent is not None:
            functions = [d for d in host.devices if str(d.address) == parent]
            names.update(map(device_lock, functions) if functions else [f"parent-{parent}"])
    return tuple(sorted(names))


def find_parent(host: HostSnapshot, name: str) -> VgpuParent:
    """The parent of a name; a PCI address in any way of writing it.

    Raises:
        UnknownDevice: there is no such device, or it makes no vGPUs.

    """
    for parent in host.vgpu_parents:
        if parent.name == name or _is_address(name, parent.name):
            return parent
    subject = f"there is no device {name!r} that makes vGPUs"
    if ":" in name:  # as in addresses alone
        subject = f"{host.device(host.parse_address(name))} makes no vGPUs"
    if not host.vgpu_parents:
        message = f"{subject}, and no other of this host does"
        raise UnknownDevice(
            message, "load the vendor's vGPU driver, and enable its virtual functions"
        )
    names = ", ".join(parent.name for parent in host.vgpu_parents)
    message = f"{subject}; these do: {names}"
    raise UnknownDevice(message, "vfiomgr vgpu types shows parents and their types")


def _is_address(text: str, name: str) -> bool:
    """Whether both are the same PCI address, however it is written."""
    try:
        return PciAddress.parse(text) == PciAddress.parse(name)
    except UsageError:
        return False


def _type(parent: VgpuParent, wanted: str) -> VgpuType:
    for vgpu_type in parent.types:
        if wanted == vgpu_type.id:
            return vgpu_type
    ids = [vgpu_type.id for vgpu_type in parent.types]
    close = difflib.get_close_matches(wanted, ids, n=1)
    message = f"{parent.name} has no vGPU type {wanted}; it has {', '.join(ids) or 'none'}"
    raise UnknownDevice(
        message, f"did you mean {close[0]}?" if close else "vfiomgr vgpu types shows them all"
    )
