"""What a snapshot has of vGPUs and their GPUs, and how it is read: the door for `snapshot`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.paths import SRIOV_MANAGE
from vfiomgr.vgpu.facet import VgpuFacts
from vfiomgr.vgpu.facts import (
    DIRECTORY,
    TYPES,
    persistence_uses,
    read_mdevs,
    read_vendor_vgpus,
)
from vfiomgr.vgpu.marks import with_records
from vfiomgr.vgpu.quota.facts import read_quotas

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree
    from vfiomgr.pci.function import Functions
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot

__all__ = [
    "NO_VGPUS",
    "VGPU_ENTRIES",
    "persistence_uses",
    "read_quotas",
    "read_vgpus",
    "with_gpu_modes",
    "with_records",
    "with_vgpu_records",
]

VGPU_ENTRIES = frozenset({TYPES, DIRECTORY})
"""Entries of functions that have to do with vGPUs."""
NO_VGPUS = VgpuFacts((), ())
"""The facet of a host whose devices are not read."""


def read_vgpus(
    tree: HostTree,
    functions: Functions,
    devices: tuple[PciDevice, ...],
    only_types: frozenset[str] | None = None,
) -> VgpuFacts:
    """Where vGPUs can be created, and the active ones."""
    mdev_parents, mdevs = read_mdevs(tree, functions, devices, only_types)
    parents, vgpus = read_vendor_vgpus(tree, functions, devices)
    return VgpuFacts((*mdev_parents, *parents), (*mdevs, *vgpus))


def with_vgpu_records(
    tree: HostTree, devices: tuple[PciDevice, ...], vgpus: VgpuFacts
) -> VgpuFacts:
    """Add what only changes need."""
    return replace(
        with_records(tree, vgpus),
        has_sriov_manage=tree.exists(SRIOV_MANAGE),
        quotas=read_quotas(tree, devices),
    )


def with_gpu_modes(host: HostSnapshot, tree: HostTree) -> HostSnapshot:
    """Add what nvidia-smi says: GPU modes, GPU instances, and the types of GPUs in MIG mode."""
    from vfiomgr.vgpu.mig import facts  # noqa: PLC0415 - few commands ask nvidia-smi

    log = facts.read_log(tree, host.devices)
    modes = facts.parse_modes(log)
    divided = frozenset(mode.gpu for mode in modes if mode.mig)
    parents, active = facts.with_known_types(
        tree, host.devices, host.vgpus.parents, host.vgpus.active, divided
    )
    vgpus = replace(
        host.vgpus,
        modes=facts.with_memory(modes, parents),
        partitions=facts.read_partitions(tree, host.devices, divided, log),
        parents=parents,
        active=facts.with_places(tree, active, parents, divided),
    )
    return replace(host, vgpus=vgpus)
