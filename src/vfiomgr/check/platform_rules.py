"""Rules about the platform: IOMMU, interrupts, lockdown, kernel features, limits on memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vfiomgr.check.model import BOUNDS, add_line, command_line, install_modules, load_at_boot
from vfiomgr.diagnostic import Diagnostic, Severity, finding, info, problem, warning
from vfiomgr.expressions import expression
from vfiomgr.host.kernel import parameters
from vfiomgr.passthrough import isolation
from vfiomgr.paths import (
    IOMMU_GROUPS,
    IOMMU_NODE,
    IOMMU_UNITS,
    PCI_DEVICES,
    PCI_DRIVERS,
    VFIO_CDEVS,
)
from vfiomgr.pci.drivers import is_variant_module
from vfiomgr.snapshot.hardware import command_line_words, pcie_without_iommu
from vfiomgr.units import counted

if TYPE_CHECKING:
    from vfiomgr.check.model import KernelModule, Readiness
    from vfiomgr.snapshot.model import HostSnapshot


_X86_UNITS = ("dmar", "ivhd")
_ECAP_REMAPS = 1 << 3
"""Interrupt remapping support (ecap_ir_support in drivers/iommu/intel/iommu.h)."""
_DMAR_REMAPS = 1
"""The platform supports it (dmar_ir_support in drivers/iommu/intel/dmar.c)."""
_NOT_REMAPPED = frozenset({"intremap=off", "nointremap"})
_NO_IOMMU = ("the IOMMU is off", "the IOMMU is off: this host is itself a virtual machine")
_PARAMETERS = "/sys/module/{}/parameters/{}"


def iommu(host: HostSnapshot) -> Iterator[Diagnostic]:
    """Report whether the IOMMU is on, by groups, units and tables, not by the command line."""
    if not host.devices or not host.iommu.is_known:
        return
    evidence = tuple(_iommu_evidence(host))
    off = isolation.iommu_off(host)
    if off is None:
        why = "VFIO assigns only devices that an IOMMU isolates from the rest of memory"
        yield finding("iommu", "ok", "the IOMMU isolates devices", evidence, why)
        return
    is_of_xen = host.kernel.runs_on == "xen"
    is_for_words = command_line_words(host) is not None and not (
        is_of_xen or pcie_without_iommu(host)
    )
    how = command_line(host) if is_for_words else ""
    yield problem(
        "iommu",
        off.summary if is_of_xen else _NO_IOMMU[host.kernel.runs_on == "guest"],
        evidence,
        "Xen assigns devices itself, with its driver pciback"
        if is_of_xen
        else "without an IOMMU a guest's device could write to all of the host's memory, so VFIO "
        "refuses it",
        f"{off.remedy}{how}",
    )


def unread(host: HostSnapshot) -> Iterator[str]:
    """What decides whether any function can be passed through, and could not be read.

    For each of these a rule below would report a blocker.
    """
    if not host.devices:
        return
    yield from isolation.iommu_unread(host)
    facts = host.readiness
    if facts is None:
        yield "whether vfio-pci is available: not in the snapshot"
    elif not any(vfio_pci(host, facts)):
        missing = "neither /sys/module nor the lists of /lib/modules found"
        yield f"whether vfio-pci is available: {missing}"
    units = host.iommu.units
    may_be_x86 = any(u.startswith(_X86_UNITS) for u in units) or (
        not units and host.kernel.architecture in (None, "x86_64")
    )
    if not host.iommu.is_on or not may_be_x86:
        return
    if facts is None:
        yield "whether interrupts are remapped: not in the snapshot"
    elif not any(interrupt_remapping(host, facts)):
        missing = "/proc/interrupts" if facts.interrupt_chips is None else IOMMU_UNITS
        yield f"whether interrupts are remapped: {missing} not found"


def _iommu_evidence(host: HostSnapshot) -> Iterator[str]:
    number = host.number_of_pci_groups
    count = counted(number, "group") if number else "no group"
    yield f"{IOMMU_GROUPS}: {count} of PCI functions"
    yield f"{IOMMU_UNITS}: {', '.join(host.iommu.units) or 'no unit'}"
    if host.readiness is not None and host.readiness.has_acpi_tables:
        tables = ", ".join(host.iommu.firmware_tables) or "none of DMAR, IVRS, IORT"
        yield f"/sys/firmware/acpi/tables: {tables}"
    if host.kernel.runs_on == "xen":
        yield "/sys/hypervisor/type: xen"
    elif host.kernel.runs_on == "guest" and not host.iommu.is_on:
        yield "this is a virtual machine (/proc/cpuinfo, /sys/class/dmi/id/sys_vendor)"
    words = [word for word in host.kernel.words if "iommu" in word or "smmu" in word]
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
        unneeded = _unsafe_interrupts(host, facts)
        if unneeded and facts.interrupt_chips:
            yield info(
                "unsafe-interrupts",
                "allow_unsafe_interrupts is set, although interrupts are remapped",
                (*unneeded, *evidence),
                "VFIO would also accept devices of a host without remapping, after a change of the "
                "firmware setup for example",
                "remove allow_unsafe_interrupts from modprobe.d and the kernel command line",
            )
        return
    unsafe = _unsafe_interrupts(host, facts)
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


def _unsafe_interrupts(host: HostSnapshot, facts: Readiness) -> tuple[str, ...]:
    """Evidence that VFIO is configured to allow unsafe interrupts."""
    name = "allow_unsafe_interrupts"
    module = facts.module("vfio_iommu_type1")
    value = (module.parameters or {}).get(name)
    if value is not None:
        place = _PARAMETERS.format(module.name, name)
        return (f"{place}: {value}",) if value == "Y" else ()
    settings = facts.parameter(host.kernel.command_line, module.name, name)
    in_force = (one for one in settings if not one.ignored)
    return tuple(one.place for one in in_force if one.value in {"", "1", "y", "Y"})


def _remapping_remedy(host: HostSnapshot, facts: Readiness) -> str:
    words = [word for word in host.kernel.words if word in _NOT_REMAPPED]
    if words:
        how = command_line(host)
        return f"remove {' '.join(words)} from the kernel command line{how}; then reboot"
    if facts.config.get("IRQ_REMAP") == "n":
        return f"boot a kernel with CONFIG_IRQ_REMAP (not set in {facts.config_source})"
    if facts.dmar_flags is not None and not facts.dmar_flags & _DMAR_REMAPS:
        return "enable interrupt remapping in the firmware setup (the DMAR table disables it)"
    option = "options vfio_iommu_type1 allow_unsafe_interrupts=1"
    unsafe = add_line(host, option, "/etc/modprobe.d/vfio_iommu_type1.conf")
    can = facts.iommu_ecaps and all(ecap & _ECAP_REMAPS for ecap in facts.iommu_ecaps.values())
    erratum = " (the kernel turns it off for an erratum of the chipsets Intel 5500, 5520 and X58)"
    return (
        f"check dmesg for remapping{erratum if can else ''}, and enable it in the firmware setup; "
        f"if all guests are trusted, {unsafe}"
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
    yield warning(
        "no-iommu-mode",
        "VFIO's no-IOMMU mode is on",
        tuple(evidence),
        "a device in this mode can write to all of the host's memory; it taints the kernel, and "
        "vfiomgr does not use it",
        f"write N to {_PARAMETERS.format('vfio', name)}, and remove the option from modprobe.d "
        "and the kernel command line",
    )


_KNOWN = (
    "amd_iommu",
    "default_hugepagesz",
    "initcall_blacklist",
    "intel_iommu",
    "modprobe.blacklist",
    "module_blacklist",
    "pcie_acs_override",
    "rd.driver.pre",
    "vfio-pci.disable_idle_d3",
    "vfio-pci.disable_vga",
    "vfio-pci.ids",
    "vfio_iommu_type1.allow_unsafe_interrupts",
)
"""Parameters for passthrough that the rules or common guides name."""
_ALSO_KNOWN = (
    "amd_iommu_dump",
    "amd_iommu_intr",
    "pci-stub.ids",
    "rd.driver.post",
    "xen-pciback.hide",
)
_SEPARATORS = expression(r"[-_.]")
_CLOSE = 0.88
"""The similarity above which a word is a mistyped parameter: one letter of ten, or two swapped."""


def unknown_parameters(host: HostSnapshot, _facts: Readiness) -> Iterator[Diagnostic]:
    """Report words that differ little from a parameter; the kernel ignores unknown ones."""
    from difflib import get_close_matches  # noqa: PLC0415 - only a check needs it

    exact = {name.replace("-", "_") for name in (*_KNOWN, *_ALSO_KNOWN)}
    tool = host.files.initramfs.tool if host.files.initramfs is not None else ""
    plain = {_SEPARATORS.sub("", name): name for name in _KNOWN}
    for word in host.kernel.words:
        name, sign, value = word.partition("=")
        if name.startswith("rd.driver.") and tool in ("initramfs-tools", "mkinitcpio"):
            yield warning(
                "parameter-unknown",
                f"{name} has no effect: only dracut reads it",
                (f"/proc/cmdline: {word}", f"the initramfs of this host is built by {tool}"),
                "the kernel ignores parameters that it does not know",
                f"remove {word} from the kernel command line{command_line(host)}; bind at boot by "
                "address: vfiomgr bind ADDRESS --persist --update-initramfs",
            )
        if name.replace("-", "_") in exact or is_variant_module(_module_of(name)):
            continue
        for one in get_close_matches(_SEPARATORS.sub("", name), plain, 1, _CLOSE):
            known = plain[one]
            yield warning(
                "parameter-unknown",
                f"{name} is not a parameter of the kernel: {known} is similar",
                (f"/proc/cmdline: {word}",),
                "the kernel ignores parameters that it does not know",
                f"write {known}{sign}{value} for {word} on the kernel command line"
                f"{command_line(host)}, and reboot",
            )


def _module_of(parameter: str) -> str:
    return parameter.partition(".")[0].replace("-", "_")


def not_in_force(host: HostSnapshot, facts: Readiness) -> Iterator[Diagnostic]:
    """Report parameters for passthrough in a boot loader's file that the running kernel lacks."""
    if host.kernel.command_line is None:
        return
    names = {name.replace("-", "_") for name in (*_KNOWN, "iommu", "i915.max_vfs", "xe.max_vfs")}
    for file, options in facts.boot_files.items():
        lost = [
            word
            for word in dict.fromkeys(options.split())
            if word.partition("=")[0].replace("-", "_") in names and word not in host.kernel.words
        ]
        if lost:
            yield warning(
                "parameter-not-in-force",
                f"the running kernel did not get {' '.join(lost)} of {file}",
                (f"{file}: {' '.join(lost)}", f"/proc/cmdline: {host.kernel.command_line}"),
                "the host was not rebooted since, the file was not applied, or another boot loader "
                "boots this host",
                f"if they are still wanted, write them where this host's boot loader reads them"
                f"{command_line(host)}, and reboot",
            )


