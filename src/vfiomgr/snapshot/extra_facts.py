"""Facts about the use of devices: their users, and the configuration for the next boot."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.check.facts import read_readiness
from vfiomgr.containers.cdi import facts as cdi_facts
from vfiomgr.definitions import facts as definitions_facts
from vfiomgr.paths import SRIOV_MANAGE
from vfiomgr.pci import links, numa, reset_capabilities, vfio_drivers
from vfiomgr.persistence import facts as persistence_facts
from vfiomgr.snapshot import users
from vfiomgr.snapshot.uses import facts as uses_facts
from vfiomgr.vgpu.facts import marks, nvidia, vendor
from vfiomgr.vgpu.mig.facts import instances as mig
from vfiomgr.vgpu.mig.facts import modes as smi
from vfiomgr.vgpu.quota import facts as quota_facts

if TYPE_CHECKING:
    from vfiomgr.check.model import Readiness
    from vfiomgr.host.tree import HostTree
    from vfiomgr.snapshot.model import HostSnapshot, HostUse


def with_surroundings(  # noqa: PLR0913 - each is a question of its own
    host: HostSnapshot,
    tree: HostTree,
    *,
    with_users: bool,
    with_readiness: bool,
    with_resets: bool,
    with_gpu_modes: bool,
    with_claims: bool,
    with_links: bool,
) -> HostSnapshot:
    """The devices of a host, with the further facts requested from `vfiomgr.snapshot.scan.scan`."""
    host = _with_gpu_modes(host, tree) if with_gpu_modes else host
    return replace(
        host,
        host_uses=_host_uses(host, tree, with_users=with_users, with_claims=with_claims),
        users=users.read_users(tree) if with_users else None,
        variants=vfio_drivers.read_variants(tree) if with_users else (),
        vfio_modules=vfio_drivers.read_vfio_modules(tree) if with_users else None,
        readiness=_readiness(host, tree) if with_readiness else None,
        reset_capabilities=(
            reset_capabilities.read_reset_capabilities(tree, host.devices) if with_resets else None
        ),
        links=links.read_links(tree, host.devices) if with_links else None,
        files=persistence_facts.read_files(tree),
        nodes=persistence_facts.read_nodes(tree),
        initramfs=persistence_facts.read_initramfs(tree),
        has_systemd=persistence_facts.has_systemd(tree),
        vgpu_marks=marks.read_marks(tree),
        made_functions=marks.read_made(tree, host.vgpus),
        wedged=vendor.read_wedged(tree),
        has_sriov_manage=tree.exists(SRIOV_MANAGE),
        definitions=definitions_facts.read_definitions(tree, host.vgpus),
        quotas=quota_facts.read_quotas(tree, host.devices),
        topology=numa.read_topology(tree),
        cdi_files=cdi_facts.read_cdi_files(tree),
    )


def _with_gpu_modes(host: HostSnapshot, tree: HostTree) -> HostSnapshot:
    log = smi.read_log(tree, host.devices)
    modes = smi.parse_modes(log)
    divided = frozenset(mode.gpu for mode in modes if mode.mig)
    parents, vgpus = smi.with_known_types(
        tree, host.devices, host.vgpu_parents, host.vgpus, divided
    )
    return replace(
        host,
        gpu_modes=smi.with_memory(modes, parents),
        gpu_partitions=mig.read_partitions(tree, host.devices, divided, log),
        vgpu_parents=parents,
        vgpus=mig.with_places(tree, vgpus, parents, divided),
    )


def _readiness(host: HostSnapshot, tree: HostTree) -> Readiness:
    return read_readiness(tree, host.kernel_release, host.devices)


def _host_uses(
    host: HostSnapshot, tree: HostTree, *, with_users: bool, with_claims: bool
) -> tuple[HostUse, ...] | None:
    if not with_users:
        return uses_facts.read_host_uses(tree)
    found = uses_facts.read_all_uses(tree, host.devices, with_claims=with_claims)
    if found is None:
        return None
    return (*found, *nvidia.persistence_uses(tree, host.devices))
