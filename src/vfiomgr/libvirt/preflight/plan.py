"""The rules about what would prevent the start of a domain.

A blocker prevents the start or harms the host when the domain starts; a warning reduces performance
or fails later. A rule yields what it can prove; if a fact is None it yields nothing, and
`not_checked` says so. A guest that no libvirt knows is checked by the same rules (`check_planned`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.check import health_rules, platform_rules
from vfiomgr.guests.backend import checks_guests
from vfiomgr.libvirt.attach.claims import unread_domains
from vfiomgr.libvirt.build.hostdevs import hostdevs_of
from vfiomgr.libvirt.build.plan import controllers_of
from vfiomgr.libvirt.model import Domain, DomainCpu, DomainMemory, Hypervisor
from vfiomgr.libvirt.preflight import (
    bars,
    command_line,
    desktop,
    drivers,
    features,
    health,
    host_files,
    memory,
    pci_addresses,
    platform,
    presence,
    settings,
    users,
    viommu,
)
from vfiomgr.libvirt.preflight.confidential import NAMES as OF_CONFIDENTIAL
from vfiomgr.libvirt.preflight.confidential import confidential
from vfiomgr.libvirt.preflight.context import PreflightContext, claims_of
from vfiomgr.libvirt.preflight.host_files import NO_FILES, LibvirtFiles
from vfiomgr.rules.runner import Report, RuleSet, register, rule

if TYPE_CHECKING:
    from vfiomgr.diagnostic import Diagnostic
    from vfiomgr.guests.model import GuestPlan, GuestRequest
    from vfiomgr.snapshot.model import HostSnapshot

_OF_QEMU = frozenset({None, "", "kvm", "qemu", "hvf", "test"})
"""Domain types whose devices use VFIO; the last one is that of libvirt's test driver."""
OF_LIBVIRT = "disks, networks, firmware and other parts without host devices: libvirt checks them"
"""Parts that may also fail, and that no rule covers."""


def _unknown(context: PreflightContext) -> Iterator[str]:
    """Facts that decide whether the domain can start with its devices, and could not be read."""
    host = context.host
    if context.takes_functions:
        yield from platform_rules.unread(host)
    if context.hostdevs and host.users.processes is None:
        yield "processes that use the devices: requires root on the running host"
    if context.hostdevs and host.users.host_uses is None:
        yield "disks and routes of the host: no /proc"


def _not_checked(context: PreflightContext) -> Iterator[str]:
    """Other skipped checks, with the missing facts."""
    if context.hypervisor is None:
        yield context.fix(
            "other domains, and supported features of libvirt and QEMU: libvirt was not queried",
            "domains of libvirt that have or claim the devices: libvirt was not queried",
        )
    else:
        yield from unread_domains(context.hypervisor)
    if context.is_of_libvirt:
        yield OF_LIBVIRT
    yield from command_line.unread(context.domain)
    if not context.hostdevs:
        return
    yield from drivers.unseen_hook_security(context)
    host = context.host
    read = {
        "hooks of libvirt": context.host_files,
        "limits on locked memory, the kernel log": host.readiness,
        "links and PCIe errors of devices": host.health,
    }
    yield from (f"{what}: not in the snapshot" for what, facts in read.items() if facts is None)
    if not context.domain.is_x86:
        yield (
            "addresses, BAR windows and the number of CPUs "
            f"({context.domain.architecture} machine): only PCs are supported"
        )
    if context.takes_functions:
        if host.topology is None:
            yield "NUMA nodes and huge pages: not in the snapshot"
        if host.kernel.cpu_address_bits is None and platform.has_host_bits(context):
            yield "whether the BARs fit: the address width of the host is unknown"
        yield from viommu.unseen_widths(context)
    yield from settings.unseen_mac_addresses(context)
    yield from viommu.unseen_places(context)
    if context.files is None and any(hostdev.rom_file for hostdev in context.hostdevs):
        yield "whether the ROM exists: the files are on another machine"


