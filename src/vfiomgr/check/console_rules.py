"""The rules of `vfiomgr check console`: whether a card that the desktop uses can be lent.

They say who uses the card and how each user releases it; nothing is released or changed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.check.model import command_line
from vfiomgr.check.plan import RULES
from vfiomgr.desktop.card import (
    SOUND,
    DesktopCard,
    has_screen_driver,
    is_display,
    is_of_manager,
    running_manager,
)
from vfiomgr.desktop.plan import release_of
from vfiomgr.diagnostic import Diagnostic, diagnostics_of, finding
from vfiomgr.errors import Refusal, UsageError
from vfiomgr.listing import listed
from vfiomgr.passthrough import guards
from vfiomgr.passthrough.plan import plan_bind
from vfiomgr.passthrough.readiness_hints import as_commands, bind_remedy
from vfiomgr.passthrough.reserve import Reserve, plan_reserve
from vfiomgr.passthrough.steps import Bind
from vfiomgr.pci.model import CLASS_VGA, PciDevice
from vfiomgr.persistence.reservation import reservation_file, reservations
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
    from collections.abc import Iterator

    from vfiomgr.check.model import Readiness
    from vfiomgr.diagnostic import Override
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.users.desktop import DesktopFacts, DesktopProcess, UserSession
    from vfiomgr.users.model import DeviceUser

_TAKEN: frozenset[Override] = frozenset({"boot-display", "in-use"})
"""What this check judges itself, in more detail than `bind`."""
_MOST = 5
"""Maximum number of processes that are named in one line."""
_NO_CONSOLE = "each display can go to a guest without taking the console's screen away"


def display(context: DesktopCard) -> Iterator[Diagnostic]:
    """Report whether the card shows the console, and how it is lent."""
    device = context.device
    if device.is_on_vfio or not device.is_boot_display:
        state = f"is on {device.driver}" if device.is_on_vfio else "does not show the console"
        shown = (f"driver: {device.driver or 'none'}",)
        yield finding("console-display", "ok", f"{device} {state}", shown, "")
        return
    yield finding(
        "console-display",
        "info",
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
            yield finding(
                "console-release",
                "blocker",
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
    yield finding(
        "console-release",
        "info",
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
        yield finding(
            "console-bind-refused",
            "blocker",
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
        yield finding(
            "console-framebuffer",
            "blocker",
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
        yield finding(
            "console-not-restored",
            "warning",
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
            yield finding(
                "console-other-card",
                "warning",
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
    yield finding(
        "console-text",
        "info",
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


def sessions(context: DesktopCard, desktop: DesktopFacts) -> Iterator[Diagnostic]:
    """Report the sessions that use the card, and how each is ended."""
    if release_of(context, end_sessions=False).is_announced:
        return  # their compositors close the card and go on
    for session, processes in context.sessions(desktop):
        names = listed([str(each) for each in processes], _MOST)
        nodes = sorted(context.nodes.intersection(session.nodes))
        what = "the greeter" if session.kind == "greeter" else f"a session of {session.user}"
        is_certain = processes or nodes or context.host.users.processes is not None
        place = f"/run/systemd/sessions/{session.id}"
        kind = ", ".join(filter(None, (session.type, session.kind, session.seat)))
        yield finding(
            "console-session",
            "warning",
            f"{what} {'uses' if is_certain else 'may use'} {context.device}",
            (
                f"{place}: {kind}{f', VT {session.vt}' if session.vt else ''}",
                *((f"{place}: logind opened {', '.join(nodes)}",) if nodes else ()),
                *((f"open nodes: {names}",) if names else ()),
            ),
            "a compositor or X server does not release its card while it runs, nor at a change of "
            "the VT: its session ends, and unsaved work is lost",
            _ending(session, desktop),
            subject=context.device,
        )


def _ending(session: UserSession, desktop: DesktopFacts) -> str:
    """How a session ends and does not come back."""
    manager = running_manager(desktop)
    first = f"systemctl stop {manager[0]}; " if manager else ""
    then = ""
    if session.service in ("login", "") and session.vt:
        first += f"systemctl stop getty@tty{session.vt}.service; "
    if session.user in desktop.lingering and session.uid is not None:
        then = f"; systemctl stop user@{session.uid}.service (its services linger)"
    return f"{first}loginctl terminate-session {session.id}{then}"


def display_manager(context: DesktopCard, desktop: DesktopFacts) -> Iterator[Diagnostic]:
    """Report a display manager, which starts a greeter again when a session ends."""
    manager = running_manager(desktop)
    if release_of(context, end_sessions=False).is_announced:
        return
    if manager is None or not context.shows_greeter(desktop) or context.device.is_on_vfio:
        return
    unit, shown = manager
    yield finding(
        "console-display-manager",
        "info",
        f"{unit} starts a greeter on the card when a session ends",
        (
            shown,
            *dict.fromkeys(
                f"{user}: {user.node}" for user in context.users if is_of_manager(user, desktop)
            ),
        ),
        "a process that is killed comes back (Restart=); the unit must be stopped, and after it "
        "the first VT may show no login",
        f"systemctl stop {unit}; systemctl start getty@tty1.service. After the guest: "
        f"systemctl start {unit}",
        subject=context.device,
    )


def audio(context: DesktopCard, desktop: DesktopFacts) -> Iterator[Diagnostic]:
    """Report programs that have the card's audio open, as the driver's unbind waits for them."""
    users = [user for user in context.users if user.node.startswith(SOUND)]
    if not users:
        return
    by_pid = {process.pid: process for process in desktop.processes}
    owners = {p.uid for user in users if (p := by_pid.get(user.pid)) and p.uid is not None}
    known = {session.uid: session.user for session in desktop.sessions}
    remedies = [
        f"systemctl --user -M {known.get(uid, uid)}@ stop pipewire.socket pipewire-pulse.socket "
        "wireplumber.service pipewire.service"
        for uid in sorted(owners)
    ]
    names = listed(list(dict.fromkeys(map(str, users))), _MOST)
    yield finding(
        "console-audio",
        "warning",
        f"the audio of {context.device} is in use",
        (f"open nodes: {names}", ", ".join(sorted({user.node for user in users}))),
        "the driver's unbind waits until the last program closes it, and cannot be interrupted; "
        "services of a user end 10 seconds after the last session, with lingering never",
        "; ".join(remedies) or "end these programs",
        subject=context.device,
    )


def services(context: DesktopCard) -> Iterator[Diagnostic]:
    """Report services of the system that keep the card open and can be started again."""
    found: dict[str, list[DeviceUser]] = {}
    for user in context.users:
        unit = programs.NVIDIA_SERVICES.get(user.command)
        if user.monitor == "services":
            unit = user.unit
        if unit:
            found.setdefault(unit, []).append(user)
    for unit, users in found.items():
        yield finding(
            "console-service",
            "warning",
            f"{unit} keeps {context.device} open",
            tuple(dict.fromkeys(map(str, users))),
            "the driver's unbind waits until it is stopped",
            f"systemctl stop {unit}. After the guest: systemctl start {unit}",
            subject=context.device,
        )


def processes(context: DesktopCard, desktop: DesktopFacts) -> Iterator[Diagnostic]:
    """Report other processes that have the card open: they only release it by ending."""
    of_sessions = {p.pid for _, own in context.sessions(desktop) for p in own}
    others = [
        user
        for user in context.users
        if user.pid not in of_sessions
        and user.command not in programs.NVIDIA_SERVICES
        and user.monitor is None
        and not user.node.startswith(SOUND)
        and user.guest is None
        and not is_of_manager(user, desktop)
    ]
    keepers = [u for u in others if u.pid == 1 or u.unit == "systemd-logind.service"]
    ending = dict.fromkeys(user for user in others if user not in keepers)
    if ending:
        pids = " ".join(dict.fromkeys(str(user.pid) for user in ending))
        yield finding(
            "console-process",
            "warning",
            f"other processes have {context.device} open",
            tuple(f"{user}: {user.node}" for user in ending),
            "a program that computes or renders on the card releases it only when it ends",
            f"let them finish, or end them: kill {pids}",
            subject=context.device,
        )
    if keepers and not any(context.sessions(desktop)):
        yield finding(
            "console-process",
            "warning",
            f"systemd keeps {context.device} open for a session",
            tuple(f"{user}: {user.node}" for user in keepers),
            "it closes the card when the session whose compositor asked for it ends",
            "find the session with loginctl, and end it: loginctl terminate-session ID",
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
    yield finding(
        "console-way-back",
        "warning",
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
    yield finding(
        "console-mux",
        "blocker",
        f"the panel of this laptop is wired to {device}",
        (f"{mux.path}: 0",),
        "while a guest has the card, the panel is black, and no driver of the host can change it",
        "vfiomgr laptop hybrid, and reboot",
        subject=device,
    )


def compositors(context: DesktopCard, desktop: DesktopFacts) -> Iterator[Diagnostic]:
    """Report compositors that open a second card, which a reservation keeps them off."""
    device, host = context.device, context.host
    is_bound_early = device.is_on_vfio or host.files.binding(device.address) is not None
    if device.is_boot_display or is_bound_early or not has_screen_driver(device):
        return
    is_reserved = device.address in reservations(host.files)
    opening = _opening(context, desktop)
    if is_reserved and not opening:
        shown = (f"{reservation_file(device.address)}",)
        yield finding("console-second-card", "ok", f"{device} is reserved for guests", shown, "")
    for name, (processes, is_certain) in opening.items():
        yield finding(
            "console-second-card",
            "info",
            f"{name} {'has opened' if is_certain else 'may open'} {device}",
            (*map(str, processes), *sorted(n for n in context.nodes if n.startswith("/dev/dri/"))),
            "compositors open every card of their seat when they start; this card is then not free "
            f"before the session ends{_closing(name)}",
            *(("reboot, since it is reserved now",) if is_reserved else _reserving(host, device)),
            bind_remedy(
                f"if the host does not need it: vfiomgr bind --persist {device.address}",
                (device,),
                persist=True,
                joint="; or, ",
            ),
            subject=device,
        )


def _opening(
    context: DesktopCard, desktop: DesktopFacts
) -> dict[str, tuple[list[DesktopProcess], bool]]:
    """The compositors that have opened the card, by name, and whether that is certain."""
    is_unknown = context.host.users.processes is None
    found: dict[str, tuple[list[DesktopProcess], bool]] = {}
    for process in desktop.named(programs.COMPOSITORS):
        session = desktop.session_of(process)
        if session is not None and session.type == "x11" and process.command not in programs.XORG:
            continue  # a client of the X server
        opened = session is not None and bool(context.nodes.intersection(session.nodes))
        if opened or process.pid in context.holders or is_unknown:
            others, is_certain = found.get(process.command, ([], True))
            is_certain &= not is_unknown or opened
            found[process.command] = ([*others, process], is_certain)
    return found


def _reserving(host: HostSnapshot, device: PciDevice) -> Iterator[str]:
    """How to keep compositors off a card that the host keeps between guests."""
    try:
        plan_reserve(host, Reserve((device.address,)))
    except Refusal as refusal:
        yield from dict.fromkeys(found.hint for found in diagnostics_of(refusal))
    else:
        yield f"vfiomgr bind --reserve {device.address}, and reboot"


def _closing(name: str) -> str:
    """What the compositor does with a card that is removed at run time."""
    if name in programs.KWIN:
        return (
            " (udevadm trigger --action=remove makes KWin close it, unless it is the primary card)"
        )
    if name in programs.MUTTER:
        return " (GNOME closes no card while it runs)"
    return ""


def resets(context: DesktopCard, _facts: Readiness) -> Iterator[Diagnostic]:
    """What `check` finds about this card alone; also if it shows the console now."""
    free = replace(context.device, is_boot_display=False)
    others = (d for d in context.host.devices if not d.is_graphics_or_accelerator)
    own = replace(context.host, devices=(free, *others))
    for each in _OF_CARD:
        about = (f for f in each.find(own) if f.subject in ("", str(free)))
        yield from (with_useful_remedies(found, own) for found in about)


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
        UsageError: it is no display.

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
            return Report.of([finding("console-display", "info", none, own, _NO_CONSOLE, known)])
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
