"""A display and the programs of the desktop that use it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING

from vfiomgr.pci.model import CLASS_AUDIO, CLASS_DISPLAY, PciAddress, PciDevice
from vfiomgr.snapshot.model import HostSnapshot
from vfiomgr.users import desktop as programs
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.users.desktop import DesktopFacts, DesktopProcess, UserSession
    from vfiomgr.users.model import DeviceUser

SOUND = "/dev/snd/"


class DesktopCard(Value, dict=True):
    """A card, with its audio function, and its host."""

    host: HostSnapshot
    device: PciDevice
    leaving: tuple[PciAddress, ...] = ()
    """The addresses of the functions that go to guests together with it."""

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
        return frozenset(u.pid for u in self.users if not u.node.startswith(SOUND))

    @cached_property
    def other_displays(self) -> tuple[PciDevice, ...]:
        """The other cards that stay with the host, and can show its console."""
        return tuple(
            d
            for d in self.host.devices
            if d.class_code.startswith(CLASS_DISPLAY)
            and d.address.slot != self.device.address.slot
            and d.physical_function is None
            and not d.is_on_vfio
            and d.address not in self.leaving
        )

    def has_text_console(self, desktop: DesktopFacts) -> bool:
        """Whether the text console, which takes the first frame buffer, is on the card."""
        own = [f for f in desktop.framebuffers if f.device == str(self.device.address)]
        is_bound = any(c.is_bound and programs.FBCON in c.driver for c in desktop.consoles)
        return is_bound and bool(own) and own[0] == desktop.framebuffers[0]

    def sessions(
        self, desktop: DesktopFacts
    ) -> Iterator[tuple[UserSession, tuple[DesktopProcess, ...]]]:
        """The graphical sessions that use the card, with the processes that have it open.

        If the processes are unknown, each session at the seat of the console may use its card. An
        X server that the display manager runs has the card open for the sessions of that type.
        """
        is_unknown = self.host.users.processes is None and self.device.is_boot_display
        is_served = any(is_of_manager(user, desktop) for user in self.users)
        for session in filter(lambda one: one.is_graphical, desktop.sessions if self.nodes else ()):
            own = tuple(
                process
                for process in desktop.processes
                if process.pid in self.holders and desktop.session_of(process) == session
            )
            may = (is_unknown and session.seat == "seat0") or (is_served and session.type == "x11")
            if own or may or self.nodes.intersection(session.nodes):
                yield session, own

    def shows_greeter(self, desktop: DesktopFacts) -> bool:
        """Whether a display manager would open the card again."""
        return self.device.is_boot_display or any(self.sessions(desktop))


def is_of_desktop(host: HostSnapshot, functions: Iterable[PciDevice]) -> bool:
    """Whether programs of the desktop use a display among functions, and nothing else uses them."""
    functions = tuple(functions)
    users = [user for device in functions for user in host.holders(device)]
    return (
        any(map(is_display, functions))
        and bool(users)
        and all(user.command in programs.KNOWN or is_keeper(user) for user in users)
    )


def is_keeper(user: DeviceUser) -> bool:
    """Whether systemd keeps a card open for a session, until that ends."""
    return user.pid == 1 or user.unit == "systemd-logind.service"


def has_screen_driver(device: PciDevice) -> bool:
    """Whether its driver can show a picture."""
    return any(node.startswith("/dev/dri/card") for node in device.nodes)


def is_of_manager(user: DeviceUser, desktop: DesktopFacts) -> bool:
    """Whether the display manager runs a process, e.g. its X server, outside of any session."""
    return user.unit is not None and user.unit == desktop.display_manager


def running_manager(desktop: DesktopFacts) -> tuple[str, str] | None:
    """The unit of the display manager and what shows it; also if no process can be read."""
    running = (p for p in desktop.named(programs.DISPLAY_MANAGERS) if p.uid is None)
    process, unit = next(running, None), desktop.display_manager
    if unit is None or (process is None and desktop.knows_programs):
        return None
    shown = f"{process}, {unit}" if process else f"{programs.DISPLAY_MANAGER_ALIAS} -> {unit}"
    return unit, shown


def is_display(device: PciDevice) -> bool:
    """Whether it is a display that the host can use itself."""
    return device.class_code.startswith(CLASS_DISPLAY) and device.physical_function is None
