"""A desktop that acts: systemd and logind start, stop and end what uses the cards.

As on a real host, the driver's unbind waits as long as a program has a node of the card open.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from tests.fakes.programs import Said

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tests.fakes.desktop import Desktop
    from tests.fakes.drivers import Driver
    from vfiomgr.paths import HostPath

_UEVENT = re.compile(r".*/drm/(card\d+|renderD\d+)/uevent")
_CONSOLE = re.compile(r"/sys/class/vtconsole/vtcon1/bind")
_SCOPE = re.compile(r"session-(\w+)\.scope")
_SCREEN = "0000:01:00.0"
_CLOSING = ("kwin_wayland", "sway", "labwc", "cage", "niri")


class LiveDesktop:
    """The programs systemctl, loginctl and rmmod of a desktop, and its kernel's console.

    | fact | source |
    |---|---|
    | a stop of the display manager leaves the user's session | logind-session.c |
    | terminate-session does nothing for one that closes | session_stop in logind-session.c |
    | terminate-session ends the scope, and user@ when no session is left | logind-user.c |
    | with the last frame buffer its console vanishes, a new one is bound | fbcon.c |
    | KWin and wlroots close a secondary card whose removal is announced | drm_backend.cpp |
    """

    def __init__(self, desktop: Desktop) -> None:
        self.desktop = desktop
        self.kernel = kernel = desktop.kernel
        self._sysfs = kernel.sysfs
        self.log: list[str] = []
        """What was started, stopped and ended, in order."""
        self.broken: set[str] = set()
        """Units that do not start or stop."""
        self.deaf: set[str] = set()
        """Programs that do not close a card when its removal is announced."""
        self.limited: set[str] = set()
        """Units that failed too often to be started."""
        self.closing: set[str] = set()
        """Sessions that leave programs when the display manager closes them."""
        self.lingering: set[str] = set()
        """Users whose services go on after their last session."""
        self.immortal: set[int] = set()
        """Processes that do not end with their session or unit."""
        self.late: dict[int, int] = {}
        """How many looks at /proc later a process ends that should have ended."""
        self.console_vanishes = False
        """Whether the console's directory goes as soon as it is detached."""
        self.started_with_screen: dict[str, bool] = {}
        """Whether the text console was on the card when a unit started."""
        self.is_on_all_cards = False
        """Whether the console has a frame buffer on another card too."""
        self.had_console = self._sysfs.exists("/sys/class/vtconsole/vtcon1")
        self._ending: set[int] = set()
        self._units: dict[str, list[tuple[int, str, str, tuple[str, ...]]]] = {}
        for pid in self._pids():
            cgroup = self._sysfs.get(f"/proc/{pid}/cgroup").strip().partition("::")[2]
            command = self._sysfs.get(f"/proc/{pid}/comm").strip()
            unit = cgroup.rpartition("/")[2]
            self._units.setdefault(unit, []).append((pid, command, cgroup, self._open(pid)))
        for uid in self._uids():
            self._sysfs.put(f"/run/systemd/users/{uid}", "STATE=active")
        for name, program in (
            ("systemctl", _Systemctl(self)),
            ("loginctl", _Loginctl(self)),
            ("rmmod", _Rmmod(self)),
        ):
            kernel.programs.install(f"/usr/bin/{name}")
            kernel.programs.known[f"/usr/bin/{name}"] = program
        kernel.drivers.obstacles.append(self._held)
        kernel.drivers.when_bound.append(self._bound)
        kernel.drivers.when_leaving.append(self._leaving)
        kernel._reactions.others += [(_UEVENT, self._announced), (_CONSOLE, self._detached)]
        kernel.lookers.append(self._look)

    # ---- what is there

    def _pids(self) -> list[int]:
        return sorted(int(name) for name in self._sysfs.names("/proc") if name.isdecimal())

    def _open(self, pid: int) -> tuple[str, ...]:
        links = (f"/proc/{pid}/fd/{name}" for name in self._sysfs.names(f"/proc/{pid}/fd"))
        return tuple(os.readlink(self._sysfs.real(link)) for link in links)

    def _uids(self) -> set[str]:
        found = re.findall(r"/user-(\d+)\.slice", " ".join(self._cgroups()))
        return set(found)

    def _cgroups(self) -> Iterator[str]:
        for pid in self._pids():
            yield self._sysfs.get(f"/proc/{pid}/cgroup")

    def is_active(self, unit: str) -> bool:
        """Whether a unit has a process."""
        return any(cgroup.strip().endswith(f"/{unit}") for cgroup in self._cgroups())

    # ---- what happens

    def stop(self, unit: str) -> None:
        """End the processes of a unit."""
        if self.is_active(unit):
            self.log.append(f"stop {unit}")
        self._end(lambda cgroup: cgroup.endswith(f"/{unit}"))

    def start(self, unit: str) -> None:
        """Start the processes of a unit again; a display manager has a greeter on each card."""
        if self.is_active(unit):
            return
        self.log.append(f"start {unit}")
        self.started_with_screen[unit] = self.has_screen()
        for pid, command, cgroup, nodes in self._units.get(unit, [(990, unit, f"/{unit}", ())]):
            there = [node for node in nodes if self._sysfs.exists(node)]
            self.desktop.process(pid, command, cgroup, *there)

    def end_session(self, name: str) -> None:
        """End a session, and the user's services if it was the last one."""
        self.log.append(f"end session {name}")
        place = f"/run/systemd/sessions/{name}"
        uid = re.findall(r"(?m)^UID=(\d+)", self._sysfs.get(place))[0]
        self._sysfs.drop(place)
        self._end(lambda cgroup: cgroup.endswith(f"/session-{name}.scope"))
        if uid not in self.lingering:
            self._end(lambda cgroup: f"/user-{uid}.slice/" in cgroup)
            self._sysfs.drop(f"/run/systemd/users/{uid}")

    def stop_scope(self, name: str) -> Said:
        """Stop the scope of a session; there is none after its session."""
        if not self._sysfs.exists(f"/run/systemd/sessions/{name}"):
            return Said(code=5, error=f"Unit session-{name}.scope not loaded.")
        self.end_session(name)
        return Said()

    def _end(self, of: Callable[[str], bool]) -> None:
        for pid in self._pids():
            if pid in self.immortal or not of(self._sysfs.get(f"/proc/{pid}/cgroup").strip()):
                continue
            if not self.late.get(pid):
                self._sysfs.drop(f"/proc/{pid}")
            self._ending.add(pid)

    def _look(self, path: HostPath) -> None:
        """Somebody lists /proc: who ends late has less time left."""
        for pid in self._ending.intersection(self.late) if path == "/proc" else ():
            self.late[pid] = max(0, self.late[pid] - 1)
            if not self.late[pid]:
                self._sysfs.drop(f"/proc/{pid}")

    def _detached(self, _match: re.Match[str], text: str) -> None:
        place = "/sys/class/vtconsole/vtcon1"
        self._sysfs.put(f"{place}/bind", text.strip())
        if self.console_vanishes and text.strip() == "0":
            self._sysfs.drop(place)

    def _announced(self, match: re.Match[str], text: str) -> None:
        node = f"/dev/dri/{match[1]}"
        self.log.append(f"{text.strip()} {match[1]}")
        for pid in self._pids():
            command = self._sysfs.get(f"/proc/{pid}/comm").strip()
            if command not in _CLOSING or command in self.deaf or text.strip() != "remove":
                continue
            place = f"/proc/{pid}/fd"
            names = self._sysfs.names(place)
            for name, opened in zip(names, self._open(pid), strict=True):
                if opened == node:
                    self._sysfs.drop(f"{place}/{name}")

    def _held(self, driver: Driver, address: str) -> str | None:
        if driver.is_vfio:
            return None
        given = self.kernel.functions.known[address].gives
        nodes = {below.rsplit("/", 1)[-1] for _, below in given}
        for pid in self._pids():
            for opened in self._open(pid):
                if opened.rsplit("/", 1)[-1] in nodes:
                    return f"process {pid} has {opened} open"
        return None

    def _leaving(self, driver: Driver, address: str) -> None:
        if address == _SCREEN and not driver.is_vfio and self.had_console:
            self._sysfs.drop("/sys/class/graphics/fb0")
            if not self.is_on_all_cards:
                self._sysfs.drop("/sys/class/vtconsole/vtcon1")

    def _bound(self, driver: Driver, address: str) -> None:
        if address == _SCREEN and not driver.is_vfio and self.had_console:
            stays = self._sysfs.exists("/sys/class/vtconsole/vtcon1")
            self.desktop.text_console(bound=not stays or self.has_screen())

    def has_screen(self) -> bool:
        """Whether the text console is on the first card."""
        place = "/sys/class/vtconsole/vtcon1/bind"
        return self._sysfs.exists(place) and self._sysfs.get(place) == "1"


