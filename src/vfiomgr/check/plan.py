"""Check a host for passthrough: small rules over facts, each with evidence.

A rule reports only what it can prove. If a fact is None, the rule is silent and `not_checked` lists
the fact.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.check import device_rules, driver_rules, platform_rules
from vfiomgr.check.model import Report
from vfiomgr.diagnostic import SEVERITIES
from vfiomgr.snapshot.named import UNIDENTIFIED
from vfiomgr.units import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from vfiomgr.check.model import Readiness
    from vfiomgr.diagnostic import Diagnostic
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot

_OF_DEVICES: tuple[Callable[[HostSnapshot], Iterable[Diagnostic]], ...] = (
    device_rules.none,
    device_rules.silence,
    driver_rules.without_group,
    driver_rules.shared_with_gpu,
    driver_rules.acs_override,
    driver_rules.unisolated_slots,
    device_rules.same_identifiers,
    device_rules.no_reset,
    device_rules.weak_reset,
    device_rules.gvt_g,
)
"""Rules over facts that every scan reads."""

_OF_READINESS: tuple[Callable[[HostSnapshot, Readiness], Iterable[Diagnostic]], ...] = (
    platform_rules.interrupt_remapping,
    platform_rules.no_iommu_mode,
    platform_rules.vfio_pci,
    platform_rules.iommu_backend,
    platform_rules.driver_override,
    driver_rules.nouveau,
    driver_rules.taken_by_identifiers,
    driver_rules.lost_race,
    driver_rules.left_out,
    device_rules.reset_trouble,
    device_rules.lost_by_reset,
    device_rules.oops_at_unbind,
    device_rules.firmware_framebuffer,
    driver_rules.host_drivers,
    platform_rules.iommufd,
    platform_rules.container_node,
    platform_rules.memlock,
    platform_rules.lockdown,
    platform_rules.secure_boot,
    device_rules.d3cold,
)
"""Rules over facts that a scan reads only for a check."""


def check(host: HostSnapshot) -> Report:
    """Return all findings, the most severe first, and the facts that were not available."""
    found = [*platform_rules.iommu(host), *(f for rule in _OF_DEVICES for f in rule(host))]
    if host.readiness is not None:
        found += [f for rule in _OF_READINESS for f in rule(host, host.readiness)]
    found.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    return Report(tuple(found), tuple(_not_checked(host)), tuple(platform_rules.unread(host)))


def _not_checked(host: HostSnapshot) -> Iterator[str]:
    """The facts that could not be checked, and what was missing."""
    if host.devices:
        yield from _unseen_of_devices(host.devices)
    if host.pci_unidentified:
        count, first = len(host.pci_unidentified), host.pci_unidentified[0]
        yield f"{counted(count, 'PCI function')}, e.g. {first}: {UNIDENTIFIED}"
    if host.kernel_command_line is None:
        yield "the kernel command line: /proc/cmdline not found"
    if host.readiness is None:
        yield "firmware, limits, settings of modules: not in the snapshot"
    else:
        yield from _unseen(host.readiness)


def _unseen_of_devices(devices: Iterable[PciDevice]) -> Iterator[str]:
    if all(device.header_type is None for device in devices):
        yield "whether devices answer: no configuration space is readable"
    if not any(device.reset_method for device in devices):
        yield "how GPUs are reset: no function has a reset_method"


def _unseen(facts: Readiness) -> Iterator[str]:
    if all(module.state is None for module in facts.modules):
        yield "kernel modules: neither /sys/module nor the lists of /lib/modules found"
    for fact, text in (
        (facts.has_driver_override, "whether functions have a driver_override: none has the file"),
        (facts.module_settings, "settings of kernel modules: modprobe.d not found"),
        (facts.framebuffers, "the firmware's framebuffer: /proc/iomem not found"),
        (facts.config_source, "the kernel's configuration: no /boot/config-RELEASE, no config.gz"),
        (facts.has_dev or None, "permissions of VFIO nodes: /dev not found"),
        (facts.memlock, "limits on locked memory: no systemd units, no limits.conf"),
        (facts.lockdown, "lockdown: /sys/kernel/security is empty or absent"),
        (facts.secure_boot, "Secure Boot: not shown in /sys/firmware/efi/efivars"),
        (facts.distribution, "the distribution, for its own remedies: os-release not found"),
    ):
        if fact is None:
            yield text