def lockdown(_host: HostSnapshot, facts: Readiness) -> Iterator[Diagnostic]:
    """Report lockdown, which does not affect VFIO (lockdown_reason in linux/security.h)."""
    if facts.lockdown not in ("integrity", "confidentiality"):
        return
    yield info(
        "lockdown",
        f"the kernel is locked down ({facts.lockdown})",
        (f"/sys/kernel/security/lockdown: {facts.lockdown}",),
        "VFIO works, but modules without a trusted signature (e.g. vGPU drivers) do not load, and "
        "programs cannot write to the configuration space of devices (setpci)",
        "sign such modules with an enrolled machine owner key (mokutil --import); for programs "
        "that write to devices, turn Secure Boot off in the firmware setup while they run",
    )


def unauthorized(host: HostSnapshot, facts: Readiness) -> Iterator[Diagnostic]:
    """Report Thunderbolt devices that are not authorized: the kernel makes no tunnel for PCI."""
    if facts.unauthorized:
        before = "before the boot, as Xen knows only functions that exist then, "
        yield info(
            "thunderbolt-unauthorized",
            f"{counted(len(facts.unauthorized), 'Thunderbolt device')} without authorization",
            tuple(f"{_THUNDERBOLT}/{name}/authorized: 0" for name in facts.unauthorized),
            "the PCI functions behind a Thunderbolt device exist only after it is authorized",
            f"{before if host.kernel.runs_on == 'xen' else ''}authorize it: boltctl list, then "
            "boltctl enroll UUID",
        )


