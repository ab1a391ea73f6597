"""Reads a host into a snapshot."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, TypedDict, Unpack

from msgspec.structs import replace

from vfiomgr import pci
from vfiomgr.containers.cdi.facts import list_cdi_files, read_cdi_files
from vfiomgr.definitions.facts import read_definitions
from vfiomgr.host.kernel import KernelFacts, read_kernel
from vfiomgr.listing import listed
from vfiomgr.paths import BOOT_ID, PCI_DEVICES, PCI_DRIVERS, HostPath
from vfiomgr.pci import accelerators, capabilities, drivers, iommu, memory
from vfiomgr.pci import facts as pci_facts
from vfiomgr.pci.function import Functions, Purpose, touched_by
from vfiomgr.pci.iommu import IommuState
from vfiomgr.pci.names import Names
from vfiomgr.persistence.facts import (
    list_files,
    list_nodes,
    read_facet,
    read_files,
    read_named,
    read_nodes,
)
from vfiomgr.snapshot.model import HostSnapshot
from vfiomgr.snapshot.named import UNIDENTIFIED
from vfiomgr.users import uses as users
from vfiomgr.users.facet import UserFacts
from vfiomgr.users.released import read_released
from vfiomgr.vgpu.reader import (
    NO_VGPUS,
    VGPU_ENTRIES,
    persistence_uses,
    read_quotas,
    read_vgpus,
    with_gpu_modes,
    with_records,
    with_vgpu_records,
)

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree
    from vfiomgr.pci.memory import HostTopology
    from vfiomgr.pci.model import PciAddress

    FileReader = tuple[Callable[[HostTree], Iterable[HostPath]], Callable[[HostTree], object]]

__all__ = [
    "FILES",
    "VGPU_ENTRIES",
    "list_cdi_files",
    "list_nodes",
    "persistence_uses",
    "read_changeable",
    "read_definitions",
    "read_nodes",
    "read_only_files",
    "read_quotas",
    "read_readiness",
    "read_vgpus",
    "with_files",
    "with_gpu_modes",
    "with_records",
]

FILES: dict[str, tuple[Callable[[HostTree], Iterable[HostPath]], Callable[[HostTree], object]]] = {
    "texts": (list_files, read_files),
    "cdi_files": (list_cdi_files, read_cdi_files),
}
"""For each part that is read from files: what lists these, and what reads them."""


def read_changeable(tree: HostTree, host: HostSnapshot) -> dict[str, object]:
    """The parts that only changes and checks need, of a host whose devices were read."""
    return {
        "files": read_facet(tree),
        "vgpus": with_vgpu_records(tree, host.devices, host.vgpus),
        "definitions": read_definitions(tree, host.vgpus.active),
        "cdi_files": read_cdi_files(tree),
    }


def read_only_files(tree: HostTree, paths: Iterable[str]) -> HostSnapshot:
    """A host of which only these files and the boot are known, without devices."""
    return HostSnapshot(
        kernel=KernelFacts(None, None, tree.read(BOOT_ID), None),
        vgpus=NO_VGPUS,
        iommu=IommuState((), (), has_groups=False),
        pci_drivers=(),
        devices=(),
        groups=(),
        users=UserFacts(processes=()),
        files=read_named(tree, paths),
    )


def with_files(tree: HostTree, host: HostSnapshot, paths: Iterable[str]) -> HostSnapshot:
    """Add some files."""
    texts = (*host.files.texts, *read_named(tree, paths).texts)
    return replace(host, files=replace(host.files, texts=texts))


def read_readiness(tree: HostTree, host: HostSnapshot) -> object:
    """The facts for a check of the host."""
    from vfiomgr.check.facts import read_readiness as read  # noqa: PLC0415 - only a check needs it

    return read(tree, host.kernel.release, host.devices)


class FurtherFacts(TypedDict, total=False):
    """What a scan reads besides the facts for a change; each takes time, or requires a program."""

    with_users: bool
    """Open device nodes, from a walk through /proc (requires root), and variant drivers of VFIO."""
    with_readiness: bool
    """The facts for a check of the host."""
    with_resets: bool
    """The reset capabilities of all functions that are awake (requires root)."""
    with_gpu_modes: bool
    """The vGPU modes, from nvidia-smi."""
    with_links: bool
    """The links of PCI Express."""
    with_health: bool
    """The links, and the error counters of the devices that guests have."""
    purpose: Purpose | None
    """Nothing about functions but what is shown or needed for it."""
    only_types: frozenset[str] | None
    """The vGPU types, as people name them, of which virtual functions report how many are left;
    without it, all. Types of active vGPUs are always included."""
    with_guests: bool
    """What the kernel has for guests: migration, confidential guests; with the reset capabilities
    also ATS and PASID."""
    with_programs: bool
    """The versions of libvirt and QEMU, which are run for it, if `with_guests`."""
    with_cores: bool
    """The threads of each core of the CPUs, and their caches."""
    with_desktop: bool
    """The console, the sessions and the programs of the desktop."""
    about: frozenset[PciAddress] | None
    """The functions that a change is about. Virtual functions that it cannot touch
    (`pci.function.touched_by`) are only counted, as by `list`; without it, none is."""


def scan(
    tree: HostTree,
    machine: HostTree,
    *,
    with_claims: bool = True,
    serials_of: frozenset[tuple[int, int, int]] = frozenset(),
    **further: Unpack[FurtherFacts],
) -> HostSnapshot:
    """Read all facts of the host below `tree`; names of hardware are looked up on `machine`.

    `with_claims` tests whether the kernel uses disks, by opening idle ones briefly, if users are
    read. Serial numbers are read in the slots of `serials_of`.
    """
    host = scan_devices(
        tree,
        machine,
        serials_of,
        only_types=further.get("only_types"),
        about=further.get("about"),
        purpose=further.get("purpose"),
    )
    if further.get("with_gpu_modes"):
        host = with_gpu_modes(host, tree)
    host = replace(host, **_user_facts(host, tree, further, with_claims=with_claims))
    return replace(
        host,
        **_further_facts(host, tree, further),
        **read_changeable(tree, host),
        msix=capabilities.read_msix(tree, host.devices),
        topology=_topology(tree, with_cores=further.get("with_cores", False)),
    )


def _topology(tree: HostTree, *, with_cores: bool) -> HostTopology:
    topology = memory.read_topology(tree)
    if not with_cores:
        return topology
    from vfiomgr.pci.cores import read_cores  # noqa: PLC0415 - few commands need it

    cores, caches = read_cores(tree)
    return replace(topology, cores=cores, caches=caches)


def _user_facts(
    host: HostSnapshot, tree: HostTree, further: FurtherFacts, *, with_claims: bool
) -> dict[str, object]:
    """Who uses devices, and with it the variant drivers."""
    if not further.get("with_users"):
        return {"users": users.read_host_facet(tree)}
    persistence = partial(persistence_uses, tree, host.devices)
    released, unread = read_released(tree)
    return {
        "users": users.read_facet(tree, host.devices, persistence, with_claims=with_claims),
        "variants": drivers.read_variants(tree),
        "vfio_modules": drivers.read_vfio_modules(tree),
        "released": released,
        "released_unread": unread,
    }


def _further_facts(host: HostSnapshot, tree: HostTree, further: FurtherFacts) -> dict[str, object]:
    """The facts that are read only if they are asked for, as far as they are."""
    found: dict[str, object] = {}
    resets, guests = further.get("with_resets"), further.get("with_guests")
    if further.get("with_readiness"):
        found["readiness"] = read_readiness(tree, host)
    if resets:
        found["reset_capabilities"] = capabilities.read_reset_capabilities(tree, host.devices)
        found["bus_resets"] = capabilities.read_bus_resets(tree, host.devices)
        found["cxl"] = accelerators.read_cxl(tree, host.devices)
    if guests:
        programs = further.get("with_programs", False)
        read = pci.guest_support.read_guest_support
        found["guest_support"] = read(tree, host.devices, with_programs=programs)
    if resets and guests:
        found["translations"] = capabilities.read_translations(tree, host.devices)
    if further.get("with_desktop"):
        from vfiomgr.users.desktop import read_desktop  # noqa: PLC0415 - few commands need it

        holders = {user.pid for user in host.users.processes or ()}
        found["desktop"] = read_desktop(tree, holders)
    if further.get("with_links") or further.get("with_health"):
        found["links"] = capabilities.read_links(tree, host.devices)
    if further.get("with_health"):
        from vfiomgr.snapshot.health import read_health  # noqa: PLC0415 - only a check needs it

        found["health"] = read_health(tree, host)
    return found


def scan_devices(  # noqa: PLR0913 - all but the trees have defaults
    tree: HostTree,
    machine: HostTree,
    serials_of: frozenset[tuple[int, int, int]] = frozenset(),
    only: frozenset[tuple[int, int, int]] | None = None,
    *,
    purpose: Purpose | None = None,
    only_types: frozenset[str] | None = None,
    about: frozenset[PciAddress] | None = None,
) -> HostSnapshot:
    """Read the facts for lists: functions, groups and vGPUs, without their users.

    With `only`, the result contains no other functions than those in these slots and their physical
    functions; a `purpose` leaves out what is not shown, a table also the groups of the host's
    drivers.
    `only_types` and `about` are described in `FurtherFacts`.
    """
    whole = None if about is None else touched_by(tree, map(str, about))
    functions, names = Functions(tree, purpose=purpose, whole=whole), Names(tree, machine)
    found, unidentified = pci_facts.read_devices(tree, names, functions, serials_of, only)
    devices = pci_facts.mark_displays(pci_facts.read_console(tree), functions, found)
    if unidentified:
        warnings.warn(_left_out(unidentified), stacklevel=2)
    vgpus = read_vgpus(tree, functions, devices, only_types)
    of_guests = {d.iommu_group for d in devices if d.is_for_guests or d.is_stuck_without_driver}
    of_guests.update(vgpu.iommu_group for vgpu in vgpus.active if vgpu.uuid is not None)
    numbers = of_guests if purpose == "table" else None
    if whole is not None and not any(list_cdi_files(tree)):  # which may name any group
        numbers = of_guests.union(d.iommu_group for d in devices if str(d.address) in whole)
    groups = iommu.read_groups(tree, numbers)
    if whole is not None and not iommu.has_device_groups(groups):
        groups = iommu.read_groups(tree)  # has_groups shows whether an IOMMU is on: read all
    return HostSnapshot(
        kernel=read_kernel(tree),
        iommu=iommu.read_state(tree, groups),
        pci_drivers=tuple(tree.children(PCI_DRIVERS)),
        devices=devices,
        groups=groups,
        vgpus=vgpus,
        origins=drivers.read_origins(tree),
        users=UserFacts(host_uses=None),
        vfio=iommu.read_vfio_state(tree),
        pci_unidentified=unidentified,
        pci_unlisted=None if devices else tree.why_unlisted(PCI_DEVICES),
    )


_SHOWN = 4
"""Number of addresses in a warning; a recording can lack the files of all functions."""


def _left_out(names: tuple[str, ...]) -> str:
    return f"cannot identify {listed(names, _SHOWN)}, omitted: {UNIDENTIFIED}"
