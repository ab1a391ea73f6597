"""Rules about binding: devices on the wrong driver, and devices that libvirt must not bind."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

from vfiomgr.diagnostic import Diagnostic, diagnostics_of, finding, info, problem
from vfiomgr.errors import Refusal
from vfiomgr.host.selinux import HOOK_TYPE, HOOKS_BOOLEAN, boolean_file
from vfiomgr.libvirt.hook import OPT_IN, tuning_of
from vfiomgr.libvirt.model import NAMESPACE
from vfiomgr.libvirt.preflight.context import AssignedFunction, PreflightContext, driver_of, sysfs
from vfiomgr.libvirt.releases import VENDOR_FUNCTION
from vfiomgr.passthrough import guards, isolation
from vfiomgr.passthrough.plan import plan_bind
from vfiomgr.passthrough.readiness_hints import (
    as_commands,
    bind_remedy,
    bind_slots,
    diagnostics_to_bind,
    how_to_bind,
)
from vfiomgr.paths import SCRIPT
from vfiomgr.tuning.plan import plan_tuning

if TYPE_CHECKING:
    from vfiomgr.diagnostic import Diagnostic, Severity
    from vfiomgr.libvirt.preflight.selinux import HookSecurity


_PLAIN = "vfio-pci"
_NO_SCREEN = (
    "when the domain starts, libvirt unbinds the console display: the host loses its screen, "
    "and some drivers do not restore it"
)
_IS_LOST = "when the domain starts, libvirt unbinds the device, and the host cannot use it"
_WAITS = (
    "when the domain starts, libvirt unbinds the driver, which waits for its users, possibly "
    "forever; libvirtd then hangs too"
)
_NO_VGPU = (
    "when the domain starts, libvirt unbinds the driver that hosts vGPUs: the guest cannot use "
    "the function, and it cannot host a vGPU until all virtual functions are created again"
)
_NO_ROUTE = (
    "when the domain starts, libvirt unbinds the interface, and the host loses its network "
    "connection"
)
_CUTS_OFF = (
    "when the domain starts, libvirt unbinds the network interface, including everything that "
    "uses it"
)
_HOW_BAD: dict[str | None, tuple[str, Severity, str]] = {
    "boot-display": ("managed-boot-display", "warning", _NO_SCREEN),
    "mounted-disk": (
        "managed-in-use",
        "blocker",
        "when the domain starts, libvirt unbinds a disk with mounted file systems",
    ),
    "default-route": ("managed-in-use", "blocker", _NO_ROUTE),
    "in-use": ("managed-in-use", "blocker", _WAITS),
    "host-peripheral": ("managed-in-use", "warning", _IS_LOST),
    "vgpu-function": ("managed-vgpu-function", "blocker", _NO_VGPU),
    None: ("managed-in-use", "blocker", "libvirt cannot unbind it in this state"),
}
_BY_RULE = {
    guards.IN_NETWORK: _CUTS_OFF,
    guards.CHIPSET: "when the domain starts, libvirt unbinds it, and the guest controls it",
}
_ASKED_ELSEWHERE = (
    guards.bridge,
    guards.denied,
    guards.silence,
    guards.unassigned_bar,
    isolation.isolation,
    isolation.reserved_region,
    guards.firmware_framebuffer,
    guards.held_by_guest,
    guards.usable_by_pod,
)
"""Safety checks of bind that other rules of the preflight cover."""
_LOOKS = tuple(guard for guard in guards.TAKING if guard not in _ASKED_ELSEWHERE)


def on_host_driver(context: PreflightContext) -> Iterator[Diagnostic]:
    """libvirt: "Unmanaged PCI device … must be manually detached from the host"."""
    slots: dict[object, list[AssignedFunction]] = defaultdict(list)
    for taken in context.waiting:
        device = taken.device
        is_hooked = device.address in context.hook_needs.functions
        if not taken.hostdev.managed and device.stuck is None and not is_hooked:
            slots[context.host.slot(device)].append(taken)
    for functions in slots.values():
        names = ", ".join(str(taken.device) for taken in functions)
        first = functions[0].device
        refused = diagnostics_to_bind(context.host, [first])
        lines = [(context.cite_managed(one.hostdev), driver_of(one.device)) for one in functions]
        verb, them = ("is", "it") if len(functions) == 1 else ("are", "them")
        unbound, why = "", "a guest can only open devices on a VFIO driver"
        if context.is_of_libvirt:
            is_argument = functions[0].hostdev.element == "qemu:arg"
            when = "" if is_argument else "with managed='no' "
            unbound = f", and {when}libvirt does not bind {them}"
            why += f"; {when}they must be bound before the start"
        yield problem(
            "on-host-driver",
            f"{names} {verb} not on a VFIO driver{unbound}",
            (
                *chain.from_iterable(lines),
                *(f"vfiomgr bind {first.address} refuses: {found.summary}" for found in refused),
            ),
            why,
            how_to_bind(context.host, [first]),
            subject=names,
        )


def managed_in_use(context: PreflightContext) -> Iterator[Diagnostic]:
    """What libvirt does not check before it unbinds (virPCIDeviceDetach)."""
    for taken in context.waiting:
        if not taken.hostdev.managed or taken.device.stuck is not None:
            continue
        # one device may be the same obstacle in two ways
        found = [one for look in _LOOKS for one in look(context.host, taken.device)]
        for diagnostic in {one.summary: one for one in found}.values():
            rule, severity, why = _HOW_BAD[diagnostic.override]
            why = _BY_RULE.get(diagnostic.rule, why)
            yield finding(
                rule,
                severity,
                diagnostic.summary,
                (context.cite_managed(taken.hostdev), driver_of(taken.device)),
                why,
                _release(taken, diagnostic),
            )


def _release(taken: AssignedFunction, diagnostic: Diagnostic) -> str:
    """What to do first: the remedy of a safety check, without the flags of `vfiomgr bind`."""
    address = taken.device.address
    match diagnostic.override:
        case "boot-display":
            return (
                "make another display the primary one in the firmware setup; or, if you have "
                f"network access to the host, bind it before the start (vfiomgr bind {address} "
                "--allow boot-display) and write managed='no'"
            )
        case "mounted-disk":
            return "unmount it (vfiomgr show lists the file systems), or assign another device"
        case "default-route":
            return "move the route to another interface, or assign another device"
        case "vgpu-function" | "host-peripheral":
            return diagnostic.without("allow", "only").remedy
        case "in-use":
            first = diagnostic.without("allow", "only").remedy
            then = (
                ", or assign another device"
                if diagnostic.rule == guards.IN_NETWORK
                else f"; then bind it with vfiomgr bind {address}, which has a deadline, and "
                "write managed='no'"
            )
            return first + then
    return diagnostic.hint


def managed_vendor_function(context: PreflightContext) -> Iterator[Diagnostic]:
    """A vGPU with the vendor's own interface exists only while it is on the vendor's driver."""
    for taken in context.functions:
        if taken.hostdev.managed and taken.is_of_vendor:
            yield problem(
                "managed-vendor-function",
                f"{taken.device} is a vGPU on driver {taken.device.driver}, but with "
                "managed='yes' libvirt unbinds it",
                (context.cite_managed(taken.hostdev), driver_of(taken.device)),
                "a guest uses it through that driver; if it is unbound, it is lost until all "
                "virtual functions are created again",
                f"write managed='no' in line {taken.hostdev.line}",
                subject=taken.device,
            )


def vendor_function(context: PreflightContext) -> Iterator[Diagnostic]:
    """Since 9.7 libvirt checks for `vfio-dev/` instead of the driver's name."""
    version = context.libvirt
    if version is None or VENDOR_FUNCTION.is_in(version):
        return
    for taken in context.functions:
        if not taken.is_of_vendor:
            continue
        yield problem(
            "vendor-function-old-libvirt",
            f"libvirt {version} cannot assign {taken.device} on its own driver",
            (context.cite(taken.hostdev), driver_of(taken.device), context.cite_libvirt()),
            "it accepts only vfio-pci, and reports that the device must be detached from the host",
            f"install libvirt {VENDOR_FUNCTION.since} or later",
            subject=taken.device,
        )