_THUNDERBOLT = "/sys/bus/thunderbolt/devices"


def secure_boot(_host: HostSnapshot, facts: Readiness) -> Iterator[Diagnostic]:
    """Report Secure Boot, with which many kernels check the signatures of modules."""
    if facts.secure_boot:
        yield info(
            "secure-boot",
            "Secure Boot is on",
            ("/sys/firmware/efi/efivars: SecureBoot is 1",),
            "the distribution's vfio-pci is signed; a module built on this host (e.g. a vGPU "
            "driver or vendor-reset) may be rejected",
            "sign such modules with an enrolled machine owner key (mokutil --import)",
        )


_NO_LOADING = ("/bin/false", "/bin/true", "/usr/bin/false", "/usr/bin/true")
_OTHERS_MAY = 0o006
_DRIVER = "vfio-pci"
_IOMMUFD_NEED = "QEMU's iommufd backend needs them; VFIO groups do not"


def vfio_pci(host: HostSnapshot, facts: Readiness) -> Iterator[Diagnostic]:
    """Report whether vfio-pci is available; Xen's dom0 has no use for it."""
    if host.kernel.runs_on == "xen":
        return
    module = facts.module("vfio_pci")
    why = "passthrough needs vfio-pci or a variant of it"
    if module.is_present or _DRIVER in host.pci_drivers:
        settings = map(str, facts.settings("options", "vfio_pci"))
        evidence = (_present(module, host), *settings)
        yield finding("vfio-pci", "ok", "vfio-pci is available", evidence, why)
    elif lacking := tuple(_lacking_vfio_pci(host, facts)):
        title = "this kernel has no vfio-pci"
        fix = install_modules(host, facts)
        yield problem("vfio-pci", title, lacking, why, fix)
    elif stopped := [
        s for s in facts.settings("install", "vfio_pci") if s.arguments.split(" ")[0] in _NO_LOADING
    ]:
        title = "modprobe is configured not to load vfio-pci"
        fix = "remove that line, or load it once: modprobe --ignore-install vfio-pci"
        yield problem("vfio-pci", title, tuple(map(str, stopped)), why, fix)
    elif module.state == "available" and facts.has_modprobe is False:
        evidence = (f"modules.dep of {host.kernel.release} lists vfio_pci", "modprobe: not found")
        title = "vfio-pci is not loaded, and modprobe was not found"
        fix = "configure the system to load vfio-pci at boot"
        yield problem("vfio-pci", title, evidence, why, fix)
    elif module.state == "available":
        evidence = (f"modules.dep of {host.kernel.release} lists vfio_pci",)
        title = "vfio-pci is available; vfiomgr bind loads it"
        yield finding("vfio-pci", "ok", title, evidence, why)


