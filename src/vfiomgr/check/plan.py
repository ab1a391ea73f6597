"""Check a host for passthrough: small rules over facts, each with evidence.

A rule reports only what it can prove. If a fact is None, the rule is silent and `not_checked` lists
the fact.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.check.model import Report
from vfiomgr.check.rules import devices, drivers, platform
from vfiomgr.diagnostic import SEVERITIES
from vfiomgr.paths import IOMMU_GROUPS, IOMMU_UNITS
from vfiomgr.snapshot.model import UNIDENTIFIED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from vfiomgr.check.model import Readiness
    from vfiomgr.diagnostic import Diagnostic
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot

_OF_DEVICES: tuple[Callable[[HostSnapshot], Iterable[Diagnostic]], ...] = (
    devices.none,
    devices.silence,
    drivers.without_group,
    drivers.shared_with_gpu,
    drivers.acs_override,
    drivers.unisolated_slots,
    devices.twins,
    devices.no_reset,
    devices.weak_reset,
)
"""Rules over facts that every scan reads."""

_OF_READINESS: tuple[Callable[[HostSnapshot, Readiness], Iterable[Diagnostic]], ...] = (
    platform.interrupt_remapping,
    platform.no_iommu_mode,
    platform.vfio_pci,
    platform.iommu_backend,
    platform.driver_override,
    drivers.nouveau,
    drivers.taken_by_identifiers,
    drivers.lost_race,
    drivers.left_out,
    devices.reset_trouble,
    devices.lost_by_reset,
    devices.oops_at_unbind,
    devices.firmware_framebuffer,
    drivers.host_drivers,
    platform.iommufd,
    platform.container_node,
    platform.memlock,
    platform.lockdown,
    platform.secure_boot,
    devices.d3cold,
)
"""Rules over facts that a scan reads only for a check."""


def check(host: HostSnapshot) -> Report:
    """Return all findings, the most severe first, and the facts that were not available."""
    found = [*platform.iommu(host), *(f for rule in _OF_DEVICES for f in rule(host))]
    if host.readiness is not None:
        found += [f for rule in _OF_READINESS for f in rule(host, host.readiness)]
    found.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    return Report(tuple(found), tuple(_not_checked(host)))


def _not_checked(host: HostSnapshot) -> Iterator[str]:
    """The facts that could not be checked, and what was missing."""
    if host.devices:
        yield from _unseen_of_devices(host.devices)
    if host.pci_unidentified:
        count, first = len(host.pci_unidentified), host.pci_unidentified[0]
        yield f"{count} PCI functions, e.g. {first}: {UNIDENTIFIED}"
    if not host.iommu.is_known:
        yield f"whether the IOMMU is on: neither {IOMMU_GROUPS} nor {IOMMU_UNITS} found"
    if host.kernel_command_line is None:
        yield "the kernel command line: /proc/cmdline not found"
    if host.readiness is None:
        yield "modules, interrupts, firmware, limits: not in the snapshot"
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
        (facts.interrupt_chips, "whether interrupts are remapped: /proc/interrupts not found"),
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
