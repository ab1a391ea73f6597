"""How the desktop releases cards, and what restores it: parts of the plans to bind and unbind.

Only what is known to release a card by itself, and to come back, is stopped. All other users of a
card stay in the facts, so that the safety checks of `bind` refuse it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.desktop.card import (
    SOUND,
    DesktopCard,
    has_screen_driver,
    is_display,
    is_keeper,
    is_of_manager,
    running_manager,
)
from vfiomgr.desktop.steps import (
    AnnounceCard,
    AwaitClosed,
    EndSession,
    RecordRelease,
    SetConsole,
    SetModules,
    SetUnit,
)
from vfiomgr.diagnostic import READ_IT, Diagnostic, allow, blocker
from vfiomgr.engine.plan import Step, distinct
from vfiomgr.users import desktop as programs
from vfiomgr.users.desktop import DesktopFacts, DesktopProcess, UserSession
from vfiomgr.users.laptop import UNREAD_HINT, LaptopFacts
from vfiomgr.users.released import ReleasedCard, ServiceUnit
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.pci.model import PciAddress, PciDevice
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.users.model import DeviceUser

LOCK = "desktop"
"""The lock of what all displays share: the display manager, sessions, the text console."""
_NVIDIA, _NVIDIA_DRM = "nvidia", "nvidia_drm"
_SHARED = frozenset({"/dev/nvidiactl", "/dev/nvidia-modeset", "/dev/nvidia-uvm"})
"""Nodes of all of NVIDIA's GPUs: programs on another GPU keep them open, too."""
_CLOSING = (*programs.KWIN, *programs.WLROOTS, *programs.NIRI)
"""Compositors that close a card, unless it is their primary one, when its removal is announced
(drm_backend.cpp of KWin; backend/session/session.c of wlroots; device_removed in tty.rs of niri).
Not Xorg: 21.1 closed a card, opened it again, and ended when it closed it once more."""


class Release(Value):
    """How one card is released."""

    card: DesktopCard
    users: frozenset[int] = frozenset()
    """The processes that release it."""
    units: tuple[ServiceUnit, ...] = ()
    """Units that are stopped, in order, and started again."""
    ended: tuple[ServiceUnit, ...] = ()
    """Units of users that are stopped with their sessions, and not started again."""
    sessions: tuple[UserSession, ...] = ()
    is_announced: bool = False
    """Whether its removal is announced to a compositor, which then closes it and goes on."""
    modules: tuple[str, ...] = ()
    """Modules to unload, in the order in which they are loaded."""
    has_console: bool = False

    @property
    def needs_users_to_go(self) -> bool:
        """Whether something is stopped or ended."""
        return bool(self.units or self.ended or self.sessions or self.is_announced)


def cards_of(host: HostSnapshot, functions: Iterable[PciDevice]) -> list[DesktopCard]:
    """The displays among functions that are on host drivers or without a driver."""
    functions = tuple(functions)
    leaving = tuple(d.address for d in functions)
    cards = (d for d in functions if is_display(d) and not d.is_on_vfio)
    return [DesktopCard(host, d, leaving) for d in cards]


def release_of(card: DesktopCard, *, end_sessions: bool) -> Release:
    """How a card is released."""
    desktop = card.desktop
    assert desktop is not None  # noqa: S101 - unknown facts are refused before
    found = services_of(card)
    release = Release(
        card,
        frozenset(user.pid for user, _ in found),
        distinct(unit for _, unit in found),
        has_console=card.has_text_console(desktop),
        modules=_modules(card, desktop),
    )
    sessions = list(card.sessions(desktop))
    if sessions and not end_sessions and _can_be_closed(card, desktop):
        closing = {user.pid for user in card.users if user.command in _CLOSING}
        keeping = {user.pid for user in card.users if is_keeper(user)}
        release = _with_users(release, closing | keeping)
        release = replace(release, is_announced=bool(closing | keeping))
    elif sessions or _is_served(card, desktop):
        release = _with_sessions(release, desktop, sessions)
    return _with_audio(release, desktop)


def services_of(card: DesktopCard) -> list[tuple[DeviceUser, ServiceUnit]]:
    """The users that are services of the system known to be restartable, with their units."""
    found = []
    for user in card.users:
        unit = programs.NVIDIA_SERVICES.get(user.command)
        if user.monitor == "services":
            unit = user.unit
        if unit:
            found.append((user, ServiceUnit(unit)))
    return found


