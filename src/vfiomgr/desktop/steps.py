"""Steps that release a card of the desktop, and that restore the desktop afterwards."""

from __future__ import annotations

import shlex
from typing import ClassVar

from vfiomgr.engine.plan import Exchange, Step, Topic
from vfiomgr.pci.model import DeviceIdentity, pci_device
from vfiomgr.users.desktop import FBCON
from vfiomgr.users.released import ReleasedCard, ServiceUnit
from vfiomgr.value import Value

UNIT_DEADLINE = 150.0
"""Seconds: DefaultTimeoutStopSec= is 90, after which systemd kills what is left."""
ASK_DEADLINE = 30.0
"""Seconds for a program that only asks or announces."""
MODULE_DEADLINE = 30.0
"""Seconds to unload a module."""
CLOSE_DEADLINE = 40.0
"""Seconds until programs have closed a card: services of a user end 10 s after the last session
(UserStopDelaySec= in logind.conf(5)), and each of them may take some time for that."""


class SetUnit(Exchange, Value):
    """Start or stop a unit of systemd; the states are whether it is active."""

    unit: ServiceUnit
    """The unit, of the system or of a user."""
    before: bool
    after: bool
    is_tolerant: bool = False
    """Whether a failure is only a warning: the card has returned, which is not undone for it."""
    kind: ClassVar[str] = "set-unit"

    deadline: ClassVar[float | None] = 2 * (UNIT_DEADLINE + ASK_DEADLINE) + 20
    """Longer than its programs, which a start may run twice: the run is abandoned after it."""

    @property
    def topic(self) -> Topic:
        """Identify the unit."""
        return (self.kind, str(self.unit))

    def describe(self) -> str:
        return f"{'start' if self.after else 'stop'} {self.unit}"

    def report(self) -> str:
        return f"{'started' if self.after else 'stopped'} {self.unit}"

    def commands(self) -> tuple[str, ...]:
        return (shlex.join(systemctl("start" if self.after else "stop", self.unit)),)


def systemctl(verb: str, unit: ServiceUnit) -> tuple[str, ...]:
    """The command for a unit; that of a user is reached in the user's own manager."""
    if unit.uid is None:
        return ("systemctl", verb, unit.name)
    return ("systemctl", "--user", f"--machine={unit.uid}@.host", verb, unit.name)


class EndSession(Step, Value):
    """End a session of logind, with all of its programs. It cannot be undone.

    logind leaves the programs of a session that its display manager has closed (session_stop in
    src/login/logind-session.c, KillUserProcesses= in logind.conf(5)): systemd stops their scope.
    """

    session: str
    """`2`, `c1`; the number of an ended session is not used again in the same boot."""
    user: str
    """The name of its user."""
    kind: ClassVar[str] = "end-session"

    deadline: ClassVar[float | None] = 2 * UNIT_DEADLINE + 20
    is_lasting: ClassVar[bool] = True

    @property
    def topic(self) -> Topic:
        """Identify the session."""
        return (self.kind, self.session)

    def describe(self) -> str:
        return f"end session {self.session} of {self.user}"

    def report(self) -> str:
        return f"ended session {self.session} of {self.user}"

    def commands(self) -> tuple[str, ...]:
        return tuple(map(shlex.join, self.programs))

    @property
    def programs(self) -> tuple[tuple[str, ...], ...]:
        """The commands that end it, in order."""
        return (
            ("loginctl", "terminate-session", self.session),
            ("systemctl", "stop", f"session-{self.session}.scope"),
        )

    def inverse(self) -> None:
        """Return None: the user logs in again."""


class AnnounceCard(Exchange, Value):
    """Send the udev event `remove` or `add` of a card: some compositors then close or open it.

    The device itself is not changed (uevent_store in drivers/base/core.c).
    """

    device: DeviceIdentity
    before: str
    after: str
    kind: ClassVar[str] = "announce-card"

    def describe(self) -> str:
        what = "removed" if self.after == "remove" else "present again"
        return f"{self.device.address}: announce to compositors that its nodes are {what}"

    def commands(self) -> tuple[str, ...]:
        nodes = f"--subsystem-match=drm --parent-match={pci_device(self.device.address)}"
        return (f"udevadm trigger --action={self.after} {nodes}",)


class AwaitClosed(Step, Value):
    """Wait until no process has a node of the device open."""

    device: DeviceIdentity
    nodes: tuple[str, ...]
    """`/dev/dri/card0`; those of the display and of its audio function."""
    hint: str
    """The remedy if a node stays open."""
    kind: ClassVar[str] = "await-closed"

    deadline: ClassVar[float | None] = CLOSE_DEADLINE + 20

    def describe(self) -> str:
        return f"{self.device.address}: wait until no program has it open"

    def commands(self) -> tuple[str, ...]:
        return (shlex.join(("fuser", "-v", *self.nodes)),)

    def inverse(self) -> None:
        """Return None: waiting changes nothing."""


class SetConsole(Exchange, Value):
    """Attach the text console to the frame buffer of a card, or detach it from it.

    The states are whether the console's driver `frame buffer device` is bound. Its number changes
    when drivers come and go, and it vanishes with the last frame buffer (drivers/video/fbdev/core/
    fbcon.c); the next one brings it back.
    """

    device: DeviceIdentity
    before: bool
    after: bool
    is_tolerant: bool = False
    """Whether a failure is only a warning: the card has returned, which is not undone for it."""
    kind: ClassVar[str] = "set-console"

    def describe(self) -> str:
        what = "attach the text console to a" if self.after else "detach the text console from its"
        return f"{self.device.address}: {what} frame buffer"

    def commands(self) -> tuple[str, ...]:
        names = f"$(grep -l {shlex.quote(FBCON)} /sys/class/vtconsole/*/name)"
        return (f"for c in {names}; do echo {int(self.after)} > ${{c%name}}bind; done",)


class SetModules(Exchange, Value):
    """Load or unload the modules of a driver; the states are those that are loaded, in order.

    `functions` leave the driver with its module, and are on it again when it is loaded.
    """

    device: DeviceIdentity
    before: tuple[str, ...]
    after: tuple[str, ...]
    driver: str
    """The driver that the first of them brings: `nvidia`."""
    functions: tuple[DeviceIdentity, ...]
    """The functions that are on that driver."""
    is_tolerant: bool = False
    """Whether a failure is only a warning: the card has returned, which is not undone for it."""
    kind: ClassVar[str] = "set-modules"

    deadline: ClassVar[float | None] = 4 * MODULE_DEADLINE + 20
    """NVIDIA's driver has four modules."""

    def describe(self) -> str:
        if self.after:
            return f"{self.device.address}: load {', '.join(self.after)}"
        return f"{self.device.address}: unload {', '.join(reversed(self.before))}"

    def commands(self) -> tuple[str, ...]:
        if self.after:
            return tuple(f"modprobe {name}" for name in self.after)
        return tuple(f"rmmod {name}" for name in reversed(self.before))


class RecordRelease(Exchange, Value):
    """Write, change or remove the record of a card that the desktop releases."""

    device: DeviceIdentity
    before: ReleasedCard | None
    after: ReleasedCard | None
    kind: ClassVar[str] = "record-release"

    is_record: ClassVar[bool] = True

    @property
    def is_return(self) -> bool:
        """Whether the card has returned: an interrupted return is no reason to take it again."""
        return self.after is None

    def describe(self) -> str:
        verb = "delete the record of" if self.after is None else "record"
        return f"{self.device.address}: {verb} what is restored when it returns"

    def commands(self) -> tuple[str, ...]:
        """Return no command: only vfiomgr uses the record."""
        return ()
