"""The rules of `vfiomgr check console`: whether a card that the desktop uses can be lent.

Nothing is released or changed. The rules about who uses the card are in `console_users`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.check.console_users import (
    audio,
    compositors,
    display_manager,
    processes,
    services,
    sessions,
)
from vfiomgr.check.model import Readiness, command_line
from vfiomgr.check.plan import RULES
from vfiomgr.desktop.card import (
    DesktopCard,
    has_screen_driver,
    is_display,
)
from vfiomgr.diagnostic import Diagnostic, Override, diagnostics_of, finding, info, problem, warning
from vfiomgr.errors import Refusal, UsageError
from vfiomgr.passthrough import guards
from vfiomgr.passthrough.plan import plan_bind
from vfiomgr.passthrough.readiness_hints import as_commands
from vfiomgr.passthrough.steps import Bind
from vfiomgr.pci.model import CLASS_VGA, PciDevice
from vfiomgr.rules.runner import (
    Fact,
    Report,
    RuleSet,
    reading,
    register,
    rule,
    with_useful_remedies,
)
from vfiomgr.snapshot.named import find_device
from vfiomgr.units import Version
from vfiomgr.users import desktop as programs

if TYPE_CHECKING:
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.users.desktop import DesktopFacts

_TAKEN: frozenset[Override] = frozenset({"boot-display", "in-use"})
"""What this check judges itself, in more detail than `bind`."""
_NO_CONSOLE = "each display can go to a guest without taking the console's screen away"


def display(context: DesktopCard) -> Iterator[Diagnostic]:
    """Report whether the card shows the console, and how it is lent."""
    device = context.device
    if device.is_on_vfio or not device.is_boot_display:
        state = f"is on {device.driver}" if device.is_on_vfio else "does not show the console"
        shown = (f"driver: {device.driver or 'none'}",)
        yield finding("console-display", "ok", f"{device} {state}", shown, "")
        return
    yield info(
        "console-display",
        f"{device} shows the console",
        (*device.display_signs, f"driver: {device.driver or 'none'}"),
        "while a guest has the card, this host has no screen on it",
        "if this host has another display: make it the primary one in the firmware setup",
        subject=device,
    )


def release(context: DesktopCard, _desktop: DesktopFacts) -> Iterator[Diagnostic]:
    """Report whether `bind --release` can take the card, with its steps, or why not."""
    device, host = context.device, context.host
    if device.is_on_vfio or _refused(host, device):
        return
    command = f"vfiomgr bind --release {device.address}"
    try:
        plan = plan_bind(host, Bind((device.address,), release=True))
    except Refusal as refusal:
        for one in as_commands(diagnostics_of(refusal), f"run {command}"):
            yield problem(
                "console-release",
                f"{device} cannot be released: {one.summary}",
                (f"{command} refuses it: {one.rule}",),
                one.why or "the safety checks of vfiomgr bind --release",
                *one.remedies,
                subject=device,
            )
        return
    if not plan.deferred and not device.is_boot_display:
        return
    steps = (*(step.describe() for step in plan.steps), *plan.deferred)
    yield info(
        "console-release",
        f"{device} can be released and bound",
        steps,
        "these steps, in this order; vfiomgr unbind undoes them",
        f"see the commands: {command} --dry-run",
        subject=device,
    )


def _refused(host: HostSnapshot, device: PciDevice) -> tuple[Diagnostic, ...]:
    """Why `bind` would refuse the card even if nothing of the desktop used it."""
    try:
        plan_bind(host, Bind((device.address,), allow=_TAKEN))
    except Refusal as refusal:
        return diagnostics_of(refusal)
    return ()


def refused(context: DesktopCard) -> Iterator[Diagnostic]:
    """Report other reasons against binding the card: the IOMMU, its group, guests."""
    device = context.device
    found = _refused(context.host, device)
    command = f"vfiomgr bind {device.address}"
    for one in as_commands(found, f"run {command}"):
        yield problem(
            "console-bind-refused",
            one.summary,
            (f"{command} refuses it: {one.rule}",),
            one.why or "the card cannot be bound to vfio-pci",
            *one.remedies,
            subject=device,
        )


def firmware(context: DesktopCard, desktop: DesktopFacts) -> Iterator[Diagnostic]:
    """Report the firmware's framebuffer on the card: what cannot work, or does not come back."""
    device, host = context.device, context.host
    names = ", ".join(device.framebuffers)
    own = [f for f in desktop.platform_framebuffers if f.device == str(device.address)]
    shown = tuple(f"/sys/bus/platform/devices/{f.name}: {f.driver or 'no driver'}" for f in own)
    if any(guards.firmware_framebuffer(host, device)):
        version = host.kernel.version
        is_old = version is not None and version < Version(6, 0)
        yield problem(
            "console-framebuffer",
            f"the firmware's framebuffer ({names}) keeps the memory of {device}",
            (
                f"/proc/iomem: {names} below {device.address}",
                *((f"Linux {host.kernel.release}",) if is_old else ()),
                f"class {device.class_code}",
                *shown,
            ),
            "vfio-pci removes the firmware's framebuffer since Linux 6.0, from VGA functions only",
            *guards.freeing(host, device, command_line(host)),
            subject=device,
        )
        return
    if names and not device.is_on_vfio and not has_screen_driver(device):
        yield warning(
            "console-not-restored",
            f"the console of {device} does not come back after the guest",
            (f"/proc/iomem: {names}", f"driver: {device.driver or 'none'}", *shown),
            "vfio-pci removes the firmware's framebuffer until the next boot; only a native driver "
            "shows the console again",
            "load the native driver of the card before it is lent",
            subject=device,
        )


