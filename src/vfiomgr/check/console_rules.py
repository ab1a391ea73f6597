"""The rules of `vfiomgr check console`: whether a card that the desktop uses can be lent.

They say who uses the card and how each user releases it; nothing is released or changed.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.check.model import command_line
from vfiomgr.check.plan import RULES
from vfiomgr.diagnostic import Diagnostic, diagnostics_of, finding
from vfiomgr.errors import Refusal, UsageError
from vfiomgr.listing import listed
from vfiomgr.passthrough import guards
from vfiomgr.passthrough.plan import plan_bind
from vfiomgr.passthrough.readiness_hints import as_commands, bind_remedy
from vfiomgr.passthrough.reserve import Reserve, is_display, plan_reserve
from vfiomgr.passthrough.steps import Bind
from vfiomgr.pci.model import CLASS_AUDIO, CLASS_DISPLAY, CLASS_VGA, PciDevice
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
from vfiomgr.snapshot.model import HostSnapshot
from vfiomgr.snapshot.named import find_device
from vfiomgr.units import Version
from vfiomgr.users import desktop as programs
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.check.model import Readiness
    from vfiomgr.diagnostic import Override
    from vfiomgr.users.desktop import DesktopFacts, DesktopProcess, UserSession
    from vfiomgr.users.model import DeviceUser

_SOUND = "/dev/snd/"
_TAKEN: frozenset[Override] = frozenset({"boot-display", "in-use"})
"""What this check judges itself, in more detail than `bind`."""
_MOST = 5
"""Maximum number of processes that are named in one line."""
_NO_CONSOLE = "each display can go to a guest without taking the console's screen away"


class CardContext(Value, dict=True):
    """A card, with its audio function, and its host."""

    host: HostSnapshot
    device: PciDevice

    @cached_property
    def functions(self) -> tuple[PciDevice, ...]:
        """The display and the audio functions beside it, which go to a guest together."""
        slot = self.host.slot(self.device)
        audio = (d for d in slot if d.class_code.startswith(CLASS_AUDIO))
        return (self.device, *audio)

    @cached_property
    def nodes(self) -> frozenset[str]:
        """The nodes of its host drivers."""
        return frozenset(node for function in self.functions for node in function.nodes)

    @cached_property
    def users(self) -> tuple[DeviceUser, ...]:
        """The processes that have the card open; empty also if they are unknown."""
        found = (user for d in self.functions for user in self.host.holders(d))
        return tuple(dict.fromkeys(found))

    @property
    def desktop(self) -> DesktopFacts | None:
        """The facts about the desktop; None if they were not read."""
        return self.host.desktop

    @cached_property
    def holders(self) -> frozenset[int]:
        """The numbers of the processes that have the display open."""
        return frozenset(u.pid for u in self.users if not u.node.startswith(_SOUND))

    @cached_property
    def other_displays(self) -> tuple[PciDevice, ...]:
        """The other cards of the host that can show its console."""
        return tuple(
            d
            for d in self.host.devices
            if d.class_code.startswith(CLASS_DISPLAY)
            and d.address.slot != self.device.address.slot
            and d.physical_function is None
            and not d.is_on_vfio
        )


def display(context: CardContext) -> Iterator[Diagnostic]:
    """Report whether the card shows the console, and how it is lent."""
    device = context.device
    if device.is_on_vfio or not device.is_boot_display:
        state = f"is on {device.driver}" if device.is_on_vfio else "does not show the console"
        shown = (f"driver: {device.driver or 'none'}",)
        yield finding("console-display", "ok", f"{device} {state}", shown, "")
        return
    text = f"once nothing uses it: vfiomgr bind {device.address} --allow boot-display"
    yield finding(
        "console-display",
        "info",
        f"{device} shows the console",
        (*device.display_signs, f"driver: {device.driver or 'none'}"),
        "while a guest has the card, this host has no screen on it",
        *(() if _refused(context.host, device) else (text,)),
        subject=device,
    )


def _refused(host: HostSnapshot, device: PciDevice) -> tuple[Diagnostic, ...]:
    """Why `bind` would refuse the card even if nothing of the desktop used it."""
    try:
        plan_bind(host, Bind((device.address,), allow=_TAKEN))
    except Refusal as refusal:
        return diagnostics_of(refusal)
    return ()


def refused(context: CardContext) -> Iterator[Diagnostic]:
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


def firmware(context: CardContext, desktop: DesktopFacts) -> Iterator[Diagnostic]:
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
    if names and not device.is_on_vfio and not _has_screen_driver(device):
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


def _has_screen_driver(device: PciDevice) -> bool:
    return any(node.startswith("/dev/dri/card") for node in device.nodes)


def first_console(context: CardContext) -> Iterator[Diagnostic]:
    """Report a fault of Linux 6.0 to 6.4: a second card's binding ends the first one's console."""
    device, version = context.device, context.host.kernel.version
    if version is None or not Version(6, 0) <= version < Version(6, 5) or device.is_on_vfio:
        return
    if device.is_boot_display or not device.class_code.startswith(CLASS_VGA):
        return
    for other in context.other_displays:
        if other.framebuffers and not _has_screen_driver(other):
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


def text_console(context: CardContext, desktop: DesktopFacts) -> Iterator[Diagnostic]:
    """Report the text console on the card, which is to be detached before its driver goes."""
    own = [f for f in desktop.framebuffers if f.device == str(context.device.address)]
    bound = [c for c in desktop.consoles if c.is_bound and "frame buffer" in c.driver]
    if not bound or not own or own[0] != desktop.framebuffers[0]:  # the console takes the first
        return
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


def sessions(context: CardContext, desktop: DesktopFacts) -> Iterator[Diagnostic]:
    """Report the sessions that use the card, and how each is ended."""
    for session, processes in _sessions(context, desktop):
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
    manager = _manager(desktop)
    first = f"systemctl stop {manager[0]}; " if manager else ""
    then = ""
    if session.service in ("login", "") and session.vt:
        first += f"systemctl stop getty@tty{session.vt}.service; "
    if session.user in desktop.lingering and session.uid is not None:
        then = f"; systemctl stop user@{session.uid}.service (its services linger)"
    return f"{first}loginctl terminate-session {session.id}{then}"


def _sessions(
    context: CardContext, desktop: DesktopFacts
) -> Iterator[tuple[UserSession, tuple[DesktopProcess, ...]]]:
    """The graphical sessions that use the card, with the processes that have it open.

    If the processes are unknown, each session at the seat of the console may use its card. An X
    server that the display manager runs has the card open for the sessions of that type.
    """
    is_unknown = context.host.users.processes is None and context.device.is_boot_display
    is_served = any(_of_manager(user, desktop) for user in context.users)
    for session in filter(lambda one: one.is_graphical, desktop.sessions if context.nodes else ()):
        own = tuple(
            process
            for process in desktop.processes
            if process.pid in context.holders and desktop.session_of(process) == session
        )
        may = (is_unknown and session.seat == "seat0") or (is_served and session.type == "x11")
        if own or may or context.nodes.intersection(session.nodes):
            yield session, own


def _of_manager(user: DeviceUser, desktop: DesktopFacts) -> bool:
    """Whether the display manager runs a process, e.g. its X server, outside of any session."""
    return user.unit is not None and user.unit == desktop.display_manager


def _manager(desktop: DesktopFacts) -> tuple[str, str] | None:
    """The unit of the display manager and what shows it; also if no process can be read."""
    running = (p for p in desktop.named(programs.DISPLAY_MANAGERS) if p.uid is None)
    process, unit = next(running, None), desktop.display_manager
    if unit is None or (process is None and desktop.processes):
        return None
    shown = f"{process}, {unit}" if process else f"{programs.DISPLAY_MANAGER_ALIAS} -> {unit}"
    return unit, shown


def display_manager(context: CardContext, desktop: DesktopFacts) -> Iterator[Diagnostic]:
    """Report a display manager, which starts a greeter again when a session ends."""
    manager = _manager(desktop)
    is_shown = context.device.is_boot_display or any(_sessions(context, desktop))
    if manager is None or not is_shown or context.device.is_on_vfio:
        return
    unit, shown = manager
    yield finding(
        "console-display-manager",
        "info",
        f"{unit} starts a greeter on the card when a session ends",
        (
            shown,
            *dict.fromkeys(
                f"{user}: {user.node}" for user in context.users if _of_manager(user, desktop)
            ),
        ),
        "a process that is killed comes back (Restart=); the unit must be stopped, and after it "
        "the first VT may show no login",
        f"systemctl stop {unit}; systemctl start getty@tty1.service. After the guest: "
        f"systemctl start {unit}",
        subject=context.device,
    )


def audio(context: CardContext, desktop: DesktopFacts) -> Iterator[Diagnostic]:
    """Report programs that have the card's audio open, as the driver's unbind waits for them."""
    users = [user for user in context.users if user.node.startswith(_SOUND)]
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


def services(context: CardContext) -> Iterator[Diagnostic]:
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


def processes(context: CardContext, desktop: DesktopFacts) -> Iterator[Diagnostic]:
    """Report other processes that have the card open: they only release it by ending."""
    of_sessions = {p.pid for _, own in _sessions(context, desktop) for p in own}
    others = [
        user
        for user in context.users
        if user.pid not in of_sessions
        and user.command not in programs.NVIDIA_SERVICES
        and user.monitor is None
        and not user.node.startswith(_SOUND)
        and user.guest is None
        and not _of_manager(user, desktop)
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
    if keepers and not any(_sessions(context, desktop)):
        yield finding(
            "console-process",
            "warning",
            f"systemd keeps {context.device} open for a session",
            tuple(f"{user}: {user.node}" for user in keepers),
            "it closes the card when the session whose compositor asked for it ends",
            "find the session with loginctl, and end it: loginctl terminate-session ID",
            subject=context.device,
        )


def way_back(context: CardContext, desktop: DesktopFacts) -> Iterator[Diagnostic]:
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


def _is_only_screen(context: CardContext) -> bool:
    device = context.device
    return device.is_boot_display and not context.other_displays and not device.is_on_vfio


def mux(context: CardContext, desktop: DesktopFacts) -> Iterator[Diagnostic]:
    """Report a laptop whose panel is wired to the discrete GPU by a switch."""
    device, place = context.device, desktop.discrete_mux
    if place is None or context.host.is_integrated(device) or device.is_on_vfio:
        return
    yield finding(
        "console-mux",
        "blocker",
        f"the panel of this laptop is wired to {device}",
        (f"{place}: 0",),
        "while a guest has the card, the panel is black, and no driver of the host can change it",
        f"echo 1 > {place}, and reboot",
        subject=device,
    )


def compositors(context: CardContext, desktop: DesktopFacts) -> Iterator[Diagnostic]:
    """Report compositors that open a second card, which a reservation keeps them off."""
    device, host = context.device, context.host
    is_bound_early = device.is_on_vfio or host.files.binding(device.address) is not None
    if device.is_boot_display or is_bound_early or not _has_screen_driver(device):
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
    context: CardContext, desktop: DesktopFacts
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


def resets(context: CardContext, _facts: Readiness) -> Iterator[Diagnostic]:
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
_DESKTOP: Fact[CardContext, DesktopFacts] = Fact(
    lambda context: context.desktop, "the desktop", "not in the snapshot", decides=True
)
_READINESS: Fact[CardContext, Readiness] = Fact(
    lambda context: context.host.readiness, "reset reports of the card", "not in the snapshot"
)


def _unknown(context: CardContext) -> Iterator[str]:
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


CONSOLE_RULES: RuleSet[CardContext] = register(
    RuleSet(
        "a card of the desktop",
        rules=(
            rule(display, "console-display"),
            rule(refused, "console-bind-refused"),
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
    reports = [CONSOLE_RULES.run(CardContext(host, card)) for card in cards]
    return Report.of(
        (found for each in reports for found in each.findings),
        (text for each in reports for text in each.not_checked),
        (text for each in reports for text in each.unknown),
    )
