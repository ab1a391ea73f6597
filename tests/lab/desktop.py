"""The desktop of a guest: greetd as its display manager, with an X server or KWin.

The X server draws by itself on the cards that the kernel's modesetting drivers show; it is the
greeter of a session of logind, which opens the cards for it. KWin is the first session of a user.
Both are fetched on the machine and not installed there, where the package of greetd would become
the display manager.
"""

from __future__ import annotations

import os
import subprocess
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from tests.debian import unpacked
from tests.lab.systemd import UNITS, start_manager, systemctl

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.lab.topology import Topology

PROGRAM_VARIABLE = "VFIOMGR_LAB_GREETD"
KWIN_VARIABLE = "VFIOMGR_LAB_KWIN"
MANAGER = "display-manager.service"
_ALIAS = Path("/etc/systemd/system", MANAGER)
_RELEASE = "bookworm"
_UNIT = "greetd.service"
DRIVER = Path("/sys/bus/pci/drivers/bochs-drm")
_DEVICES = Path("/sys/bus/pci/devices")
_CONSOLES = Path("/sys/class/vtconsole")
_FBCON = "frame buffer device"
XORG, KWIN = "Xorg", "kwin_wayland"
_SECONDS = 300.0
"""Seconds for what a desktop under emulation does by itself."""
_POLL = 0.2
_MASKED = ("dbus.service", "dbus.socket", "systemd-logind.service")
_RUN = Path("/run/lab/greetd")
_KWIN = Path("/run/lab/kwin")
_HAS_RUN = Path("/run/greetd.run")
"""Keeps greetd from starting the first session once more (`runfile` in greetd(5))."""
_INITIAL = """\
[initial_session]
command = "{}"
user = "greeter"
"""
_FILES = {
    Path("/etc/pam.d/greetd"): """\
auth required pam_permit.so
account required pam_permit.so
session required pam_systemd.so
""",
    _RUN / "config.toml": f"""\
[terminal]
vt = 7
[default_session]
command = "{_RUN}/greeter"
user = "greeter"
""",
    _RUN / "greeter": """\
#!/bin/sh
exec Xorg :0 vt7 -keeptty -noreset -nolisten tcp -logfile /tmp/Xorg.log >/tmp/Xorg.out 2>&1
""",
    _RUN / KWIN: f"""\
#!/bin/sh
libraries={_KWIN}/usr/lib/x86_64-linux-gnu
export LD_LIBRARY_PATH=$libraries QT_PLUGIN_PATH=$libraries/qt5/plugins
export QML2_IMPORT_PATH=$libraries/qt5/qml XDG_DATA_DIRS={_KWIN}/usr/share:/usr/share
export KWIN_COMPOSE=Q QT_LOGGING_RULES="kwin_wayland_drm=true"
exec {_KWIN}/usr/bin/{KWIN} --drm --no-lockscreen --no-global-shortcuts >/tmp/kwin.out 2>&1
""",
}
_SERVICE = """\
[Unit]
Description=Greeter
StartLimitIntervalSec=0
[Service]
ExecStart={program} --config {directory}/config.toml
IgnoreSIGPIPE=no
SendSIGHUP=yes
TimeoutStopSec=30s
KeyringMode=shared
Restart=always
RestartSec=1
"""
"""As in Debian's package; without its limit of starts, which many rounds in a row exceed."""


def provide() -> Path:
    """Return greetd on the machine, fetched first if it is not in the cache."""
    return unpacked(_RELEASE, "greetd") / "usr/sbin/greetd"


def provide_kwin() -> Path:
    """Return KWin with all that it needs, on the machine, fetched likewise."""
    return unpacked(_RELEASE, "kwin-wayland")


def start_logind() -> None:
    """Start logind, under systemd."""
    start_manager()
    for name in _MASKED:
        (UNITS / name).unlink(missing_ok=True)
    systemctl("daemon-reload")
    systemctl("start", "dbus.socket", "systemd-logind.service")