def variant(context: PreflightContext) -> Iterator[Diagnostic]:
    """Libvirt before 9.7 compares the driver's name with vfio-pci."""
    version = context.libvirt
    if version is None or VENDOR_FUNCTION.is_in(version):
        return
    for taken in context.functions:
        if not taken.is_bound or taken.device.driver == _PLAIN:
            continue
        address = taken.device.address
        yield finding(
            "variant-old-libvirt",
            "warning" if taken.hostdev.managed else "blocker",
            f"{taken.device} is on {taken.device.driver}, but libvirt {version} accepts only "
            "vfio-pci",
            (context.cite_managed(taken.hostdev), driver_of(taken.device), context.cite_libvirt()),
            "with managed='no' libvirt treats the variant as a host driver and the domain does "
            "not start; with managed='yes' it binds the device to vfio-pci, without the "
            "features of the variant",
            f"vfiomgr unbind {address}, then vfiomgr bind {address} --driver {_PLAIN}; or install "
            f"libvirt {VENDOR_FUNCTION.since} or later",
            subject=taken.device,
        )


def managed_and_bound(context: PreflightContext) -> Iterator[Diagnostic]:
    """Libvirt currently leaves a device that it finds bound as it is."""
    for taken in context.functions:
        if not (taken.hostdev.managed and taken.is_bound):
            continue
        is_kept = context.host.files.binding(taken.device.address) is not None
        if context.host.origin(taken.device) is None and not is_kept:
            continue
        yield info(
            "managed-and-bound",
            f"{taken.device} was bound by vfiomgr, but managed='yes' leaves binding to libvirt",
            (context.cite_managed(taken.hostdev), driver_of(taken.device)),
            "libvirt leaves a bound device alone; but after vfiomgr unbind it would unbind the "
            "host driver without checking what uses the device",
            f"write managed='no' in line {taken.hostdev.line}",
            subject=taken.device,
        )