def _with_users(release: Release, pids: Iterable[int]) -> Release:
    return replace(release, users=release.users.union(pids))


def _is_served(card: DesktopCard, desktop: DesktopFacts) -> bool:
    """Whether the display manager has the card open without a session, or would open it."""
    manager = running_manager(desktop)
    is_open = any(is_of_manager(user, desktop) for user in card.users)
    return manager is not None and (is_open or card.shows_greeter(desktop))


def _can_be_closed(card: DesktopCard, desktop: DesktopFacts) -> bool:
    """Whether all that has the display open are compositors that close a secondary card.

    Their primary card is that of the firmware. A screen that they show does not make it primary.
    """
    others = (d for d in card.other_displays if d.is_primary_display)
    if card.device.is_primary_display or not any(map(has_screen_driver, others)):
        return False
    return not any(is_of_manager(user, desktop) for user in card.users) and all(
        user.command in _CLOSING or is_keeper(user)
        for user in card.users
        if not user.node.startswith(SOUND) and user.command not in programs.NVIDIA_SERVICES
    )


def _with_sessions(
    release: Release,
    desktop: DesktopFacts,
    sessions: Sequence[tuple[UserSession, tuple[DesktopProcess, ...]]],
) -> Release:
    """Add the display manager, which would start a greeter, and the sessions."""
    units: list[ServiceUnit] = []
    manager = running_manager(desktop)
    if manager is not None:
        units.append(ServiceUnit(manager[0]))
    ended: list[ServiceUnit] = []
    pids: set[int] = set()
    for session, own in sessions:
        if session.service in ("login", "") and session.vt:
            units.append(ServiceUnit(f"getty@tty{session.vt}.service"))
        for process in own:
            is_program = process.command in programs.COMPOSITORS
            if process.session is None and is_program and process.unit:
                ended.append(ServiceUnit(process.unit, process.uid))
            if process.session is not None or is_program or not _stays(desktop, session):
                pids.add(process.pid)
    pids.update(u.pid for u in release.card.users if is_of_manager(u, desktop))
    pids.update(u.pid for u in release.card.users if is_keeper(u) and sessions)
    return replace(
        _with_users(release, pids),
        units=distinct((*units, *release.units)),
        ended=distinct(ended),
        sessions=tuple(session for session, _ in sessions),
    )


def _stays(desktop: DesktopFacts, session: UserSession) -> bool:
    """Whether the services of a user go on after the session: they linger, or have another one."""
    others = (one for one in desktop.sessions if one.uid == session.uid and one != session)
    own = (session.user, str(session.uid))
    return any(name in own for name in desktop.lingering) or any(
        one.state != "closing" and not one.is_graphical for one in others
    )


def _with_audio(release: Release, desktop: DesktopFacts) -> Release:
    """Add the audio services of users, which keep the driver's unbind waiting."""
    by_pid = {process.pid: process for process in desktop.processes}
    units: list[ServiceUnit] = []
    pids: set[int] = set()
    for user in release.card.users:
        process = by_pid.get(user.pid)
        if not user.node.startswith(SOUND) or process is None or process.uid is None:
            continue
        if process.command in programs.AUDIO:
            pids.add(user.pid)
            units += audio_units(desktop, process.uid)
    return replace(_with_users(release, pids), units=distinct((*release.units, *units)))


def audio_units(desktop: DesktopFacts, uid: int) -> Iterator[ServiceUnit]:
    """The audio services of a user, after the sockets that would start them again."""
    services = [
        process.unit
        for process in desktop.named(programs.AUDIO)
        if process.uid == uid and process.unit and process.session is None
    ]
    sockets = [unit.replace(".service", ".socket") for unit in services]
    for name in (*(s for s in sockets if s in desktop.user_sockets), *services):
        yield ServiceUnit(name, uid)


def _has_other_screen(card: DesktopCard) -> bool:
    """Whether another display can show the console."""
    return any(map(has_screen_driver, card.other_displays))