def _lacking_vfio_pci(host: HostSnapshot, facts: Readiness) -> Iterator[str]:
    if facts.module("vfio_pci").state == "missing":
        yield _missing("vfio_pci", host)
    if facts.config.get("VFIO_PCI") == "n":
        yield from _option(facts, "VFIO_PCI")


def _present(module: KernelModule, host: HostSnapshot) -> str:
    if module.state == "built-in":
        return f"modules.builtin of {host.kernel.release} lists {module.name}"
    return f"{PCI_DRIVERS}/{_DRIVER}" if module.state is None else f"/sys/module/{module.name}"


def _missing(name: str, host: HostSnapshot) -> str:
    return f"neither modules.dep nor modules.builtin of {host.kernel.release} lists {name}"


def _option(facts: Readiness, option: str) -> tuple[str, ...]:
    value = facts.config.get(option)
    if value is None:
        return ()
    shown = f"CONFIG_{option} is not set" if value == "n" else f"CONFIG_{option}={value}"
    return (f"{facts.config_source}: {shown}",)


def iommu_backend(host: HostSnapshot, facts: Readiness) -> Iterator[Diagnostic]:
    """Report a kernel without vfio_iommu_type1 and iommufd, the only backends on x86.

    On POWER, it is vfio_iommu_spapr_tce alone.
    """
    is_power = isolation.is_power(host)
    names = (isolation.SPAPR,) if is_power else ("vfio_iommu_type1", "iommufd")
    is_known = is_power or host.kernel.cpu_vendor is not None
    if not is_known or any(facts.module(n).state != "missing" for n in names):
        return
    yield problem(
        "iommu-backend",
        "VFIO cannot map a guest's memory",
        tuple(_missing(name, host) for name in names),
        f"VFIO needs {' or '.join(names)} to map the addresses of a guest's device",
        isolation.WITH_SPAPR if is_power else install_modules(host, facts),
    )


