"""Rules about who binds: devices on the wrong driver, and those that libvirt must not take."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from vfiomgr.diagnostic import Diagnostic, finding
from vfiomgr.errors import Refusal
from vfiomgr.libvirt.hook.model import OPT_IN
from vfiomgr.libvirt.model import NAMESPACE, VENDOR_FUNCTION
from vfiomgr.libvirt.preflight.context import driver_of, sysfs
from vfiomgr.passthrough import guards
from vfiomgr.passthrough.plan import plan_bind
from vfiomgr.passthrough.readiness_hints import diagnostics_to_bind, how_to_bind
from vfiomgr.passthrough.requests import Bind
from vfiomgr.paths import SCRIPT

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from vfiomgr.diagnostic import Diagnostic, Severity
    from vfiomgr.libvirt.preflight.context import AssignedFunction, PreflightContext


_PLAIN = "vfio-pci"
_NO_SCREEN = (
    "at the start libvirt takes the console's display from its driver: the host has no screen any "
    "more, and some drivers do not give it back"
)
_WAITS = (
    "at the start libvirt unbinds the driver, which waits for its users, perhaps for ever, and "
    "libvirtd with it"
)
_NO_VGPU = (
    "at the start libvirt takes it from the driver that makes vGPUs of it: the guest cannot use "
    "it, and it can be no vGPU until all virtual functions are made anew"
)
_CUTS_OFF = "at the start libvirt takes the interface from the host, with all that uses it"
_HOW_BAD: dict[str | None, tuple[str, Severity, str]] = {
    "boot-display": ("managed-boot-display", "warning", _NO_SCREEN),
    "mounted-disk": (
        "managed-in-use",
        "blocker",
        "at the start libvirt takes the disk from under the host's file systems",
    ),
    "default-route": (
        "managed-in-use",
        "blocker",
        "at the start libvirt takes the interface, and the host is cut off from its network",
    ),
    "in-use": ("managed-in-use", "blocker", _WAITS),
    "vgpu-function": ("managed-vgpu-function", "blocker", _NO_VGPU),
    None: ("managed-in-use", "blocker", "libvirt cannot take it from its driver so"),
}
_ASKED_ELSEWHERE = (
    guards.bridge,
    guards.denied,
    guards.silence,
    guards.isolation,
    guards.held_by_guest,
)
"""Guards against taking a device that other rules of the preflight stand for."""
_LOOKS = tuple(guard for guard in guards.TAKING if guard not in _ASKED_ELSEWHERE)


def on_host_driver(context: PreflightContext) -> Iterator[Diagnostic]:
    """libvirt: "Unmanaged PCI device … must be manually detached from the host"."""
    slots: dict[object, list[AssignedFunction]] = defaultdict(list)
    for taken in context.waiting:
        device = taken.device
        is_hooked = device.address in context.hook_needs.functions
        if not taken.hostdev.managed and device.stuck is None and not is_hooked:
            slots[device.address if device.physical_function else device.address.slot].append(taken)
    for functions in slots.values():
        names = ", ".join(str(taken.device) for taken in functions)
        first = functions[0].device
        refused = diagnostics_to_bind(context.host, [first])
        verb, them = ("is", "it") if len(functions) == 1 else ("are", "them")
        yield finding(
            "on-host-driver",
            "blocker",
            f"{names} {verb} on no driver of VFIO, and managed='no' has libvirt leave {them} so",
            (
                *(
                    line
                    for taken in functions
                    for line in (context.cite_managed(taken.hostdev), driver_of(taken.device))
                ),
                *(f"vfiomgr bind {first.address} refuses: {found.summary}" for found in refused),
            ),
            "a guest can open what a driver of VFIO has; with managed='no' somebody else binds it "
            "before the start",
            how_to_bind(context.host, [first]),
            subject=names,
        )


def managed_in_use(context: PreflightContext) -> Iterator[Diagnostic]:
    """What libvirt does not look at before it unbinds (virPCIDeviceDetach)."""
    for taken in context.waiting:
        if not taken.hostdev.managed or taken.device.stuck is not None:
            continue
        diagnostics = [o for look in _LOOKS for o in look(context.host, taken.device)]
        for diagnostic in _by_kind(diagnostics):
            rule, severity, why = _HOW_BAD[diagnostic.override]
            why = _CUTS_OFF if diagnostic.rule == guards.IN_NETWORK else why
            yield finding(
                rule,
                severity,
                diagnostic.summary,
                (context.cite_managed(taken.hostdev), driver_of(taken.device)),
                why,
                _release(taken, diagnostic),
            )


def _by_kind(diagnostics: Iterable[Diagnostic]) -> tuple[Diagnostic, ...]:
    """The first of each text: a device may be the same obstacle in two ways."""
    return tuple({diagnostic.summary: diagnostic for diagnostic in diagnostics}.values())


def _release(taken: AssignedFunction, diagnostic: Diagnostic) -> str:
    """What to do first: the words of a guard, without the flags of `vfiomgr bind`."""
    address = taken.device.address
    match diagnostic.override:
        case "boot-display":
            return (
                "make another display the primary one in the firmware; or, where the host is "
                f"reached over the network, bind it before the start, vfiomgr bind {address} "
                "--allow boot-display, and write managed='no'"
            )
        case "mounted-disk":
            return "unmount it (vfiomgr show lists what is on it), or give another device"
        case "default-route":
            return "move the route to another interface, or give another device"
        case "vgpu-function":
            return diagnostic.without("allow").remedy
        case "in-use":
            first = diagnostic.without("allow", "only").remedy
            then = (
                ", or give another device"
                if diagnostic.rule == guards.IN_NETWORK
                else f"; vfiomgr bind {address} then takes it with a deadline, and managed='no' "
                "has libvirt leave it so"
            )
            return first + then
    return diagnostic.hint


def managed_vendor_function(context: PreflightContext) -> Iterator[Diagnostic]:
    """A vGPU in the vendor's own interface is one only while its vendor's driver has it."""
    for taken in context.functions:
        if taken.hostdev.managed and context.is_vendor_function(taken):
            yield finding(
                "managed-vendor-function",
                "blocker",
                f"{taken.device} is a vGPU of its driver {taken.device.driver}, and managed='yes' "
                "has libvirt unbind it",
                (context.cite_managed(taken.hostdev), driver_of(taken.device)),
                "it goes to guests from its own driver; unbound, it is lost until all virtual "
                "functions are made anew",
                f"write managed='no' in line {taken.hostdev.line}",
                subject=taken.device,
            )


def vendor_function(context: PreflightContext) -> Iterator[Diagnostic]:
    """Since 9.7 libvirt looks for `vfio-dev/` instead of a driver's name."""
    version = context.libvirt
    if version is None or VENDOR_FUNCTION.is_in(version):
        return
    for taken in context.functions:
        if not context.is_vendor_function(taken):
            continue
        yield finding(
            "vendor-function-old-libvirt",
            "blocker",
            f"libvirt {version} cannot give {taken.device} to a guest from its own driver",
            (context.cite(taken.hostdev), driver_of(taken.device), context.cite_libvirt()),
            "it knows vfio-pci alone, and says that the device must be detached from the host",
            f"install libvirt {VENDOR_FUNCTION.since} or later",
            subject=taken.device,
        )