def _modules(card: DesktopCard, desktop: DesktopFacts) -> tuple[str, ...]:
    """NVIDIA's modules, if its DRM module keeps the card open and no other card needs them.

    nvidia_drm and nvidia_modeset use a card without an open file, and the unbind of nvidia waits in
    a loop for them (nv_pci_remove in kernel-open/nvidia/nv-pci.c); unloading a module that is in
    use fails at once instead.
    """
    modules = desktop.nvidia_modules
    return modules if _has_nvidia_alone(card) and _NVIDIA_DRM in modules else ()


def _has_nvidia_alone(card: DesktopCard) -> bool:
    """Whether NVIDIA's driver has this card and no other one."""
    slots = {d.address.slot for d in card.host.devices if d.driver == _NVIDIA}
    return slots == {card.device.address.slot}


# ---- plans


def refusals(card: DesktopCard) -> Iterator[Diagnostic]:
    """Why a card cannot be released at all."""
    desktop, device = card.desktop, card.device
    if desktop is None:
        yield blocker(
            "release-unknown",
            device,
            f"cannot determine which part of the desktop uses {device}",
            READ_IT,
        )
        return
    for text in desktop.unread:
        yield blocker(
            "release-unknown",
            device,
            f"cannot determine which part of the desktop uses {device}: {text}",
            "run the command as root of the host; in a container, with its /proc, /run and /sys",
        )
    if device.framebuffers and not has_screen_driver(device):
        names = ", ".join(device.framebuffers)
        yield blocker(
            "release-not-restored",
            device,
            f"{device} only shows the firmware's framebuffer ({names}), which does not come back "
            "before the next boot",
            "load the native driver of the card first",
            allow("boot-display", before="to bind it without its screen, leave out --release and "),
        )
    yield from _panel(card, desktop.laptop)


def _panel(card: DesktopCard, laptop: LaptopFacts) -> Iterator[Diagnostic]:
    """Refuse the discrete GPU of a laptop if the panel is wired to it, or may be."""
    device, mux = card.device, laptop.mux
    if card.host.is_integrated(device):
        return
    for path in laptop.unread:
        yield blocker(
            "release-unknown",
            device,
            f"cannot determine whether the panel of this laptop is wired to {device}: "
            f"cannot read {path}",
            UNREAD_HINT,
        )
    if mux is not None and mux.value is False:
        yield blocker(
            "release-mux",
            device,
            f"the panel of this laptop is wired to {device}, so it stays black ({mux.path}: 0)",
            "vfiomgr laptop hybrid, and reboot",
        )


def without_released(host: HostSnapshot, releases: Sequence[Release]) -> HostSnapshot:
    """The host as it is after the release of cards, for the safety checks of `bind`.

    The console's card counts as free: its console is part of what is released.
    """
    pids = {pid for one in releases for pid in one.users}
    shown = {one.card.device.address for one in releases}
    stopped = {unit.name for one in releases for unit in one.units}
    is_persistent = programs.NVIDIA_SERVICES["nvidia-persiste"] not in stopped
    users = replace(
        host.users,
        processes=None
        if host.users.processes is None
        else tuple(user for user in host.users.processes if user.pid not in pids),
        host_uses=None
        if host.users.host_uses is None
        else tuple(
            use
            for use in host.users.host_uses
            if is_persistent or use.kind != "persistence-mode" or use.address not in shown
        ),
    )
    devices = tuple(
        replace(d, is_boot_display=False) if d.address in shown else d for d in host.devices
    )
    return replace(host, users=users, devices=devices)


def release_steps(release: Release) -> Iterator[Step]:
    """The steps that make all users of a card go, if there are any."""
    if not release.needs_users_to_go:
        return
    card = release.card
    yield _recorded(release)
    shared = () if _has_nvidia_alone(card) else _SHARED
    nodes = tuple(sorted(node for node in card.nodes if node not in shared))
    for unit in release.units:
        if unit.uid is None:
            yield SetUnit(unit, before=True, after=False)
    yield from (EndSession(one.id, one.user) for one in release.sessions)
    for unit in (*release.ended, *(u for u in release.units if u.uid is not None)):
        yield SetUnit(unit, before=True, after=False)
    hint = "end it, and run the command again"
    if release.is_announced:
        yield AnnounceCard(card.device.identity, "add", "remove")
        hint = f"end its session: vfiomgr bind --release --end-sessions {card.device.address}"
    yield AwaitClosed(card.device.identity, nodes, hint)


