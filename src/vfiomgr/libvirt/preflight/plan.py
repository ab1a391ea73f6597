"""Find what would prevent the start of a domain: small rules over visible facts.

Without validation libvirt drops unknown attributes and elements.

A blocker prevents the start or harms the host when the domain starts; a warning reduces performance
or fails later. A rule yields what it can prove; if a fact is None it yields nothing, and
`not_checked` says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.check import platform_rules
from vfiomgr.diagnostic import SEVERITIES, Diagnostic, finding
from vfiomgr.libvirt.attach.claims import unread_domains
from vfiomgr.libvirt.model import (
    ACPI_NODESET,
    AMD_IOMMU,
    DOMAIN_IOMMUFD,
    DRIVER_MODEL,
    INTERRUPTS_ONLY,
    IOMMUFD,
    MAXPHYSADDR,
    MAXPHYSADDR_LIMIT,
    OTHER_KERNEL,
    PCI_DISPLAY,
    PORT_MEMORY,
    QEMU_IOMMUFD,
    SMMU_ACCEL,
    SMMU_BUS,
    VIRTIO_IOMMU,
    lacks_iommufd,
)
from vfiomgr.libvirt.preflight import (
    backend,
    confidential,
    devices,
    drivers,
    memory,
    mmio_window,
    pci_addresses,
    platform,
    presence,
    smmu,
    teaming,
    vf_token,
)
from vfiomgr.libvirt.preflight.context import Claims, PreflightContext
from vfiomgr.paths import IOMMU_NODE
from vfiomgr.rules.report import Report

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from vfiomgr.libvirt.model import Domain, DomainHostdev, DomainIommu, Feature, Hypervisor
    from vfiomgr.snapshot.model import HostSnapshot


_IOMMUS = {"virtio": VIRTIO_IOMMU, "amd": AMD_IOMMU}
_OLD_BACKENDS = frozenset({"kvm", "xen"})


def dropped(context: PreflightContext) -> Iterator[Diagnostic]:
    """What that libvirt does not know and drops silently."""
    version = context.libvirt
    if version is None:
        return
    for line, feature, what in _newer(context):
        if feature.is_in(version):
            continue
        yield finding(
            "element-dropped",
            "warning",
            f"libvirt {version} does not support {feature.what}, and drops it",
            (f"{context.at(line)}: {what}", context.cite_libvirt()),
            "without validation the domain starts without it",
            f"install libvirt {feature.since} or later, or {_otherwise(context, feature, line)}",
        )


def _otherwise(context: PreflightContext, feature: Feature, line: int) -> str:
    if context.host.vfio.has_groups is False and feature in (IOMMUFD, DOMAIN_IOMMUFD):
        return OTHER_KERNEL
    return f"remove it in line {line}"


def _newer(context: PreflightContext) -> Iterator[tuple[int, Feature, str]]:
    """Features of the domain with a known minimum release."""
    domain = context.domain
    for hostdev in domain.hostdevs:
        yield from ((hostdev.line, *found) for found in _newer_of(hostdev))
    cpu, line = domain.cpu, domain.line("cpu/maxphysaddr")
    if cpu.passes_physical_bits or cpu.physical_bits is not None:
        yield line, MAXPHYSADDR, "<maxphysaddr>"
    if cpu.physical_bits_limit is not None:
        yield line, MAXPHYSADDR_LIMIT, f"limit='{cpu.physical_bits_limit}'"
    for controller in domain.controllers:
        if controller.reserve_kib is not None:
            yield controller.line, PORT_MEMORY, f"memReserve='{controller.reserve_kib}'"
    for iommu in domain.iommus:
        yield from ((iommu.line, *found) for found in _newer_of_iommu(iommu))
    if domain.has_iommufd:
        yield domain.line("iommufd"), DOMAIN_IOMMUFD, "<iommufd enabled='yes'>"


def _newer_of(hostdev: DomainHostdev) -> Iterator[tuple[Feature, str]]:
    if hostdev.driver_model is not None:
        yield DRIVER_MODEL, f"<driver model='{hostdev.driver_model}'> of {hostdev.name}"
    if hostdev.iommufd is not None:
        yield IOMMUFD, f"<driver iommufd> of {hostdev.name}"
    if hostdev.kind == "pci" and (hostdev.display or hostdev.ramfb):
        yield PCI_DISPLAY, f"display or ramfb of {hostdev.name}"
    if hostdev.acpi_nodes is not None:
        yield ACPI_NODESET, f"<acpi nodeset> of {hostdev.name}"


def _newer_of_iommu(iommu: DomainIommu) -> Iterator[tuple[Feature, str]]:
    if not iommu.translates_dma:
        yield INTERRUPTS_ONLY, "dma_translation='off'"
    if iommu.bus is not None:
        yield SMMU_BUS, f"pciBus='{iommu.bus}'"
    if iommu.is_accelerated:
        yield SMMU_ACCEL, "accel='on'"


def unknown_iommu(context: PreflightContext) -> Iterator[Diagnostic]:
    """An unknown value is an error (27)."""
    version = context.libvirt
    for iommu in {iommu.model: iommu for iommu in reversed(context.domain.iommus)}.values():
        feature = _IOMMUS.get(iommu.model)
        if feature is None or version is None or feature.is_in(version):
            continue
        line = iommu.line
        yield finding(
            "iommu-model-unknown",
            "blocker",
            f"libvirt {version} does not support {feature.what}",
            (f"{context.at(line)}: {feature.what}", context.cite_libvirt()),
            "libvirt rejects the domain",
            f"install libvirt {feature.since} or later, or write <iommu model='intel'> in line "
            f"{line}",
        )


def old_backend(context: PreflightContext) -> Iterator[Diagnostic]:
    """KVM's own device assignment was removed in Linux 4.12; Xen's is only for Xen."""
    for hostdev in context.domain.hostdevs:
        if hostdev.driver in _OLD_BACKENDS and hostdev.kind == "pci":
            yield finding(
                "old-backend",
                "blocker",
                f"{hostdev.name} uses the backend {hostdev.driver}, which QEMU does not support",
                (context.cite(hostdev, f"<driver name='{hostdev.driver}'>"),),
                "QEMU assigns devices only through VFIO",
                f"write <driver name='vfio'/> in line {hostdev.line}, or omit it",
                subject=hostdev.name,
            )


def iommufd(context: PreflightContext) -> Iterator[Diagnostic]:
    """The requirements of iommufd besides libvirt: the kernel's node, and a QEMU that opens it."""
    wanting = [hostdev for hostdev in context.hostdevs if hostdev.iommufd]
    if not (wanting or context.domain.has_iommufd):
        return
    lacking = tuple(_lacking_for_iommufd(context))
    if lacking:
        otherwise = "remove iommufd: VFIO groups work without it"
        if context.host.vfio.has_groups is False:
            otherwise = OTHER_KERNEL
        yield finding(
            "iommufd-missing",
            "blocker",
            "the domain uses iommufd, which this host lacks",
            (*(context.cite(hostdev, "iommufd='yes'") for hostdev in wanting), *lacking),
            "QEMU opens /dev/iommu and the cdev of each device",
            "boot a kernel with CONFIG_IOMMUFD and CONFIG_VFIO_DEVICE_CDEV and install QEMU "
            f"{QEMU_IOMMUFD} or later; or {otherwise}",
        )