def variant(context: PreflightContext) -> Iterator[Diagnostic]:
    """Before 9.7 libvirt compares the driver's name with vfio-pci."""
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
            f"{taken.device} is on {taken.device.driver}, and libvirt {version} knows vfio-pci "
            "alone",
            (context.cite_managed(taken.hostdev), driver_of(taken.device), context.cite_libvirt()),
            "with managed='no' libvirt takes the variant for a host driver and does not start; "
            "with managed='yes' it puts the device on vfio-pci, without what the variant is for",
            f"vfiomgr unbind {address}, then vfiomgr bind {address} --driver {_PLAIN}; or install "
            f"libvirt {VENDOR_FUNCTION.since} or later",
            subject=taken.device,
        )


def managed_and_bound(context: PreflightContext) -> Iterator[Diagnostic]:
    """Whoever binds, owns: libvirt leaves such a device as it found it, today."""
    for taken in context.functions:
        if not (taken.hostdev.managed and taken.is_bound):
            continue
        if context.host.origin(taken.device) is None and (
            context.host.binding(taken.device.address) is None
        ):
            continue
        yield finding(
            "managed-and-bound",
            "info",
            f"vfiomgr bound {taken.device}, and managed='yes' says that libvirt does",
            (context.cite_managed(taken.hostdev), driver_of(taken.device)),
            "libvirt leaves a device that it finds bound; after an unbind it would take it from "
            "its host driver itself, without a look at who uses it",
            f"write managed='no' in line {taken.hostdev.line}: who binds, owns",
            subject=taken.device,
        )


def not_kept(context: PreflightContext) -> Iterator[Diagnostic]:
    """What vfiomgr bound without --persist is on its host driver after a reboot."""
    for taken in context.functions:
        device = taken.device
        if taken.hostdev.managed or not taken.is_bound or context.host.origin(device) is None:
            continue
        if context.host.binding(device.address) is not None or device.physical_function:
            continue
        if context.domain.is_bound_by_hook:
            continue
        yield finding(
            "binding-not-kept",
            "info",
            f"{device} is bound until the next reboot",
            (context.cite_managed(taken.hostdev), f"{sysfs(device)}: no rule of vfiomgr persist"),
            "with managed='no' nobody binds it after a reboot, and the domain does not start then",
            f"vfiomgr bind {device.address} --persist",
            subject=device,
        )


def not_installed(context: PreflightContext) -> Iterator[Diagnostic]:
    """A domain that asks for the hook, and no script that libvirt would run."""
    needs = context.hook_needs
    names = (*map(str, needs.functions), *needs.vgpus)
    if not names or context.host.file(SCRIPT) is not None:
        return
    yield finding(
        "hook-not-installed",
        "blocker",
        f"the hook is to make {', '.join(names)} ready, and it is not installed",
        (_mark(context), f"{SCRIPT} is not there"),
        "libvirt runs no script before the start, so nobody binds the devices",
        "vfiomgr libvirt hook install, and restart libvirtd or virtqemud once",
    )


def refused(context: PreflightContext) -> Iterator[Diagnostic]:
    """The hook has the guards of `vfiomgr bind`: where one objects, the guest does not start."""
    functions = context.hook_needs.functions
    stuck = {taken.device.address for taken in context.functions if taken.device.stuck}
    if not functions or stuck.intersection(functions):
        return  # of a function that is stuck another rule tells
    try:
        plan_bind(context.host, Bind(functions))
    except Refusal as refusal:
        drivers = (t.device for t in context.functions if t.device.address in functions)
        yield finding(
            "hook-refused",
            "blocker",
            refusal.message,
            (_mark(context), *map(driver_of, drivers)),
            "the hook binds with the guards of vfiomgr bind, and a guest whose hook fails does not "
            "start",
            f"{refusal.hint} (what is allowed is allowed to vfiomgr bind "
            f"{' '.join(map(str, functions))}, before the start)",
        )


def _mark(context: PreflightContext) -> str:
    line = context.domain.line("metadata")
    return f"{context.at(line)}: <metadata> with {OPT_IN} of {NAMESPACE}"