RULES: RuleSet[PreflightContext] = register(
    RuleSet(
        "a domain",
        rules=(
            rule(platform.host, *platform.OF_THE_HOST),
            rule(platform.no_vfio, "libvirt-without-vfio"),
            rule(platform.no_kvm, "no-kvm"),
            rule(platform.other_architecture, "other-architecture"),
            rule(presence.missing, "device-missing"),
            rule(health.health, *health_rules.OF_DEVICES),
            rule(health.logged, "kernel-log"),
            rule(presence.twice, "device-twice"),
            *(rule(each, each.id) for each in presence.GUARD_RULES),
            rule(presence.plain_network_device, "interface-not-vf"),
            rule(drivers.on_host_driver, "on-host-driver"),
            rule(drivers.not_installed, "hook-not-installed"),
            rule(drivers.hook_denied, "hook-label", "hook-boolean"),
            rule(drivers.refused, "hook-refused"),
            rule(drivers.host_unprepared, "hook-refused"),
            rule(
                drivers.managed_in_use,
                "managed-boot-display",
                "managed-in-use",
                "managed-vgpu-function",
            ),
            rule(drivers.managed_vendor_function, "managed-vendor-function"),
            rule(drivers.vendor_function, "vendor-function-old-libvirt"),
            rule(drivers.variant, "variant-old-libvirt"),
            rule(drivers.managed_and_bound, "managed-and-bound"),
            rule(drivers.not_kept, "binding-not-kept"),
            rule(users.not_viable, "group-not-viable"),
            rule(users.reserved_regions, "reserved-region"),
            rule(users.shared_with_running, "group-held-by-domain"),
            rule(users.no_reset, "no-reset"),
            rule(users.by_running_domain, "held-by-domain"),
            rule(users.by_defined_domain, "claimed-by-domain"),
            rule(users.by_process, "held-by-process"),
            rule(users.by_pod, "held-by-pod", "held-by-claim", "users-unknown"),
            rule(presence.inactive, "vgpu-missing", "vgpu-inactive"),
            rule(settings.wrong_model, "vgpu-model"),
            rule(presence.untyped_function, "function-without-type"),
            rule(presence.not_kept, "vgpu-not-kept"),
            rule(settings.display_without_graphics, "display-without-graphics"),
            rule(settings.several_ramfb, "several-ramfb"),
            rule(settings.vgpu_boot_order, "vgpu-boot-order"),
            rule(pci_addresses.same_place, "same-place"),
            rule(command_line.clashes, "same-place"),
            rule(command_line.not_locked, "commandline-device"),
            rule(command_line.settings, "commandline-set"),
            rule(pci_addresses.slot_of_port, "slot-not-zero"),
            rule(pci_addresses.on_expander, "device-on-expander"),
            rule(pci_addresses.expander_node, "expander-node"),
            rule(pci_addresses.expander_buses, "expander-buses"),
            rule(pci_addresses.without_function_zero, "function-without-zero"),
            rule(pci_addresses.multifunction, "multifunction-missing"),
            rule(pci_addresses.companions_left_out, "companion-left-out"),
            rule(pci_addresses.companions_apart, "companions-apart"),
            rule(pci_addresses.no_spare_port, "no-free-port"),
            rule(viommu.group_apart, "viommu-group-apart"),
            rule(viommu.caching_mode, "viommu-caching-mode"),
            rule(viommu.amd_maps_nothing, "viommu-without-mapping"),
            rule(viommu.too_wide, "viommu-too-wide"),
            rule(viommu.several, "viommu-several"),
            rule(viommu.wrong_bus, "viommu-wrong-bus"),
            rule(viommu.smmu_maps_nothing, "viommu-without-mapping"),
            rule(viommu.without_iommufd, "viommu-without-iommufd"),
            rule(viommu.emulated, "viommu-emulated-device"),
            rule(platform.space_too_small, "address-space-too-small"),
            rule(platform.bars_too_large, "aperture-too-small"),
            rule(platform.beyond_iommu, "address-bits-beyond-iommu"),
            rule(platform.emulated_bits, "address-bits-beyond-host"),
            rule(platform.too_many_cpus, "too-many-cpus"),
            rule(platform.mixed_cores, "mixed-cores"),
            rule(memory.hard_limit, "hard-limit-too-low"),
            rule(memory.balloon, "balloon"),
            rule(memory.session_tuning, "session-memtune"),
            rule(memory.session, "session-memory-limit"),
            rule(memory.session_managed, "session-managed"),
            rule(memory.hugepages, "hugepages-too-few"),
            rule(memory.too_little, "memory-too-little"),
            rule(memory.missing_node, "numa-node-missing"),
            rule(memory.far_memory, "far-memory"),
            rule(memory.far_cpus, "far-cpus"),
            rule(memory.unbound, "numa-unbound"),
            rule(memory.without_cell, "device-without-cell"),
            rule(memory.elsewhere, "device-of-other-cell"),
            rule(confidential, *OF_CONFIDENTIAL),
            rule(features.dropped, "element-dropped"),
            rule(features.unknown_iommu, "iommu-model-unknown"),
            rule(features.old_backend, "old-backend"),
            rule(features.iommufd, "iommufd-missing"),
            rule(features.iommufd_mdev, "iommufd-mdev"),
            rule(features.iommufd_group, "iommufd-fdgroup-off", "iommufd-fdgroup"),
            rule(features.missing_groups, "vfio-groups-missing"),
            rule(features.groups, "iommufd-possible"),
            rule(settings.missing_token, "vf-token-missing"),
            rule(settings.mac_addresses, "teaming-mac"),
            rule(features.driver_model, "driver-model-missing"),
            rule(settings.boot_order, "boot-order-twice"),
            rule(host_files.hook_calls, "hook-runs-virsh"),
            rule(host_files.hook_removals, "hook-removes-module"),
            rule(host_files.hooks_not_run, "hook-not-executable"),
            rule(host_files.hook_without_scripts, "hook-without-scripts"),
            rule(host_files.hook_devices, "hook-device"),
            rule(host_files.rom_denied, "rom-apparmor"),
            rule(host_files.rom_content, "rom-invalid"),
            rule(host_files.qemu_log, "qemu-log"),
            rule(settings.rom_file, "rom-relative", "rom-missing"),
            rule(settings.option_rom, "option-rom"),
            rule(settings.nvlink, "fabric-divided", "fabric-partition"),
            rule(
                desktop.shared_memory,
                "shared-memory-stale",
                "shared-memory-denied",
                "shared-memory-missing",
            ),
            rule(desktop.kvmfr, "kvmfr-missing", "kvmfr-too-small", "kvmfr-acl", "kvmfr-apparmor"),
            rule(desktop.inputs, "input-missing", "input-by-number"),
            rule(desktop.audio, "audio-pipewire", "audio-user"),
            rule(desktop.balloon, "looking-glass-balloon"),
            rule(desktop.emulated_screen, "emulated-screen"),
            rule(settings.muxless, "code-43-laptop"),
            rule(settings.code_43, "code-43"),
            rule(bars.resizable_bar, "resizable-bar"),
            rule(bars.off, "resizable-bar-off"),
            rule(bars.hidden, "resizable-bar-hidden"),
        ),
        not_checked=(_not_checked,),
        unknown=(_unknown,),
    )
)