def _lacking_for_iommufd(context: PreflightContext) -> Iterator[str]:
    facts = context.host.readiness
    if facts is not None and facts.has_dev and not facts.has_node(IOMMU_NODE):
        yield f"{IOMMU_NODE} does not exist"
    if lacks_iommufd(context.qemu):
        yield f"QEMU {context.qemu} does not support iommufd (added in {QEMU_IOMMUFD})"


def iommufd_group(context: PreflightContext) -> Iterator[Diagnostic]:
    """`<iommufd fdgroup>`: libvirt uses a descriptor that a program has passed to it.

    virDomainDefValidateIommufd, and qemuProcessGetPassedIommuFd of libvirt 12.8;
    virDomainFDAssociate lasts as long as the connection that called it.
    """
    domain, version = context.domain, context.libvirt
    name, line = domain.iommufd_group, domain.line("iommufd")
    if name is None or (version is not None and not DOMAIN_IOMMUFD.is_in(version)):
        return
    cited = f"{context.at(line)}: <iommufd fdgroup='{name}'>"
    if not domain.has_iommufd:
        yield finding(
            "iommufd-fdgroup-off",
            "blocker",
            "the domain names an fdgroup for iommufd, which it disables",
            (cited,),
            "libvirt rejects the domain",
            f"write enabled='yes' in line {line}, or remove fdgroup",
        )
    elif any(h.kind == "pci" and h.is_seen and h.iommufd is not False for h in context.hostdevs):
        itself = context.itself
        autostarts = itself is not None and itself.autostarts
        yield finding(
            "iommufd-fdgroup",
            "warning" if autostarts else "info",
            "the domain only starts after a program has passed /dev/iommu to libvirt"
            + ", and autostart passes nothing" * autostarts,
            (cited,),
            "the descriptor belongs to the connection of that program (virDomainFDAssociate): else "
            f"libvirt fails with \"file descriptor group '{name}' was not associated\"",
            f"remove fdgroup in line {line}, and libvirt opens /dev/iommu itself; or start the "
            "domain only with the program that passes it, as KubeVirt does",
        )


