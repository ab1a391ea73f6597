"""The expected state of a host after a part of a plan, on which the next part is planned."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.users.model import HostUse
from vfiomgr.vgpu.functions import makes_by_program
from vfiomgr.vgpu.model import GpuMode, Vgpu, VgpuParent, mark_file

if TYPE_CHECKING:
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.vgpu.instance_model import GpuPartition


def without_vgpus(host: HostSnapshot, vgpus: Collection[Vgpu]) -> HostSnapshot:
    """Return the host after vGPUs are removed."""
    files = {mark_file(vgpu) for vgpu in vgpus}
    left = replace(
        host.vgpus,
        active=tuple(vgpu for vgpu in host.vgpus.active if vgpu not in vgpus),
        marks=tuple(mark for mark in host.vgpus.marks if mark.path not in files),
    )
    return replace(host, vgpus=left)


def with_vgpus(host: HostSnapshot, made: Sequence[Vgpu]) -> HostSnapshot:
    """Return the host after vGPUs are created, with proportionally reduced capacities.

    Parents that share memory, ports or a number among types behave this way.
    """
    by_parent: dict[str, list[Vgpu]] = {}
    for vgpu in made:
        by_parent.setdefault(vgpu.parent, []).append(vgpu)
    parents = (_with_less(p, by_parent.get(p.name, ())) for p in host.vgpus.parents)
    active = (*host.vgpus.active, *made)
    return replace(host, vgpus=replace(host.vgpus, active=active, parents=tuple(parents)))


def _with_less(parent: VgpuParent, made: Sequence[Vgpu]) -> VgpuParent:
    if not made:
        return parent
    if parent.is_virtual_function:
        return replace(parent, available=(0,) * len(parent.available))
    left = list(parent.available)
    for vgpu in made:
        before = parent.offers(vgpu.type)
        if before:
            left = [None if n is None else n * (before - 1) // before for n in left]
            parent = replace(parent, available=tuple(left))
    return parent


def with_functions(host: HostSnapshot, device: PciDevice, count: int) -> HostSnapshot:
    """Return the host after the number of virtual functions changes; new ones are unknown."""
    gone = set(device.virtual_functions)
    names = {str(address) for address in gone}
    host = with_mode(host, replace(_mode(host, device), heterogeneous=False))
    if makes_by_program(host, device):
        host = _with_persistence(host, device)
    parents = tuple(p for p in host.vgpus.parents if p.name not in names)
    return replace(
        with_devices(host, [replace(device, virtual_functions=(), sriov_numvfs=count)], gone),
        vgpus=replace(host.vgpus, parents=parents),
        origins=tuple(o for o in host.origins if o.device.address not in gone),
    )


def with_mode(host: HostSnapshot, mode: GpuMode) -> HostSnapshot:
    """Return the host after a GPU changes its mode."""
    others = (other for other in host.vgpus.modes if other.gpu != mode.gpu)
    vgpus = replace(host.vgpus, modes=(*others, mode))
    if not mode.mig:
        vgpus = replace(vgpus, partitions=_partitions_but(host, mode.gpu))
    return replace(host, vgpus=vgpus)


def without_instances(host: HostSnapshot, device: PciDevice) -> HostSnapshot:
    """Return the host after all GPU instances of a GPU are destroyed."""
    partition = host.vgpus.partition_of(str(device.address))
    if partition is None:
        return host
    profiles = tuple(replace(profile, free=profile.total) for profile in partition.profiles)
    empty = replace(partition, profiles=profiles, instances=())
    partitions = (*_partitions_but(host, partition.gpu), empty)
    return replace(host, vgpus=replace(host.vgpus, partitions=partitions))


def _partitions_but(host: HostSnapshot, gpu: str) -> tuple[GpuPartition, ...]:
    return tuple(other for other in host.vgpus.partitions if other.gpu != gpu)


def without_persistence(host: HostSnapshot, device: PciDevice) -> HostSnapshot:
    """Return the host after persistence mode of a GPU is turned off."""
    if host.users.host_uses is None:
        return host
    staying = (
        use
        for use in host.users.host_uses
        if (use.address, use.kind) != (device.address, "persistence-mode")
    )
    return replace(host, users=replace(host.users, host_uses=tuple(staying)))


def _with_persistence(host: HostSnapshot, device: PciDevice) -> HostSnapshot:
    """Return the host after persistence mode of a GPU is turned on."""
    if host.users.in_persistence_mode(device.address):
        return host
    use = HostUse(device.address, "persistence-mode", "sriov-manage enables it")
    uses = (*(host.users.host_uses or ()), use)
    return replace(host, users=replace(host.users, host_uses=uses))


def given_back(host: HostSnapshot, devices: Iterable[PciDevice]) -> HostSnapshot:
    """Return the host after functions with saved state are on their original drivers."""
    changed: list[PciDevice] = []
    for device in devices:
        origin = host.origin(device)
        if origin is not None:
            state = origin.state
            changed.append(
                replace(
                    device,
                    driver=state.driver,
                    driver_override=state.driver_override,
                    driver_module=origin.driver_module,
                    vfio_device=None,
                    vfio_cdev=False,
                    sriov_vf_total_msix=None,  # its driver says it
                )
            )
    moved = {device.address for device in changed}
    origins = tuple(o for o in host.origins if o.device.address not in moved)
    return replace(with_devices(host, changed), origins=origins)


def with_devices(
    host: HostSnapshot, changed: Iterable[PciDevice], gone: Collection[object] = ()
) -> HostSnapshot:
    """Return the host with some functions changed and some removed."""
    new = {device.address: device for device in changed}
    kept = (new.get(d.address, d) for d in host.devices if d.address not in gone)
    return replace(host, devices=tuple(kept))


def _mode(host: HostSnapshot, device: PciDevice) -> GpuMode:
    unknown = GpuMode(str(device.address), heterogeneous=None, mig=None, framebuffer=None)
    return host.vgpus.mode_of(device) or unknown
