"""The desktop of a guest: greetd as its display manager, whose greeter is an X server.

The X server draws by itself on the cards that the kernel's modesetting drivers show; it is the
greeter of a session of logind, which opens the cards for it. greetd is fetched on the machine and
not installed there, where its package would become the display manager.
"""

from __future__ import annotations

import os
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from tests.debian import unpacked
from tests.lab.systemd import UNITS, start_manager, systemctl

if TYPE_CHECKING:
    from collections.abc import Callable

PROGRAM_VARIABLE = "VFIOMGR_LAB_GREETD"
MANAGER = "display-manager.service"
_ALIAS = Path("/etc/systemd/system", MANAGER)
_RELEASE = "bookworm"
_UNIT = "greetd.service"
_DEVICES = Path("/sys/bus/pci/devices")
_CONSOLES = Path("/sys/class/vtconsole")
_FBCON = "frame buffer device"
_SERVER = "Xorg"
_SECONDS = 300.0
"""Seconds for what a desktop under emulation does by itself."""
_POLL = 0.2
_MASKED = ("dbus.service", "dbus.socket", "systemd-logind.service")
_RUN = Path("/run/lab/greetd")
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


def start() -> None:
    """Start logind and the display manager, under systemd."""
    start_manager()
    for name in _MASKED:
        (UNITS / name).unlink(missing_ok=True)
    for path, text in _FILES.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    if "\ngreeter:" not in Path("/etc/passwd").read_text():
        subprocess.run(("useradd", "--system", "--create-home", "greeter"), check=True)
    unit = _SERVICE.format(program=os.environ[PROGRAM_VARIABLE], directory=_RUN)
    (UNITS / _UNIT).write_text(unit)
    _ALIAS.unlink(missing_ok=True)
    _ALIAS.symlink_to(UNITS / _UNIT)
    systemctl("daemon-reload")
    systemctl("start", "dbus.socket", "systemd-logind.service", MANAGER)


def stop() -> None:
    """Stop the display manager."""
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
        cards = {f"/dev/dri/{path.name}" for path in _DEVICES.glob(f"{self.address}/drm/card*")}
        return any(cards & _opened(int(name)) for name in _servers())

    @property
    def is_back(self) -> bool:
        """Whether all of it is as at first."""
        return (
            self.driver == "bochs-drm"
            and self.has_console
            and self.is_shown
            and systemctl("is-active", MANAGER, must_work=False) == "active"
        )


def _servers() -> list[str]:
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            if (place / "comm").read_text().strip() == _SERVER:
                found.append(place.name)
    return found


def _opened(pid: int) -> set[str]:
    found = set()
    with suppress(FileNotFoundError, ProcessLookupError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):
                found.add(os.readlink(link))
    return found