def first_console(context: DesktopCard) -> Iterator[Diagnostic]:
    """Report a fault of Linux 6.0 to 6.4: a second card's binding ends the first one's console."""
    device, version = context.device, context.host.kernel.version
    if version is None or not Version(6, 0) <= version < Version(6, 5) or device.is_on_vfio:
        return
    if device.is_boot_display or not device.class_code.startswith(CLASS_VGA):
        return
    for other in context.other_displays:
        if other.framebuffers and not has_screen_driver(other):
            yield warning(
                "console-other-card",
                f"binding {device.address} may end the console of {other}",
                (
                    f"Linux {context.host.kernel.release}",
                    f"/proc/iomem: {', '.join(other.framebuffers)} below {other.address}",
                ),
                "vfio-pci of Linux 6.0 to 6.4 may remove the framebuffer of another card; some "
                "distributions have the correction (5ae3716cfdcd)",
                "boot Linux 6.5 or newer, or load the native driver of the console's card",
                subject=device,
            )


def text_console(context: DesktopCard, desktop: DesktopFacts) -> Iterator[Diagnostic]:
    """Report the text console on the card, which is to be detached before its driver goes."""
    if not context.has_text_console(desktop):
        return
    own = [f for f in desktop.framebuffers if f.device == str(context.device.address)]
    bound = [c for c in desktop.consoles if c.is_bound and programs.FBCON in c.driver]
    yield info(
        "console-text",
        f"the text console is bound to {', '.join(f.name for f in own)} of {context.device}",
        (
            *(f"/sys/class/vtconsole/{c.name}: {c.driver}, bind 1" for c in bound),
            *(f"/sys/class/graphics/{f.name}: {f.driver}" for f in own),
        ),
        "some drivers fail if they are unbound below it (NVIDIA: bugzilla 216475; amdgpu); the "
        "numbers change when drivers come and go",
        "detach it first: "
        + "; ".join(f"echo 0 > /sys/class/vtconsole/{c.name}/bind" for c in bound),
        subject=context.device,
    )


def way_back(context: DesktopCard, desktop: DesktopFacts) -> Iterator[Diagnostic]:
    """Report the only card of a host that cannot be reached over the network."""
    device = context.device
    if not _is_only_screen(context) or desktop.has_ssh is None:
        return
    summary = f"{device} is the only display of this host"
    if desktop.has_ssh:
        shown = ("sshd runs, or port 22 is open",)
        yield finding("console-way-back", "ok", f"{summary}, which SSH reaches", shown, "")
        return
    yield warning(
        "console-way-back",
        f"{summary}, and no SSH server runs",
        ("sshd: no such process", "/proc/net/tcp: nothing listens at port 22"),
        "if the card does not come back, only the power button or a login without a picture is "
        "left; the text console returns with the driver",
        "install and start an SSH server, and log in from another machine as a test",
        subject=device,
    )


def _is_only_screen(context: DesktopCard) -> bool:
    device = context.device
    return device.is_boot_display and not context.other_displays and not device.is_on_vfio


