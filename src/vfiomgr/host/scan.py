"""From the files of a host to a snapshot of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.host import (
    config,
    display,
    iommu,
    mdev,
    modules,
    nvidia,
    origins,
    pci,
    persistence,
    users,
    uses,
)
from vfiomgr.host.names import Names
from vfiomgr.model.path import PCI_DRIVERS, HostPath
from vfiomgr.model.snapshot import HostSnapshot, HostUse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vfiomgr.host.tree import HostTree
    from vfiomgr.model.pci import PciDevice
    from vfiomgr.model.readiness import Readiness


def scan(  # noqa: PLR0913 - each is a question of its own, with a default
    tree: HostTree,
    machine: HostTree,
    *,
    with_users: bool = False,
    with_readiness: bool = False,
    with_resets: bool = False,
    serials_of: frozenset[tuple[int, int, int]] = frozenset(),
) -> HostSnapshot:
    """Read all facts of the host below `tree`; names of hardware are looked up on `machine`.

    `with_users` adds what a change must know: open device nodes, by a walk through /proc, and
    variant drivers; `with_readiness` what only a check of the host needs; `with_resets` the
    capabilities of all functions that are awake. Serial numbers are read in the slots of
    `serials_of`.
    """
    groups = iommu.read_groups(tree)
    devices = display.mark_displays(tree, pci.read_devices(tree, Names(tree, machine), serials_of))
    release = tree.read(HostPath("/proc/sys/kernel/osrelease"))
    return HostSnapshot(
        kernel_release=release,
        kernel_command_line=tree.read(HostPath("/proc/cmdline")),
        boot_id=tree.read(HostPath("/proc/sys/kernel/random/boot_id")),
        cpu_vendor=_cpu_vendor(tree),
        iommu=iommu.read_state(tree, groups),
        pci_drivers=tuple(tree.children(PCI_DRIVERS)),
        devices=devices,
        groups=groups,
        vgpu_parents=mdev.read_parents(tree, (device.address for device in devices)),
        vgpus=mdev.read_mdevs(tree),
        origins=origins.read_origins(tree),
        host_uses=_host_uses(tree, devices, with_users=with_users),
        users=users.read_users(tree) if with_users else None,
        vfio=iommu.read_vfio_state(tree),
        variants=modules.read_variants(tree) if with_users else (),
        readiness=_readiness(tree, release, devices) if with_readiness else None,
        reset_capabilities=config.read_reset_capabilities(tree, devices) if with_resets else None,
        files=persistence.read_files(tree),
        nodes=persistence.read_nodes(tree),
        initramfs=persistence.read_initramfs(tree),
        has_systemd=persistence.has_systemd(tree),
    )


def _readiness(tree: HostTree, release: str | None, devices: tuple[PciDevice, ...]) -> Readiness:
    from vfiomgr.host.readiness import read_readiness  # noqa: PLC0415 - only a check needs it

    return read_readiness(tree, release, devices)


def _host_uses(
    tree: HostTree, devices: Sequence[PciDevice], *, with_users: bool
) -> tuple[HostUse, ...] | None:
    found = uses.read_host_uses(tree)
    if found is None or not with_users:
        return found
    return (*found, *nvidia.persistence_uses(tree, devices))


def _cpu_vendor(tree: HostTree) -> str | None:
    """`GenuineIntel`, `AuthenticAMD`; other architectures name none."""
    for line in (tree.read(HostPath("/proc/cpuinfo")) or "").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "vendor_id":
            return value.strip()
    return None