def _recorded(release: Release) -> RecordRelease:
    """The record of a release: what is started as soon as the card is bound, or when it returns.

    If another display remains, nobody waits for the card.
    """
    card = release.card
    before = record_of(card.host, card.device.address)
    first = before or ReleasedCard(card.device.identity)
    remains = _has_other_screen(card)
    monitoring = tuple(u for u in release.units if u.name in programs.NVIDIA_SERVICES.values())
    waiting = tuple(u for u in release.units if not remains or u in monitoring)
    after = replace(
        first,
        stopped=distinct((*first.stopped, *waiting)),
        paused=distinct((*first.paused, *(u for u in release.units if u not in waiting))),
        had_console=first.had_console or release.has_console,
        modules=first.modules or release.modules,
    )
    return RecordRelease(card.device.identity, before, after)


def detaching_steps(release: Release) -> Iterator[Step]:
    """The steps that take the text console and the modules from a card without other users."""
    card = release.card
    if not (release.has_console or release.modules):
        return
    step = _recorded(release)
    if step.before != step.after:
        yield step
    if release.has_console:
        yield SetConsole(card.device.identity, before=True, after=False)
    if release.modules:
        on_driver = (d for d in card.host.devices if d.driver == _NVIDIA)
        functions = tuple(d.identity for d in on_driver)
        yield SetModules(card.device.identity, release.modules, (), _NVIDIA, functions)


def resuming_steps(
    host: HostSnapshot, functions: Iterable[PciDevice], planned: Iterable[Step] = ()
) -> Iterator[Step]:
    """The steps after a bind: start what was stopped if another display remains.

    `planned` are the steps before it, which may change the records.
    """
    records = {s.device.address: s.after for s in planned if isinstance(s, RecordRelease)}
    functions = tuple(functions)
    leaving = tuple(d.address for d in functions)
    for device in functions:
        record = records.get(device.address) or record_of(host, device.address)
        if record is None:
            continue
        stopped = distinct((*record.stopped, *record.paused))  # in case that the start did not last
        left = replace(record, paused=(), stopped=stopped)
        if record.had_console and _has_other_screen(DesktopCard(host, device, leaving)):
            yield SetConsole(record.device, before=False, after=True, is_tolerant=True)
            left = replace(left, had_console=False)
        yield from (SetUnit(u, before=False, after=True) for u in reversed(record.paused))
        if left != record:
            yield RecordRelease(record.device, record, left)


def lock_for(steps: Sequence[Step]) -> tuple[str, ...]:
    """The lock that these steps need, if there are any: they change what all displays share."""
    return (LOCK,) if steps else ()


def returning_steps(host: HostSnapshot, functions: Iterable[PciDevice]) -> Iterator[Step]:
    """The steps after an unbind: restore the screen, then all that was stopped."""
    for device in functions:
        record = record_of(host, device.address)
        if record is None:
            continue
        if record.modules:
            yield SetModules(record.device, (), record.modules, _NVIDIA, (), is_tolerant=True)
        if record.had_console:
            yield SetConsole(record.device, before=False, after=True, is_tolerant=True)
        for unit in reversed((*record.stopped, *record.paused)):
            yield SetUnit(unit, before=False, after=True, is_tolerant=True)
        yield RecordRelease(record.device, record, None)


def record_of(host: HostSnapshot, address: PciAddress) -> ReleasedCard | None:
    """The record of a card; None if the record at its address is of another device."""
    device = host.device_named(str(address))
    for record in host.released:
        if device is not None and record.device == device.identity:
            return record
    return None


def notes(release: Release) -> Iterator[str]:
    """What a person should know before a card is released."""
    card = release.card
    for session in release.sessions:
        kind = ", ".join(filter(None, (session.type, session.seat)))
        yield f"ends session {session.id} of {session.user} ({kind}); unsaved work is lost"
    if release.is_announced:
        yield f"compositors close {card.device.address} and go on; no session ends"
    address = str(card.device.address)
    if card.desktop is not None and address in card.desktop.laptop.panels:
        yield f"the built-in panel of this laptop is black until: vfiomgr unbind {address}"
    if card.device.is_boot_display and not card.other_displays:
        yield f"this host has no screen until: vfiomgr unbind {address}"
        if card.desktop is not None and card.desktop.has_ssh is False:
            yield "no SSH server is running: start one first, or use the libvirt hook"