def mux(context: DesktopCard, desktop: DesktopFacts) -> Iterator[Diagnostic]:
    """Report a laptop whose panel is wired to the discrete GPU by a switch."""
    device, mux = context.device, desktop.laptop.mux
    if mux is None or mux.value is not False:
        return
    if context.host.is_integrated(device) or device.is_on_vfio:
        return
    yield problem(
        "console-mux",
        f"the panel of this laptop is wired to {device}",
        (f"{mux.path}: 0",),
        "while a guest has the card, the panel is black, and no driver of the host can change it",
        "vfiomgr laptop hybrid, and reboot",
        subject=device,
    )


def resets(context: DesktopCard, _facts: Readiness) -> Iterator[Diagnostic]:
    """The findings of `check` about this card, as if it did not show the console.

    A remedy must also hold for the card as it is: nobody binds the only display at boot.
    """
    free = replace(context.device, is_boot_display=False)
    others = (d for d in context.host.devices if not d.is_graphics_or_accelerator)
    own = replace(context.host, devices=(free, *others))
    for each in _OF_CARD:
        about = (f for f in each.find(own) if f.subject in ("", str(free)))
        host = context.host if context.device.is_boot_display else own
        yield from (with_useful_remedies(found, host) for found in about)


_OF_CARD = RULES.named(
    *("silent-device", "bar-not-assigned", "no-reset", "weak-reset", "amd-reset"),
    *("amd-lost-by-reset", "amd-unbind", "gpu-fault", "resizable-bar"),
)
_DESKTOP: Fact[DesktopCard, DesktopFacts] = Fact(
    lambda context: context.desktop, "the desktop", "not in the snapshot", decides=True
)
_READINESS: Fact[DesktopCard, Readiness] = Fact(
    lambda context: context.host.readiness, "reset reports of the card", "not in the snapshot"
)


def _unknown(context: DesktopCard) -> Iterator[str]:
    """What could name a user of the card, and could not be read."""
    if context.host.users.processes is None:
        yield "processes that use the card: only root of a running host sees their open files"
    for device in context.functions:
        for each in context.host.unknown_users_of(device):
            yield f"{each.kind}: {each.why}"
    if context.desktop is not None:
        yield from context.desktop.unread
        yield from (f"panel: cannot read {path}" for path in context.desktop.laptop.unread)
        if context.desktop.has_ssh is None and _is_only_screen(context):
            yield "SSH server: cannot read /proc/net/tcp"


CONSOLE_RULES: RuleSet[DesktopCard] = register(
    RuleSet(
        "a card of the desktop",
        rules=(
            rule(display, "console-display"),
            rule(refused, "console-bind-refused"),
            reading(_DESKTOP, release, "console-release"),
            reading(_DESKTOP, mux, "console-mux"),
            reading(_DESKTOP, firmware, "console-framebuffer", "console-not-restored"),
            rule(first_console, "console-other-card"),
            reading(_DESKTOP, sessions, "console-session"),
            reading(_DESKTOP, display_manager, "console-display-manager"),
            reading(_DESKTOP, audio, "console-audio"),
            rule(services, "console-service"),
            reading(_DESKTOP, processes, "console-process"),
            reading(_DESKTOP, text_console, "console-text"),
            reading(_DESKTOP, way_back, "console-way-back"),
            reading(_DESKTOP, compositors, "console-second-card"),
            reading(_READINESS, resets, *(name for each in _OF_CARD for name in each.names)),
        ),
        unknown=(_unknown,),
    )
)


def check_console(host: HostSnapshot, address: str | None = None) -> Report:
    """Check one card, or without an address those that show the console.

    Raises:
        UsageError: the device is not a display.
    """
    displays = [str(d.address) for d in host.devices if is_display(d)]
    known = f"name a display of this host: {', '.join(displays)}"
    if not displays:
        known = "see what this host has: vfiomgr list"
    if address is None:
        cards = [d for d in host.devices if d.is_boot_display and is_display(d)]
        if not cards:
            none = "no display of this host shows the console"
            own = tuple(
                f"{d.address}: {d.driver or 'no driver'}" for d in host.devices if is_display(d)
            )
            return Report.of([info("console-display", none, own, _NO_CONSOLE, known)])
    else:
        named = find_device(host, address)
        cards = [d for d in (named, *host.slot(named)) if is_display(d)][:1]
    if not cards:
        message = f"not a display: {address}"
        raise UsageError(message, known)
    reports = [CONSOLE_RULES.run(DesktopCard(host, card)) for card in cards]
    return Report.of(
        (found for each in reports for found in each.findings),
        (text for each in reports for text in each.not_checked),
        (text for each in reports for text in each.unknown),
    )