def preflight(
    host: HostSnapshot,
    domains: Iterable[Domain],
    hypervisor: Hypervisor | None = None,
    files: Mapping[str, bool] | None = None,
    host_files: LibvirtFiles | None = NO_FILES,
) -> tuple[Report, ...]:
    """All findings about the next start of each domain on a host, blockers first.

    `hypervisor` is what libvirt reports, and `files` the existing files among those that the
    domains name; None if not checked. `host_files` is what the host's files of libvirt show; None
    if they cannot be read.
    """
    claims = claims_of(hypervisor)
    read = map(command_line.with_arguments, domains)
    return tuple(
        _judge(PreflightContext(host, d, claims, hypervisor, files, host_files=host_files))
        for d in read
    )


def _judge(context: PreflightContext) -> Report:
    kind = context.domain.kind
    if kind not in _OF_QEMU:
        return Report((), (f"a domain of type {kind}: its devices do not use VFIO",))
    return RULES.run(context)


_SOURCE = "arguments"


@checks_guests
def check_planned(host: HostSnapshot, request: GuestRequest, plan: GuestPlan) -> Report:
    """All findings about the start of a guest; what only libvirt knows is not checked."""
    domain = domain_of(request, plan)
    report = RULES.run(PreflightContext(host, domain, is_of_libvirt=False))
    findings = [_without_lines(one) for one in report.findings]
    return Report.of(findings, report.not_checked, report.unknown)


def domain_of(request: GuestRequest, plan: GuestPlan) -> Domain:
    """The guest as a domain of libvirt."""
    placed = [h for unit in plan.devices for h in hostdevs_of(unit, plan.places.get(unit.name))]
    hostdevs = tuple(planned.device for planned in placed)
    properties = [
        f"device.{planned.device.alias}.{known.name}={known.value}"
        for planned in placed
        for known in planned.properties
    ]
    if plan.window.firmware_mib is not None:
        properties.append(f"name=opt/ovmf/X-PciMmio64Mb,string={plan.window.firmware_mib}")
    memory = plan.memory
    return Domain(
        source=_SOURCE,
        name=request.name,
        uuid=None,
        kind=request.kind,
        machine="q35" if plan.architecture == "x86_64" else "virt",
        architecture=plan.architecture,
        memory=DomainMemory(
            request.memory_bytes,
            has_hugepages=request.hugepage_bytes is not None,
            hugepage_bytes=() if request.hugepage_bytes is None else (request.hugepage_bytes,),
            host_nodes=frozenset(memory.host_nodes),
            cell_nodes=tuple((c.cell.number, frozenset({c.host_node})) for c in memory.cells),
        ),
        cpu=DomainCpu(
            request.vcpus,
            mode="host-passthrough",
            passes_physical_bits=request.kind == "kvm",
            physical_bits_limit=plan.window.address_bits,
            cells=tuple(entry.cell for entry in memory.cells),
        ),
        firmware=request.firmware,
        hostdevs=hostdevs,
        controllers=controllers_of(plan),
        taken=tuple(hostdev.guest for hostdev in hostdevs if hostdev.guest is not None),
        has_graphics=True,
        qemu_arguments=tuple(properties),
    )


def _without_lines(found: Diagnostic) -> Diagnostic:
    """A finding without lines of a domain as evidence, which the guest does not have."""
    evidence = tuple(text for text in found.evidence if not text.startswith(f"{_SOURCE}:"))
    return replace(found, evidence=evidence)
