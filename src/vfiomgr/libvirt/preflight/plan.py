"""Find what would prevent the start of a domain: small rules over visible facts.

A blocker prevents the start or harms the host when the domain starts; a warning reduces performance
or fails later. A rule yields what it can prove; if a fact is None it yields nothing, and
`not_checked` says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.check.model import Report
from vfiomgr.diagnostic import SEVERITIES
from vfiomgr.libvirt.attach.claims import unread_domains
from vfiomgr.libvirt.preflight import (
    devices,
    drivers,
    memory,
    mmio_window,
    numa,
    pci_addresses,
    platform,
    presence,
    versions,
)
from vfiomgr.libvirt.preflight.context import Claims, PreflightContext

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from vfiomgr.diagnostic import Diagnostic
    from vfiomgr.libvirt.model import Domain, Hypervisor
    from vfiomgr.snapshot.model import HostSnapshot

RULES: tuple[Callable[[PreflightContext], Iterable[Diagnostic]], ...] = (
    platform.host,
    platform.no_vfio,
    platform.no_kvm,
    platform.other_architecture,
    presence.missing,
    presence.twice,
    *presence.GUARD_RULES,
    presence.plain_network_device,
    drivers.on_host_driver,
    drivers.not_installed,
    drivers.refused,
    drivers.managed_in_use,
    drivers.managed_vendor_function,
    drivers.vendor_function,
    drivers.variant,
    drivers.managed_and_bound,
    drivers.not_kept,
    devices.not_viable,
    devices.shared_with_running,
    devices.no_reset,
    devices.by_running_domain,
    devices.by_defined_domain,
    devices.by_process,
    presence.inactive,
    presence.wrong_model,
    presence.untyped_function,
    presence.not_kept,
    presence.display_without_graphics,
    presence.several_ramfb,
    presence.boot_order,
    pci_addresses.same_place,
    pci_addresses.slot_of_port,
    pci_addresses.on_expander,
    pci_addresses.expander_node,
    pci_addresses.expander_buses,
    pci_addresses.expander_limits,
    pci_addresses.without_function_zero,
    pci_addresses.multifunction,
    pci_addresses.companions_left_out,
    pci_addresses.companions_apart,
    pci_addresses.no_spare_port,
    platform.group_apart,
    platform.caching_mode,
    platform.maps_nothing,
    mmio_window.space_too_small,
    mmio_window.bars_too_large,
    mmio_window.emulated_bits,
    platform.too_many,
    memory.hard_limit,
    memory.session,
    memory.session_managed,
    memory.hugepages,
    memory.too_little,
    numa.missing_node,
    numa.far_memory,
    numa.far_cpus,
    numa.unbound,
    numa.without_cell,
    numa.elsewhere,
    versions.dropped,
    versions.unknown_iommu,
    versions.old_backend,
    versions.iommufd,
    versions.driver_model,
    devices.boot_order,
    devices.rom_file,
    devices.nvlink,
    devices.code_43,
)
_OF_QEMU = frozenset({None, "", "kvm", "qemu", "hvf", "test"})
"""Domain types whose devices use VFIO; the last one is that of libvirt's test driver."""
OF_LIBVIRT = "disks, networks, firmware and other parts without host devices: libvirt checks them"
"""Parts that may also fail, and that no rule covers."""


def preflight(
    host: HostSnapshot,
    domains: Iterable[Domain],
    hypervisor: Hypervisor | None = None,
    files: Mapping[str, bool] | None = None,
) -> tuple[Report, ...]:
    """All findings about the next start of each domain on a host, blockers first.

    `hypervisor` is what libvirt reports, and `files` the existing files among those that the
    domains name; None if not checked.
    """
    claims = Claims(hypervisor)
    return tuple(_judge(PreflightContext(host, d, claims, hypervisor, files)) for d in domains)


def _judge(context: PreflightContext) -> Report:
    kind = context.domain.kind
    if kind not in _OF_QEMU:
        return Report((), (f"a domain of type {kind}: its devices do not use VFIO",))
    found = [finding for rule in RULES for finding in rule(context)]
    found.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    return Report(tuple(dict.fromkeys(found)), tuple(_not_checked(context)))


def _not_checked(context: PreflightContext) -> Iterator[str]:
    """What the rules could not check, and the missing facts."""
    if context.hypervisor is None:
        yield "other domains, and supported features of libvirt and QEMU: libvirt was not queried"
    else:
        yield from unread_domains(context.hypervisor)
    yield OF_LIBVIRT
    if not context.hostdevs:
        return
    host = context.host
    if host.readiness is None:
        yield "modules, interrupts, limits: not in the snapshot"
    if host.users is None:
        yield "processes that use the devices: requires root on the running host"
    if host.host_uses is None:
        yield "disks and routes of the host: no /proc"
    if not context.domain.is_x86:
        yield (
            "addresses, BAR windows and the number of CPUs "
            f"({context.domain.architecture} machine): only PCs are supported"
        )
    if context.takes_functions:
        yield from _unseen_addresses(context)
    if context.files is None and any(hostdev.rom_file for hostdev in context.hostdevs):
        yield "whether the ROM exists: the files are on another machine"


def _unseen_addresses(context: PreflightContext) -> Iterator[str]:
    if context.host.topology is None:
        yield "NUMA nodes and huge pages: not in the snapshot"
    if context.host.cpu_address_bits is None and mmio_window.has_host_bits(context):
        yield "whether the BARs fit: the address width of the host is unknown"