def kvm(host: HostSnapshot, facts: Readiness) -> Iterator[Diagnostic]:
    """Report what keeps KVM from guests: CPU, module, or on Arm a boot below EL2.

    Linux on Arm needs EL2 for it (kvm_arm_init in arch/arm64/kvm/arm.c); x86 hides vmx where the
    firmware locked it (init_ia32_feat_ctl in arch/x86/kernel/cpu/feat_ctl.c).
    """
    kernel, is_guest = host.kernel, host.kernel.runs_on == "guest"
    if facts.has_kvm is not False or kernel.runs_on == "xen":
        return
    nested = "on the host of this virtual machine, enable nested virtualization ({}) for it"
    name = "kvm_amd" if kernel.cpu_vendor in ("AuthenticAMD", "HygonGenuine") else "kvm_intel"
    if kernel.cpu_virtualizes is False:
        title, shown = "the CPU shows no virtualization", "/proc/cpuinfo: flags without vmx and svm"
        fix = nested.format(f"nested=1 of {name}, CPU mode host-passthrough")
        fix = fix if is_guest else "enable Intel VT-x or AMD SVM in the firmware setup"
    elif kernel.cpu_virtualizes and facts.module(name).state == "available":
        title, shown = f"{name} is not loaded", f"modules.dep lists {name}, not in /sys/module"
        fix = load_at_boot(host, name)
    elif kernel.architecture == "aarch64" and facts.module("kvm").is_present:
        title, shown = "the kernel was booted below EL2", _present(facts.module("kvm"), host)
        fix = "boot it in EL2, without the hypervisor or firmware that keeps EL2 to itself; if "
        fix += "that is impossible, use another machine"
        fix = nested.format("EL2, on CPUs that have it") if is_guest else fix
    else:
        return
    why = "without KVM guests are emulated in software, and Kata cannot start any"
    summary = f"no KVM: {title}"
    yield warning("kvm", summary, ("/dev/kvm does not exist", shown), why, fix)


def driver_override(host: HostSnapshot, facts: Readiness) -> Iterator[Diagnostic]:
    """Report kernels before 3.16, which bind only by PCI IDs."""
    if facts.has_driver_override is False:
        yield warning(
            "driver-override",
            "functions have no driver_override",
            (f"{PCI_DEVICES}/*/driver_override: none of {len(host.devices)} functions has it",),
            "without it a driver binds all functions with the same PCI IDs",
            "boot a newer kernel",
        )


def iommufd(host: HostSnapshot, facts: Readiness) -> Iterator[Diagnostic]:
    """Report whether iommufd and VFIO character devices are available.

    Nodes that exist are available, whatever the file of the kernel's configuration says: it may
    belong to another build of the same release. POWER's IOMMU has no such backend.
    """
    if any(_lacking_vfio_pci(host, facts)) or isolation.is_power(host):
        return
    lacking = tuple(_lacking_iommufd(host, facts)) or tuple(_lacking_cdev(host, facts))
    if lacking:
        title = "iommufd with VFIO character devices is missing"
        fix = "boot a kernel with CONFIG_IOMMUFD and CONFIG_VFIO_DEVICE_CDEV"
        if facts.has_node(IOMMU_NODE) and _creates_cdevs(host):
            title = "a function on VFIO has no character device"
            fix = f"check what removes nodes below {VFIO_CDEVS}: this kernel creates them"
        fix = f"no action if you use VFIO groups; otherwise {fix}"
        yield info("iommufd", title, lacking, _IOMMUFD_NEED, fix)
        return
    module, has_node = facts.module("iommufd"), facts.has_node(IOMMU_NODE)
    cdevs = tuple(cdev_evidence(host, facts))
    if not cdevs:
        return
    if module.is_present or has_node:
        title = "iommufd and VFIO character devices are available"
        why = f"{_IOMMUFD_NEED}; vfiomgr libvirt domain uses them with libvirt 12.1 and QEMU 9.0"
        shown = (f"{IOMMU_NODE} exists",) if has_node else _option(facts, "IOMMUFD")
        yield finding("iommufd", "ok", title, (*shown, *cdevs), why)
    elif module.state == "available":
        title = "this kernel has iommufd, but the module is not loaded"
        fix = load_at_boot(host, "iommufd")
        why = f"{_IOMMUFD_NEED}; vfiomgr libvirt domain uses them if {IOMMU_NODE} exists"
        yield info("iommufd", title, (*_option(facts, "IOMMUFD"), *cdevs), why, fix)