class _Systemctl:
    def __init__(self, live: LiveDesktop) -> None:
        self._live = live

    def changes(self, arguments: Sequence[str]) -> bool:
        """Whether it does more than tell."""
        return "is-active" not in arguments

    def run(self, arguments: Sequence[str]) -> Said:
        """Do it."""
        verb, unit = (each for each in arguments if not each.startswith("--"))
        scope = _SCOPE.fullmatch(unit)
        if scope:
            return self._live.stop_scope(scope[1])
        if verb == "reset-failed":
            self._live.limited.discard(unit)
            return Said()
        if verb == "start" and unit in self._live.limited:
            return Said(code=1, error="Start request repeated too quickly.")
        if verb == "is-active":
            is_active = self._live.is_active(unit)
            return Said(code=0 if is_active else 3, output="active" if is_active else "inactive")
        if unit in self._live.broken:
            return Said(code=1, error=f"Job for {unit} failed.")
        (self._live.start if verb == "start" else self._live.stop)(unit)
        return Said()


class _Loginctl:
    def __init__(self, live: LiveDesktop) -> None:
        self._live = live

    def changes(self, _arguments: Sequence[str]) -> bool:
        """Whether it does more than tell."""
        return True

    def run(self, arguments: Sequence[str]) -> Said:
        """End the session."""
        verb, name = arguments
        assert verb == "terminate-session"
        if name not in self._live.closing:
            self._live.end_session(name)
        return Said()


class _Rmmod:
    """rmmod, which fails while another module needs one (free_module in kernel/module/main.c)."""

    def __init__(self, live: LiveDesktop) -> None:
        self._live = live

    def changes(self, _arguments: Sequence[str]) -> bool:
        """Whether it does more than tell."""
        return True

    def run(self, arguments: Sequence[str]) -> Said:
        """Unload a module; its driver leaves all functions."""
        (name,) = arguments
        live, sysfs = self._live, self._live.kernel.sysfs
        if sysfs.names(f"/sys/module/{name}/holders"):
            return Said(code=1, error=f"rmmod: ERROR: Module {name} is in use")
        live.log.append(f"unload {name}")
        live.kernel.drivers.unload(name)
        return Said()
