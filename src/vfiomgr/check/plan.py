"""The rules of `vfiomgr check`: whether a host is ready for passthrough."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from vfiomgr.check import (
    device_rules,
    driver_rules,
    health_rules,
    log_rules,
    machine_rules,
    platform_rules,
)
from vfiomgr.rules.runner import Fact, RuleSet, reading, register, rule
from vfiomgr.snapshot.named import UNIDENTIFIED
from vfiomgr.units import counted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.check.model import Readiness
    from vfiomgr.diagnostic import Diagnostic
    from vfiomgr.rules.runner import Report
    from vfiomgr.snapshot.model import HostSnapshot


def _not_checked(host: HostSnapshot) -> Iterator[str]:
    if host.devices and all(device.header_type is None for device in host.devices):
        yield "whether devices answer: no configuration space is readable"
    if host.devices and not any(device.reset_method for device in host.devices):
        yield "how GPUs are reset: no function has a reset_method"
    if host.iommu.is_on and all(group.direct_regions is None for group in host.groups):
        yield "memory that the firmware requires mapped 1:1: no IOMMU group has reserved_regions"
    if host.pci_unidentified:
        count, first = len(host.pci_unidentified), host.pci_unidentified[0]
        yield f"{counted(count, 'PCI function')}, e.g. {first}: {UNIDENTIFIED}"
    if host.kernel.command_line is None:
        yield "the kernel command line: /proc/cmdline not found"
    if host.readiness is not None:
        yield from _unseen(host.readiness)
    yield from health_rules.unread(host)


def _unseen(facts: Readiness) -> Iterator[str]:
    is_machine = facts.has_modprobe is not None
    if is_machine and facts.kernel_log is None:
        yield "the kernel log: dmesg shows it only to root"
    if all(module.state is None for module in facts.modules):
        yield "kernel modules: neither /sys/module nor the lists of /lib/modules found"
    for fact, text in (
        (facts.has_driver_override, "whether functions have a driver_override: none has the file"),
        (facts.module_settings, "settings of kernel modules: modprobe.d not found"),
        (facts.framebuffers, "the firmware's framebuffer: /proc/iomem not found"),
        (facts.config_source, "the kernel's configuration: no /boot/config-RELEASE, no config.gz"),
        (facts.has_dev or None, "permissions of VFIO nodes: /dev not found"),
        (facts.denials, "what SELinux denied: /var/log/audit/audit.log is not readable"),
        (facts.memlock, "limits on locked memory: no systemd units, no limits.conf"),
        (facts.lockdown, "lockdown: /sys/kernel/security is empty or absent"),
        (facts.secure_boot, "Secure Boot: not shown in /sys/firmware/efi/efivars"),
        (facts.distribution, "the distribution, for its own remedies: os-release not found"),
    ):
        if fact is None:
            yield text


_READINESS: Fact[HostSnapshot, Readiness] = Fact(
    lambda host: host.readiness, "firmware, limits, settings of modules", "not in the snapshot"
)
"""What a scan reads only for a check."""


def _kernel_log(host: HostSnapshot, facts: Readiness) -> Iterator[Diagnostic]:
    return log_rules.kernel_log(host, facts, partial(find_named, host))


def find_named(host: HostSnapshot, *names: str) -> Iterator[Diagnostic]:
    """The findings of some rules, except those about the kernel log."""
    for each in RULES.named(*names):
        if "kernel-log" not in each.names:
            yield from each.find(host)


RULES: RuleSet[HostSnapshot] = register(
    RuleSet(
        "a host",
        rules=(
            rule(platform_rules.iommu, "iommu"),
            rule(device_rules.none, "no-devices"),
            rule(device_rules.silence, "silent-device"),
            rule(device_rules.unassigned_bars, "bar-not-assigned"),
            rule(driver_rules.without_group, "no-group"),
            rule(driver_rules.shared_with_gpu, "shared-group"),
            rule(driver_rules.not_viable, "group-not-viable"),
            rule(driver_rules.reserved_regions, "reserved-region"),
            rule(driver_rules.acs_override, "acs-override"),
            rule(driver_rules.acs_parameter, "acs-parameter"),
            rule(driver_rules.unisolated_slots, "no-isolation"),
            rule(device_rules.same_identifiers, "same-pci-ids"),
            rule(device_rules.no_reset, "no-reset"),
            rule(device_rules.weak_reset, "weak-reset"),
            rule(driver_rules.relaxed_regions, "relaxed-region"),
            rule(device_rules.fabric, "fabric-manager"),
            rule(device_rules.gvt_g, "gvt-g"),
            rule(device_rules.gim_without_ari, "gim-without-ari"),
            rule(device_rules.without_node, "numa-unknown"),
            rule(device_rules.resizable_bar, "resizable-bar"),
            rule(health_rules.findings, *health_rules.OF_DEVICES),
            rule(health_rules.gone, "device-gone"),
            rule(health_rules.half_removed, "half-removed"),
            reading(
                _READINESS,
                platform_rules.interrupt_remapping,
                "interrupt-remapping",
                "unsafe-interrupts",
            ),
            reading(_READINESS, device_rules.address_width, "address-width"),
            reading(_READINESS, platform_rules.no_iommu_mode, "no-iommu-mode"),
            reading(_READINESS, platform_rules.vfio_pci, "vfio-pci"),
            reading(_READINESS, platform_rules.iommu_backend, "iommu-backend"),
            reading(_READINESS, platform_rules.kvm, "kvm"),
            reading(_READINESS, platform_rules.driver_override, "driver-override"),
            reading(_READINESS, driver_rules.nouveau, "nouveau"),
            reading(_READINESS, driver_rules.taken_by_identifiers, "vfio-pci-ids"),
            reading(_READINESS, driver_rules.ignored_options, "module-option-ignored"),
            reading(_READINESS, driver_rules.invalid_identifiers, "vfio-pci-ids-invalid"),
            reading(_READINESS, driver_rules.lost_race, "vfio-pci-ids-lost"),
            reading(_READINESS, driver_rules.not_probed, "override-not-probed"),
            reading(_READINESS, driver_rules.gone_modules, "module-gone"),
            reading(_READINESS, platform_rules.unknown_parameters, "parameter-unknown"),
            reading(_READINESS, platform_rules.not_in_force, "parameter-not-in-force"),
            reading(_READINESS, driver_rules.left_out, "vfio-pci-ids-incomplete"),
            reading(_READINESS, device_rules.reset_trouble, "amd-reset"),
            reading(_READINESS, device_rules.lost_by_reset, "amd-lost-by-reset"),
            reading(_READINESS, device_rules.oops_at_unbind, "amd-unbind"),
            reading(_READINESS, device_rules.reported_faults, "gpu-fault"),
            reading(_READINESS, device_rules.firmware_framebuffer, "firmware-framebuffer"),
            reading(_READINESS, driver_rules.host_drivers, "host-driver"),
            reading(_READINESS, platform_rules.iommufd, "iommufd"),
            reading(_READINESS, platform_rules.container_node, "container-node"),
            reading(_READINESS, platform_rules.guest_irqs, "xen-guest-irqs"),
            reading(_READINESS, platform_rules.memlock, "memlock"),
            reading(_READINESS, platform_rules.unit_hardening, "unit-hardening"),
            reading(_READINESS, platform_rules.lockdown, "lockdown"),
            reading(_READINESS, platform_rules.secure_boot, "secure-boot"),
            reading(_READINESS, platform_rules.unauthorized, "thunderbolt-unauthorized"),
            reading(_READINESS, device_rules.i915_vfs, "i915-vfs"),
            reading(_READINESS, device_rules.without_mdevctl, "mdevctl-missing"),
            reading(_READINESS, device_rules.d3cold, "d3cold"),
            reading(_READINESS, machine_rules.iommu_blocks_host, "iommu-blocks-host"),
            reading(_READINESS, machine_rules.balloons, "balloon"),
            reading(_READINESS, machine_rules.hidden_addresses, "xen-hide-invalid"),
            reading(_READINESS, machine_rules.selinux_denials, "selinux-access"),
            reading(_READINESS, log_rules.kernel_fault, "kernel-fault"),
            reading(_READINESS, _kernel_log, "kernel-log"),
        ),
        not_checked=(_not_checked,),
        unknown=(platform_rules.unread,),
        host=lambda host: host,
    )
)


def check(host: HostSnapshot) -> Report:
    """All findings, the most severe first, and the facts that were not available."""
    return RULES.run(host)