def _lacking_iommufd(host: HostSnapshot, facts: Readiness) -> Iterator[str]:
    if not facts.has_node(IOMMU_NODE) and facts.module("iommufd").state == "missing":
        yield _missing("iommufd", host)
        yield from _option(facts, "IOMMUFD")


def cdev_evidence(host: HostSnapshot, facts: Readiness) -> Iterator[str]:
    """What shows that VFIO has character devices; the kernel's configuration only if none does."""
    with_cdev = [device for device in host.devices if device.vfio_cdev]
    if with_cdev:
        yield f"{VFIO_CDEVS}/{with_cdev[0].vfio_device} exists"
    elif host.vfio.has_cdevs:
        yield "/proc/devices: vfio-dev"
    elif host.vfio.has_cdevs is None and facts.config.get("VFIO_DEVICE_CDEV") == "y":
        yield from _option(facts, "VFIO_DEVICE_CDEV")


def _creates_cdevs(host: HostSnapshot) -> bool:
    return bool(host.vfio.has_cdevs) or any(device.vfio_cdev for device in host.devices)


def _lacking_cdev(host: HostSnapshot, facts: Readiness) -> Iterator[str]:
    """What shows that VFIO has no character devices, or not for a function."""
    if not _creates_cdevs(host):
        if host.vfio.has_cdevs is False:
            yield "/proc/devices: no vfio-dev"
        if facts.config.get("VFIO_DEVICE_CDEV") == "n":
            yield from _option(facts, "VFIO_DEVICE_CDEV")
    for device in (d for d in host.devices if d.is_on_vfio and not d.vfio_cdev):
        if device.vfio_device is None:
            yield f"{device.address} is on {device.driver}, but has no directory vfio-dev"
        elif facts.has_dev:
            place = f"{VFIO_CDEVS}/{device.vfio_device}"
            yield f"{device.address} has vfio-dev/{device.vfio_device}, but no {place}"


def container_node(_host: HostSnapshot, facts: Readiness) -> Iterator[Diagnostic]:
    """Report a mode of /dev/vfio/vfio stricter than the kernel's 0666."""
    node = facts.node("/dev/vfio/vfio")
    if node is None or node.mode & _OTHERS_MAY == _OTHERS_MAY:
        return
    yield info(
        "container-node",
        f"not every user can open {node.path}",
        (f"{node.path}: mode {node.mode:04o}, owner {node.owner}",),
        "an unprivileged QEMU needs it in addition to the node of the IOMMU group, unless it uses "
        "iommufd; the kernel's default is 0666, which gives no access to devices",
        f"if an unprivileged QEMU fails to open it, remove the udev rule that names {node.path}",
    )


_NVME = "0108"
_EXTRA_IRQS = "extra_guest_irqs"


def guest_irqs(host: HostSnapshot, facts: Readiness) -> Iterator[Diagnostic]:
    """Report NVMe controllers for guests of a Xen with its default number of interrupts.

    See docs/misc/xen-command-line.pandoc of Xen, and issue 560 of xcp-ng/xcp.
    """
    line = facts.xen_command_line
    given = [d for d in host.devices if d.class_code.startswith(_NVME) and d.driver in _PCIBACK]
    if line is None or not given or parameters(line, _EXTRA_IRQS):
        return
    is_server = facts.distribution is not None and facts.distribution.id == "xenenterprise"
    how = f" ({_XEN_CMDLINE} --set-xen {_EXTRA_IRQS}=128)" if is_server else ""
    yield info(
        "xen-guest-irqs",
        "guests of Xen may get fewer interrupts than NVMe controllers use",
        (
            f"xl info: no {_EXTRA_IRQS} in xen_commandline",
            *(f"{d} is on {d.driver}" for d in given),
        ),
        "newer drivers take an MSI-X vector for each queue; beyond what Xen reserves for a guest "
        "they fall back to a single interrupt, and the disk is very slow",
        f"if that happens, add {_EXTRA_IRQS}=128 to the command line of Xen{how}, and reboot",
    )