def not_kept(context: PreflightContext) -> Iterator[Diagnostic]:
    """A device that vfiomgr bound without --persist is on its host driver after a reboot."""
    for taken in context.functions:
        device = taken.device
        if taken.hostdev.managed or not taken.is_bound or context.domain.is_bound_by_hook:
            continue
        is_kept = context.host.files.binding(device.address) is not None
        if context.host.origin(device) is None or is_kept or device.physical_function:
            continue
        yield info(
            "binding-not-kept",
            f"{device} is bound only until the next reboot",
            (
                context.cite_managed(taken.hostdev),
                f"{sysfs(device)}: no rule of vfiomgr bind --persist",
            ),
            context.fix("with managed='no' nothing binds it", "nothing binds it")
            + f" after a reboot, so {context.guest} will not start",
            bind_remedy(f"vfiomgr bind {device.address} --persist", [device], persist=True),
            subject=device,
        )


def not_installed(context: PreflightContext) -> Iterator[Diagnostic]:
    """A domain that enables the hook, without a script that libvirt would run."""
    needs = context.hook_needs
    names = (*map(str, needs.functions), *needs.vgpus)
    hook = context.domain.hook
    if hook is not None:
        names += ("the CPUs",) * hook.isolate_cpus + ("huge pages",) * hook.hugepages
        names += ("interrupts",) * hook.interrupts
    if not names or context.host.files.text(SCRIPT) is not None:
        return
    yield problem(
        "hook-not-installed",
        f"the domain relies on the hook for {', '.join(names)}, but the hook is not installed",
        (_mark(context), f"{SCRIPT} does not exist"),
        "nothing prepares them before the start",
        "vfiomgr libvirt hook install; then restart libvirtd or virtqemud once",
    )


