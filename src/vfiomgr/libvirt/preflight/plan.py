"""What would break the start of a domain, told before: small rules over what can be seen.

A blocker keeps the domain from starting, or hurts the host when it starts; a warning has it work
badly, or break later. A rule yields what it can show; where a fact is None it is silent, and
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
"""Types of domains whose devices go through VFIO; the last one is that of libvirt's test driver."""
OF_LIBVIRT = "disks, networks, firmware, and all else that is no device of the host: libvirt's own"
"""What a domain may fail for as well, and no rule is about."""


def preflight(
    host: HostSnapshot,
    domains: Iterable[Domain],
    hypervisor: Hypervisor | None = None,
    files: Mapping[str, bool] | None = None,
) -> tuple[Report, ...]:
    """All findings about the next start of each domain on a host, the gravest first.

    `hypervisor` is what libvirt told, and `files` which of the files that the domains name are
    there; None where nobody asked or looked.
    """
    claims = Claims(hypervisor)
    return tuple(_judge(PreflightContext(host, d, claims, hypervisor, files)) for d in domains)


def _judge(context: PreflightContext) -> Report:
    kind = context.domain.kind
    if kind not in _OF_QEMU:
        return Report((), (f"a domain of type {kind}: its devices do not go through VFIO",))
    found = [finding for rule in RULES for finding in rule(context)]
    found.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    return Report(tuple(dict.fromkeys(found)), tuple(_not_checked(context)))


def _not_checked(context: PreflightContext) -> Iterator[str]:
    """What no rule could look at, and what is missing for it."""
    if context.hypervisor is None:
        yield "other domains, and what this libvirt and QEMU can read: libvirt was not asked"
    else:
        yield from unread_domains(context.hypervisor)
    yield OF_LIBVIRT
    if not context.hostdevs:
        return
    host = context.host
    if host.readiness is None:
        yield "modules, interrupts, limits: the snapshot was made without them"
    if host.users is None:
        yield "which processes hold the devices: nobody looked, or not as root"
    if host.host_uses is None:
        yield "disks and routes of the host: there is no /proc to tell"
    if not context.domain.is_x86:
        yield (
            f"addresses, BAR windows and the number of CPUs of a machine of "
            f"{context.domain.architecture}: their rules know PCs alone"
        )
    if context.takes_functions:
        yield from _unseen_addresses(context)
    if context.files is None and any(hostdev.rom_file for hostdev in context.hostdevs):
        yield "whether the ROM is there: the files are those of another machine"


def _unseen_addresses(context: PreflightContext) -> Iterator[str]:
    if context.host.topology is None:
        yield "NUMA nodes and huge pages: the snapshot was made without them"
    if context.host.cpu_address_bits is None and mmio_window.has_host_bits(context):
        yield "whether the BARs fit: the host does not tell the width of its addresses"