_PCIBACK = ("pciback", "xen-pciback")
_XEN_CMDLINE = "/opt/xensource/libexec/xen-cmdline"
"""Of XenServer and XCP-ng."""

_DENIED = {
    "ProtectKernelModules": "it hides /lib/modules: libvirt 10.0 and later read modules.alias "
    "there to find the VFIO driver of a device, and load it",
    "ProtectKernelTunables": "it makes /sys read-only: libvirt cannot bind devices to VFIO",
    "PrivateDevices": "it hides /dev/vfio and /dev/kvm",
    "DevicePolicy": "it denies /dev/vfio and /dev/kvm, which DeviceAllow does not list",
    "ReadOnlyPaths": "libvirt writes there to bind devices to VFIO",
    BOUNDS: "without CAP_SYS_ADMIN libvirt cannot give QEMU a /dev of its own",
    "InaccessiblePaths": "libvirt reads and writes there to bind devices to VFIO",
}
_RESET = {"DevicePolicy": "auto", BOUNDS: "CAP_SYS_ADMIN", "ReadOnlyPaths": ""}
_RESET["InaccessiblePaths"] = ""


def unit_hardening(_host: HostSnapshot, facts: Readiness) -> Iterator[Diagnostic]:
    """Report settings of systemd for libvirt's units that no guest with a device gets past."""
    for one in facts.hardening:
        key = one.setting.partition("=")[0]
        yield warning(
            "unit-hardening",
            f"{one.service} is denied what passthrough needs: {one.setting}",
            (f"{one.source}: {one.setting}",),
            _DENIED[key],
            f"remove {one.setting} from {one.source} (or write {key}={_RESET.get(key, 'no')} into "
            f"a drop-in: systemctl edit {one.service}); then run systemctl daemon-reload and "
            f"systemctl restart {one.service}",
        )


def memlock(_host: HostSnapshot, facts: Readiness) -> Iterator[Diagnostic]:
    """Report limits on locked memory; CAP_IPC_LOCK lifts them.

    libvirt's system daemon raises the limit of each QEMU itself, with CAP_SYS_RESOURCE.
    """
    if not facts.memlock:
        return
    free = {x.subject for x in facts.memlock if x.is_unlimited}
    bounds = [x for x in facts.memlock if x.setting.startswith(BOUNDS) and x.subject not in free]
    for bound in bounds:
        yield warning(
            "memlock",
            f"{bound.subject} cannot raise the limit on locked memory of a guest",
            (f"{bound.setting} ({bound.source})",),
            "VFIO locks all memory of a guest, and libvirt raises the limit of its QEMU for that, "
            "which needs CAP_SYS_RESOURCE: QEMU fails with VFIO_MAP_DMA, -12",
            f"write LimitMEMLOCK=infinity, or {BOUNDS}=CAP_SYS_RESOURCE (added to the others), "
            f"into a drop-in: systemctl edit {bound.subject}; then restart it",
        )
    tight = [x for x in facts.memlock if not x.is_unlimited and x.kind != "virtualization"]
    evidence = tuple(f"{x.subject}: {x.setting} ({x.source})" for x in tight or facts.memlock)
    why = "VFIO locks all memory of a guest, and QEMU without CAP_IPC_LOCK cannot exceed the limit"
    if not tight:
        if not bounds:
            yield finding("memlock", "ok", "no relevant limit on locked memory", evidence, why)
        return
    drop_in = "LimitMEMLOCK=infinity in a drop-in of the service (systemctl edit SERVICE)"
    yield info(
        "memlock",
        "locked memory of guests is limited",
        evidence,
        f"{why}; guests of root and of libvirt's system daemon are not affected",
        f"for rootless Kata or QEMU of that user: {drop_in}, and memlock unlimited for the user",
    )