def _hook_security(context: PreflightContext) -> HookSecurity | None:
    """What SELinux needs for the hook; None if it is not installed, or the domain has none.

    libvirt runs the script for all guests, whether their devices are bound or not.
    """
    if context.domain.hook is None or context.host.files.text(SCRIPT) is None:
        return None
    return None if context.host_files is None else context.host_files.hook_security


def hook_denied(context: PreflightContext) -> Iterator[Diagnostic]:
    """SELinux: the type of the script and the boolean (selinux-policy #2195), by Fedora's policy.

    The audit log has "denied { execute }" for rpc-virtqemud, and the guest does not start.
    """
    known = _hook_security(context)
    if known is None:
        return
    why = "SELinux does not let virtqemud run the hook, so the guest does not start"
    enforced = "/sys/fs/selinux/enforce: 1"
    if known.type not in (HOOK_TYPE, None):
        yield problem(
            "hook-label",
            f"the hook has the SELinux type {known.type}, not {HOOK_TYPE}",
            (_mark(context), f"{SCRIPT}: {known.type}", enforced),
            why,
            f"restorecon -v {SCRIPT.parent.parent} {SCRIPT.parent} {SCRIPT}",
        )
    if known.may_run is False:
        yield problem(
            "hook-boolean",
            f"the SELinux boolean {HOOKS_BOOLEAN} is off",
            (_mark(context), f"{boolean_file(HOOKS_BOOLEAN)}: 0", enforced),
            why,
            f"setsebool -P {HOOKS_BOOLEAN} on",
        )


def unseen_hook_security(context: PreflightContext) -> Iterator[str]:
    """What is not known of SELinux and the hook.

    The rules with the boolean are for virtnetworkd; a policy may lack those for virtqemud
    (fedora-selinux/selinux-policy fd1d99621, virt.te).
    """
    known = _hook_security(context)
    if known is None:
        return
    if known.type is None:
        yield f"the SELinux label of {SCRIPT}: not readable"
    if known.may_run is None:
        yield f"the SELinux boolean {HOOKS_BOOLEAN}: not readable"
    yield (
        "whether the SELinux policy has rules for hooks of virtqemud (see the audit log: "
        "ausearch -m avc -c rpc-virtqemud)"
    )


def refused(context: PreflightContext) -> Iterator[Diagnostic]:
    """The hook has the safety checks of `vfiomgr bind`: if one fails, the guest does not start."""
    functions = context.hook_needs.functions
    stuck = {taken.device.address for taken in context.functions if taken.device.stuck}
    if not functions or stuck.intersection(functions):
        return  # another rule reports a stuck function
    try:
        plan_bind(context.host, context.hook_needs.bind)
    except Refusal as refusal:
        devices = [t.device for t in context.functions if t.device.address in functions]
        bind = f"run before the start: {bind_slots(context.host, devices)}"
        to_lift = ", or add the other devices to the domain with vfiomgr libvirt edit"
        reasons = (diagnostic.without("only") for diagnostic in diagnostics_of(refusal))
        found = as_commands(reasons, bind, to_lift_group=to_lift)
        yield problem(
            "hook-refused",
            refusal.message,
            (_mark(context), *map(driver_of, devices)),
            "the hook has the safety checks of vfiomgr bind, and a guest does not start if its "
            "hook fails",
            "; ".join(dict.fromkeys(diagnostic.hint for diagnostic in found)),
        )


def host_unprepared(context: PreflightContext) -> Iterator[Diagnostic]:
    """What the hook changes on the host: if it cannot, the guest does not start."""
    runs = context.itself is not None and context.itself.is_active
    if context.domain.hook is None or context.host.topology is None or runs:
        return
    try:
        plan_tuning(context.host, tuning_of(context.host, context.domain))
    except Refusal as refusal:
        yield problem(
            "hook-refused",
            refusal.message,
            (_mark(context),),
            "a guest does not start if its hook fails",
            refusal.hint,
        )


def _mark(context: PreflightContext) -> str:
    line = context.domain.line("metadata")
    return f"{context.at(line)}: <metadata> with {OPT_IN} of {NAMESPACE}"
