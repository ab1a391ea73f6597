"""The rules of `vfiomgr check console` about who uses a card, and how each user releases it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.desktop.card import (
    SOUND,
    DesktopCard,
    has_screen_driver,
    is_keeper,
    is_of_manager,
    running_manager,
)
from vfiomgr.desktop.plan import audio_units, release_of, services_of
from vfiomgr.desktop.steps import EndSession, systemctl
from vfiomgr.diagnostic import Diagnostic, diagnostics_of, finding, info, warning
from vfiomgr.errors import Refusal
from vfiomgr.listing import listed
from vfiomgr.passthrough.readiness_hints import bind_remedy
from vfiomgr.passthrough.reserve import Reserve, plan_reserve
from vfiomgr.persistence.reservation import reservation_file, reservations
from vfiomgr.users import desktop as programs

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.users.desktop import DesktopFacts, DesktopProcess, UserSession
    from vfiomgr.users.model import DeviceUser

_MOST = 5
"""Maximum number of processes that are named in one line."""


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
        yield warning(
            "console-session",
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
    ending = "; ".join(EndSession(session.id, session.user).commands())
    return f"{first}{ending}{then}"


def display_manager(context: DesktopCard, desktop: DesktopFacts) -> Iterator[Diagnostic]:
    """Report a display manager, which starts a greeter again when a session ends."""
    manager = running_manager(desktop)
    if release_of(context, end_sessions=False).is_announced:
        return
    if manager is None or not context.shows_greeter(desktop) or context.device.is_on_vfio:
        return
    unit, shown = manager
    yield info(
        "console-display-manager",
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
    remedies = [" ".join(stop) for uid in sorted(owners) if (stop := _stop_audio(desktop, uid))]
    names = listed(list(dict.fromkeys(map(str, users))), _MOST)
    yield warning(
        "console-audio",
        f"the audio of {context.device} is in use",
        (f"open nodes: {names}", ", ".join(sorted({user.node for user in users}))),
        "the driver's unbind waits until the last program closes it, and cannot be interrupted; "
        "services of a user end 10 seconds after the last session, with lingering never",
        "; ".join(remedies) or "end these programs",
        subject=context.device,
    )


def _stop_audio(desktop: DesktopFacts, uid: int) -> tuple[str, ...]:
    """The command that stops the audio services of a user, and the sockets that start them."""
    units = tuple(audio_units(desktop, uid))
    return (*systemctl("stop", units[0]), *(unit.name for unit in units[1:])) if units else ()


def services(context: DesktopCard) -> Iterator[Diagnostic]:
    """Report services of the system that keep the card open and can be started again."""
    found: dict[str, list[DeviceUser]] = {}
    for user, service in services_of(context):
        found.setdefault(service.name, []).append(user)
    for unit, users in found.items():
        yield warning(
            "console-service",
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
    keepers = list(filter(is_keeper, others))
    ending = dict.fromkeys(user for user in others if user not in keepers)
    if ending:
        yield warning(
            "console-process",
            f"other processes have {context.device} open",
            tuple(f"{user}: {user.node}" for user in ending),
            "a program that computes or renders on the card releases it only when it ends",
            f"let them finish, or end them: {_end(ending, desktop)}",
            subject=context.device,
        )
    if keepers and not any(context.sessions(desktop)):
        yield warning(
            "console-process",
            f"systemd keeps {context.device} open for a session",
            tuple(f"{user}: {user.node}" for user in keepers),
            "it closes the card when the session whose compositor asked for it ends",
            "find the session with loginctl, and end it: loginctl terminate-session ID",
            subject=context.device,
        )


def _end(users: Iterable[DeviceUser], desktop: DesktopFacts) -> str:
    """The commands that end processes; systemd may start that of a service again (Restart=)."""
    found: dict[str, dict[str, None]] = {"systemctl stop": {}, "kill": {}}
    system = {process.pid for process in desktop.processes if process.uid is None}
    for user in users:
        is_service = user.pid in system and (user.unit or "").endswith(".service")
        verb = "systemctl stop" if is_service else "kill"
        found[verb][str(user.unit if is_service else user.pid)] = None
    return "; ".join(" ".join((verb, *names)) for verb, names in found.items() if names)


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
        yield info(
            "console-second-card",
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