def start(*, has_kwin: bool = False) -> None:
    """Start logind and the display manager, whose first session is KWin's if it has one."""
    start_logind()
    for path, text in _FILES.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    if has_kwin:
        _KWIN.mkdir(exist_ok=True)
        mount = ("mount", "--bind", os.environ[KWIN_VARIABLE], str(_KWIN))
        subprocess.run(mount, check=True)
        _HAS_RUN.unlink(missing_ok=True)
        with (_RUN / "config.toml").open("a") as file:
            file.write(_INITIAL.format(_RUN / KWIN))
    if "\ngreeter:" not in Path("/etc/passwd").read_text():
        subprocess.run(("useradd", "--system", "--create-home", "greeter"), check=True)
    unit = _SERVICE.format(program=os.environ[PROGRAM_VARIABLE], directory=_RUN)
    (UNITS / _UNIT).write_text(unit)
    _ALIAS.unlink(missing_ok=True)
    _ALIAS.symlink_to(UNITS / _UNIT)
    systemctl("daemon-reload")
    systemctl("start", MANAGER)


def stop() -> None:
    """Stop the display manager; what it has shown ends with it."""
    systemctl("stop", _UNIT)
    _ALIAS.unlink()
    (UNITS / _UNIT).unlink()
    systemctl("daemon-reload")


def until(condition: Callable[[], bool]) -> float:
    """Wait for a condition, and return the seconds that it took."""
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() < begun + _SECONDS
        time.sleep(_POLL)
    return time.monotonic() - begun


class Screen:
    """The console's display, and what shows on it."""

    def __init__(self, address: str) -> None:
        self.address = address

    @property
    def driver(self) -> str:
        """Its driver."""
        return (_DEVICES / self.address / "driver").resolve().name

    @property
    def has_console(self) -> bool:
        """Whether a driver of the text console is bound to a frame buffer."""
        return any(
            (place / "bind").read_text() == "1\n"
            for place in _CONSOLES.iterdir()
            if _FBCON in (place / "name").read_text()
        )

    @property
    def is_shown(self) -> bool:
        """Whether the X server has the card open."""
        return bool(self.users(XORG))

    def users(self, program: str) -> list[int]:
        """The processes of a program that have the card open."""
        cards = {f"/dev/dri/{path.name}" for path in _DEVICES.glob(f"{self.address}/drm/card*")}
        return [pid for pid in _processes(program) if cards & _opened(pid)]

    @property
    def is_back(self) -> bool:
        """Whether all of it is as at first."""
        is_driven = self.driver == DRIVER.name and self.has_console
        return is_driven and self.is_shown and self.manager == "active"

    @property
    def manager(self) -> str:
        """The state of the display manager."""
        return systemctl("is-active", MANAGER, must_work=False)

    def __str__(self) -> str:
        """What is there, for a person."""
        console, shown = (("without", "with")[it] for it in (self.has_console, self.is_shown))
        return (
            f"driver {self.driver or 'none'}, {console} text console, display manager "
            f"{self.manager}, {shown} X server"
        )


@contextmanager
def only_screen(topology: Topology) -> Iterator[Screen]:
    """The console's display under a display manager: the other ones have no driver."""
    others = [topology.addresses[name] for name in ("gpu", "twin")]
    for address in others:
        (DRIVER / "unbind").write_text(address)
    start()
    found = Screen(topology.addresses["console"])
    until(lambda: found.is_back)
    yield found
    stop()
    for address in others:
        (DRIVER / "bind").write_text(address)


def _processes(program: str) -> list[int]:
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            if (place / "comm").read_text().strip() == program:
                found.append(int(place.name))
    return found


def _opened(pid: int) -> set[str]:
    found = set()
    with suppress(FileNotFoundError, ProcessLookupError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):
                found.add(os.readlink(link))
    return found