def driver_model(context: PreflightContext) -> Iterator[Diagnostic]:
    """`<driver model>` names a module (libvirt's default: virPCIDeviceFindBestVFIOVariant)."""
    known = context.host.vfio_modules
    for hostdev in context.hostdevs:
        model = hostdev.driver_model
        if model is None or known is None or not hostdev.managed:
            continue
        if model.replace("-", "_") in {name.replace("-", "_") for name in known}:
            continue
        yield finding(
            "driver-model-missing",
            "blocker",
            f"{hostdev.name} uses driver {model}, which this kernel does not have",
            (
                context.cite(hostdev, f"<driver model='{model}'>"),
                f"modules of {context.host.kernel_release}: {', '.join(known) or 'none'}",
            ),
            "with managed='yes' libvirt loads that module and binds the device to it",
            f"write an available driver in line {hostdev.line}, or omit model: libvirt then "
            "chooses one",
            subject=hostdev.name,
        )


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
    devices.by_pod,
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
    platform.too_wide,
    smmu.several,
    smmu.wrong_bus,
    smmu.maps_nothing,
    smmu.without_iommufd,
    smmu.emulated,
    mmio_window.space_too_small,
    mmio_window.bars_too_large,
    mmio_window.emulated_bits,
    platform.too_many,
    memory.hard_limit,
    memory.session,
    memory.session_managed,
    memory.hugepages,
    memory.too_little,
    memory.missing_node,
    memory.far_memory,
    memory.far_cpus,
    memory.unbound,
    memory.without_cell,
    memory.elsewhere,
    *confidential.RULES,
    dropped,
    unknown_iommu,
    old_backend,
    iommufd,
    iommufd_group,
    backend.missing_groups,
    backend.groups,
    vf_token.missing,
    teaming.mac_addresses,
    driver_model,
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
    return Report(
        tuple(dict.fromkeys(found)), tuple(_not_checked(context)), tuple(_unknown(context))
    )


def _unknown(context: PreflightContext) -> Iterator[str]:
    """Facts that decide whether the domain can start with its devices, and could not be read."""
    host = context.host
    if context.takes_functions:
        yield from platform_rules.unread(host)
    if context.hostdevs and host.users is None:
        yield "processes that use the devices: requires root on the running host"
    if context.hostdevs and host.host_uses is None:
        yield "disks and routes of the host: no /proc"


def _not_checked(context: PreflightContext) -> Iterator[str]:
    """Other skipped checks, with the missing facts."""
    if context.hypervisor is None:
        yield "other domains, and supported features of libvirt and QEMU: libvirt was not queried"
    else:
        yield from unread_domains(context.hypervisor)
    yield OF_LIBVIRT
    if not context.hostdevs:
        return
    host = context.host
    if host.readiness is None:
        yield "limits on locked memory: not in the snapshot"
    if not context.domain.is_x86:
        yield (
            "addresses, BAR windows and the number of CPUs "
            f"({context.domain.architecture} machine): only PCs are supported"
        )
    if context.takes_functions:
        yield from _unseen_addresses(context)
    yield from teaming.unseen(context)
    yield from smmu.unseen(context)
    if context.files is None and any(hostdev.rom_file for hostdev in context.hostdevs):
        yield "whether the ROM exists: the files are on another machine"


def _unseen_addresses(context: PreflightContext) -> Iterator[str]:
    if context.host.topology is None:
        yield "NUMA nodes and huge pages: not in the snapshot"
    if context.host.cpu_address_bits is None and mmio_window.has_host_bits(context):
        yield "whether the BARs fit: the address width of the host is unknown"
    yield from platform.unseen_widths(context)
