"""Rules about the platform: IOMMU, interrupts, lockdown, Secure Boot."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.check.rules import remedy
from vfiomgr.diagnostic import finding
from vfiomgr.passthrough import guards
from vfiomgr.passthrough.iommu_hints import command_line_words
from vfiomgr.paths import IOMMU_GROUPS, IOMMU_UNITS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.check.model import Readiness
    from vfiomgr.diagnostic import Diagnostic, Severity
    from vfiomgr.snapshot.model import HostSnapshot

_X86_UNITS = ("dmar", "ivhd")
_ECAP_REMAPS = 1 << 3
"""Interrupt remapping support (ecap_ir_support in drivers/iommu/intel/iommu.h)."""
_DMAR_REMAPS = 1
"""The platform supports it (dmar_ir_support in drivers/iommu/intel/dmar.c)."""
_NOT_REMAPPED = frozenset({"intremap=off", "nointremap"})
_PARAMETERS = "/sys/module/{}/parameters/{}"


def iommu(host: HostSnapshot) -> Iterator[Diagnostic]:
    """Report whether the IOMMU is on, by groups, units and tables, not by the command line."""
    if not host.devices or not host.iommu.is_known:
        return
    evidence = tuple(_iommu_evidence(host))
    off = guards.iommu_off(host)
    if off is None:
        why = "VFIO assigns only devices that an IOMMU isolates from the rest of memory"
        yield finding("iommu", "ok", "the IOMMU isolates devices", evidence, why)
        return
    is_for_words = command_line_words(host) is not None
    how = remedy.command_line(host.readiness) if is_for_words else ""
    yield finding(
        "iommu",
        "blocker",
        "the IOMMU is off",
        evidence,
        "without an IOMMU a guest's device could write to all of the host's memory, so VFIO "
        "refuses it",
        f"{off.remedy}{how}",
    )


def _iommu_evidence(host: HostSnapshot) -> Iterator[str]:
    numbers = [g.number for g in host.groups if g.has_pci_members and not g.is_noiommu]
    count = f"{len(numbers)} groups of PCI functions" if numbers else "no group of PCI functions"
    yield f"{IOMMU_GROUPS}: {count}"
    yield f"{IOMMU_UNITS}: {', '.join(host.iommu.units) or 'no unit'}"
    if host.readiness is not None and host.readiness.has_acpi_tables:
        tables = ", ".join(host.iommu.firmware_tables) or "none of DMAR, IVRS, IORT"
        yield f"/sys/firmware/acpi/tables: {tables}"
    words = [w for w in (host.kernel_command_line or "").split() if "iommu" in w]
    if words:
        yield f"/proc/cmdline: {' '.join(words)}"


def interrupt_remapping(host: HostSnapshot, facts: Readiness) -> Iterator[Diagnostic]:
    """Report missing interrupt remapping, with which VFIO refuses groups (EPERM).

    See vfio_iommu_type1_attach_group. Only on x86; on Arm the interrupt controller isolates them.
    """
    if not host.iommu.is_on or not any(u.startswith(_X86_UNITS) for u in host.iommu.units):
        return
    is_remapped, evidence = _remapping(facts)
    if is_remapped is None:
        return
    why = "without remapping a device can raise any interrupt of the host"
    if is_remapped:
        title = (
            "interrupts are remapped" if facts.interrupt_chips else "the IOMMU can remap interrupts"
        )
        yield finding("interrupt-remapping", "ok", title, evidence, why)
        return
    unsafe = _unsafe_interrupts(facts)
    severity: Severity = "warning" if unsafe else "blocker"
    title = "interrupts are not remapped" + (" (unsafe interrupts allowed)" if unsafe else "")
    consequence = "" if unsafe else ", so no guest can start with a device (EPERM)"
    yield finding(
        "interrupt-remapping",
        severity,
        title,
        evidence + unsafe,
        why + consequence,
        _remapping_remedy(host, facts),
    )


def _remapping(facts: Readiness) -> tuple[bool | None, tuple[str, ...]]:
    """Whether interrupts are remapped, with evidence; None if unknown."""
    ecaps = facts.iommu_ecaps
    evidence = tuple(
        f"{IOMMU_UNITS}/{unit}/intel-iommu/ecap: {ecap:x}, "
        f"bit 3 is {'set' if ecap & _ECAP_REMAPS else 'clear'}"
        for unit, ecap in ecaps.items()
    )
    if facts.interrupt_chips:
        remapped = [chip for chip in facts.interrupt_chips if chip.startswith("IR-")]
        shown = f"/proc/interrupts: {', '.join(remapped or facts.interrupt_chips)}"
        return bool(remapped), (shown, *evidence)
    return (all(ecap & _ECAP_REMAPS for ecap in ecaps.values()) if ecaps else None), evidence


def _unsafe_interrupts(facts: Readiness) -> tuple[str, ...]:
    """Evidence that VFIO is configured to allow unsafe interrupts."""
    name = "allow_unsafe_interrupts"
    module = facts.module("vfio_iommu_type1")
    value = (module.parameters or {}).get(name)
    if value is not None:
        place = _PARAMETERS.format(module.name, name)
        return (f"{place}: {value}",) if value == "Y" else ()
    options = facts.settings("options", module.name)
    wanted = {f"{name}={yes}" for yes in ("1", "y", "Y")}
    return tuple(str(o) for o in options if wanted & set(o.arguments.split()))


def _remapping_remedy(host: HostSnapshot, facts: Readiness) -> str:
    words = [w for w in (host.kernel_command_line or "").split() if w in _NOT_REMAPPED]
    if words:
        how = remedy.command_line(facts)
        return f"remove {' '.join(words)} from the kernel command line{how}; then reboot"
    if facts.config.get("IRQ_REMAP") == "n":
        return f"boot a kernel with CONFIG_IRQ_REMAP (not set in {facts.config_source})"
    if facts.dmar_flags is not None and not facts.dmar_flags & _DMAR_REMAPS:
        return "enable interrupt remapping in the firmware setup (the DMAR table disables it)"
    return (
        "check dmesg for remapping, and enable it in the firmware setup; if all guests are "
        "trusted, add to /etc/modprobe.d: options vfio_iommu_type1 allow_unsafe_interrupts=1"
    )


def no_iommu_mode(host: HostSnapshot, facts: Readiness) -> Iterator[Diagnostic]:
    """Report VFIO's no-IOMMU mode, which isolates nothing (CONFIG_VFIO_NOIOMMU)."""
    module, name = facts.module("vfio"), "enable_unsafe_noiommu_mode"
    evidence = [
        f"{IOMMU_GROUPS}/{group.number}/name: {group.name}"
        for group in host.groups
        if group.is_noiommu
    ]
    if (module.parameters or {}).get(name) == "Y":
        evidence.insert(0, f"{_PARAMETERS.format('vfio', name)}: Y")
    if not evidence:
        return
    evidence += [str(o) for o in facts.settings("options", "vfio") if name in o.arguments]
    yield finding(
        "no-iommu-mode",
        "warning",
        "VFIO's no-IOMMU mode is on",
        tuple(evidence),
        "a device in this mode can write to all of the host's memory; it taints the kernel, and "
        "vfiomgr does not use it",
        f"write N to {_PARAMETERS.format('vfio', name)}, and remove the option from modprobe.d "
        "and the kernel command line",
    )


def lockdown(_host: HostSnapshot, facts: Readiness) -> Iterator[Diagnostic]:
    """Report lockdown, which does not affect VFIO (lockdown_reason in linux/security.h)."""
    if facts.lockdown not in ("integrity", "confidentiality"):
        return
    yield finding(
        "lockdown",
        "info",
        f"the kernel is locked down ({facts.lockdown})",
        (f"/sys/kernel/security/lockdown: {facts.lockdown}",),
        "VFIO works, but modules without a trusted signature (e.g. vGPU drivers) do not load, and "
        "programs cannot write to the configuration space of devices (setpci)",
        "sign such modules with an enrolled machine owner key (mokutil --import)",
    )


def secure_boot(_host: HostSnapshot, facts: Readiness) -> Iterator[Diagnostic]:
    """Report Secure Boot, with which many kernels check the signatures of modules."""
    if facts.secure_boot:
        yield finding(
            "secure-boot",
            "info",
            "Secure Boot is on",
            ("/sys/firmware/efi/efivars: SecureBoot is 1",),
            "the distribution's vfio-pci is signed; a module built on this host (e.g. a vGPU "
            "driver or vendor-reset) may be rejected",
            "sign such modules with an enrolled machine owner key (mokutil --import)",
        )
