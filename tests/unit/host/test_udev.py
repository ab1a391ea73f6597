from __future__ import annotations

import errno
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple

import pytest

from vfiomgr.engine import verified_write
from vfiomgr.errors import ProgramFailed
from vfiomgr.host import udev
from vfiomgr.host.tree import HostTree
from vfiomgr.host.udev import DeviceChanges, DeviceEvents, is_settled, rules_give_access
from vfiomgr.passthrough.apply import let_udev_finish
from vfiomgr.paths import HostPath

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NODE = HostPath("/dev/null")


class Device(NamedTuple):
    """What pyudev gives for an event."""

    device_path: str


class Monitor:
    """What pyudev gives, with events that a test makes."""

    def __init__(self, *answers: object) -> None:
        self.answers = list(answers)
        self.source = ""
        self.subsystems: list[str] = []
        self.started_with: list[str] = []

    def from_netlink(self, _context: object, source: str) -> Monitor:
        """Be the monitor of a source."""
        self.source = source
        return self

    def filter_by(self, subsystem: str) -> None:
        """Note a subsystem."""
        self.subsystems.append(subsystem)

    def set_receive_buffer_size(self, _size: int) -> None:
        """Refuse it, as to all but root."""
        raise PermissionError

    def start(self) -> None:
        """Note what would be heard."""
        self.started_with = list(self.subsystems)

    def poll(self, _seconds: float) -> object:
        """Answer, or fail."""
        answer = self.answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer


def listening(monkeypatch: pytest.MonkeyPatch, *answers: object) -> Monitor:
    """A monitor in the place of pyudev's."""
    monitor = Monitor(*answers)
    monkeypatch.setattr("pyudev.Monitor", monitor)
    monkeypatch.setattr("pyudev.Context", lambda: None)
    return monitor


@pytest.mark.parametrize(("files", "source"), [(("/run/udev/control",), "udev"), ((), "kernel")])
def test_changes_are_heard_from_udevd_where_one_runs(
    monkeypatch: pytest.MonkeyPatch, files: tuple[str, ...], source: str
) -> None:
    monitor = listening(monkeypatch)
    DeviceChanges(Machine(*files))
    assert monitor.source == source
    assert {"pci", "mdev", "vfio", "vfio-dev", "drm"} <= {*monitor.started_with}


def test_a_buffer_that_is_too_small_for_a_storm_is_a_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lost, other = OSError(errno.ENOBUFS, "lost"), OSError(errno.EBADF, "closed")
    listening(monkeypatch, Device("/devices/a"), None, lost, other)
    changes = DeviceChanges(Machine())
    assert [changes.wait(1.0) for _ in range(3)] == [True, False, True]
    with pytest.raises(OSError, match="closed"):
        changes.wait(1.0)


def test_the_devices_of_all_events_are_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = OSError(errno.ENOBUFS, "lost")
    answers = (*map(Device, ("/devices/a", "/devices/b", "/devices/a")), None, lost, None, None)
    listening(monkeypatch, *answers)
    changes = DeviceChanges(Machine())
    assert changes.wait(1.0)
    assert changes.take() == DeviceEvents(frozenset({"/devices/a", "/devices/b"}))
    assert changes.take() == DeviceEvents(is_complete=False)
    assert changes.take() == DeviceEvents()


class Machine(HostTree):
    """This machine with the files of /run/udev that a test gives it."""

    def __init__(self, *files: str, age: int = 0) -> None:
        super().__init__("/")
        self.files = list(files)
        self._age = age
        self.calls: list[tuple[str, ...]] = []

    def exists(self, path: HostPath) -> bool:
        """Whether the test gave it."""
        return path in self.files or path == NODE

    def status(self, path: HostPath) -> os.stat_result | None:
        """That of the node, less its age for a file that the test gave."""
        if not self.exists(path):
            return None if path.startswith("/run/udev/") else super().status(path)
        found = os.stat(NODE)
        when = found.st_mtime_ns - (0 if path == NODE else self._age)
        return os.stat_result((*found[:10],), {"st_mtime_ns": when})

    def call(self, *command: str, limit: float | None = 60) -> None:  # noqa: ARG002 - as there
        """Note the command."""
        self.calls.append(command)


def test_another_host_has_no_udevd_to_wait_for(tmp_path: Path) -> None:
    assert is_settled(HostTree(tmp_path), NODE)


def test_without_udevd_nothing_is_waited_for() -> None:
    assert is_settled(Machine(), NODE)


@pytest.mark.parametrize(
    ("record", "is_done"), [("c1:3", True), ("c1:33", False), ("c13:3", False), ("b1:3", False)]
)
def test_a_node_is_settled_once_udevd_has_a_record_of_it(record: str, *, is_done: bool) -> None:
    machine = Machine("/run/udev/control", f"/run/udev/data/{record}")
    assert is_settled(machine, NODE) is is_done


def test_a_record_that_is_older_than_the_node_is_of_an_earlier_node() -> None:
    machine = Machine("/run/udev/control", RECORD, age=1)
    assert not is_settled(machine, NODE)


class Clock:
    """A clock that only sleepers advance, and what happens after so many seconds."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, events: dict[float, Callable[[], None]]
    ) -> None:
        self.now = 0.0
        self._events = events
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=self._sleep)
        monkeypatch.setattr(verified_write, "time", clock)

    def _sleep(self, seconds: float) -> None:
        self.now += seconds
        for when in [when for when in self._events if when <= self.now]:
            self._events.pop(when)()


@pytest.fixture
def rules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(udev, "rules_give_access", lambda _: True)


QUEUE, RECORD = "/run/udev/queue", "/run/udev/data/c1:3"


@pytest.mark.usefixtures("rules")
def test_the_owner_of_a_node_is_waited_for_while_udevd_is_busy(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    machine = Machine("/run/udev/control", QUEUE)
    clock = Clock(monkeypatch, {100.0: lambda: machine.files.append(RECORD)})
    let_udev_finish(machine, NODE)
    assert machine.calls == [("udevadm", "control", "--ping")]
    assert clock.now == pytest.approx(100.0, abs=1)
    assert not recwarn


@pytest.mark.usefixtures("rules")
def test_a_node_that_udevd_does_not_handle_is_reported_with_its_present_owner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its queue is empty, so that more time would change nothing."""
    machine = Machine("/run/udev/control", QUEUE)
    clock = Clock(monkeypatch, {3.0: lambda: machine.files.remove(QUEUE)})
    with pytest.warns(UserWarning, match="udev has not set the owner of /dev/null yet: 0:0 0666"):
        let_udev_finish(machine, NODE)
    assert clock.now == pytest.approx(3.0, abs=1)


@pytest.mark.usefixtures("rules")
def test_a_record_from_before_the_clock_was_set_back_counts_once_udevd_is_idle(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    machine = Machine("/run/udev/control", RECORD, age=10**12)
    Clock(monkeypatch, {})
    let_udev_finish(machine, NODE)
    assert not recwarn


@pytest.mark.parametrize("node", ["/dev/no-such-node", "/proc/version"])
def test_what_is_no_node_is_not_settled(node: str) -> None:
    assert not is_settled(Machine("/run/udev/control"), HostPath(node))


GIVES = [
    'SUBSYSTEM=="vfio", OWNER="root", GROUP="kvm", MODE="0660"',
    'SUBSYSTEM=="vfio", \\\n    GROUP="kvm"',
    'SUBSYSTEM=="vfio", KERNEL=="12", GROUP:="lab"',
    'SUBSYSTEM=="vfio", RUN+="/usr/bin/setfacl -m u:lab:rw /dev/vfio/%k"',
    'SUBSYSTEM=="vfio-dev", TAG+="uaccess"',
]
GIVES_NOT = [
    "",
    '# SUBSYSTEM=="vfio", GROUP="kvm"',
    'KERNEL=="vfio", MODE="0666", OPTIONS+="static_node=vfio/vfio"',
    'ACTION=="add", SUBSYSTEM=="vfio", TAG+="systemd", PROGRAM="/usr/lib/udev/vfio_name %k"',
    'SUBSYSTEM=="kvm", GROUP="kvm", MODE="0660"',
]


@pytest.mark.parametrize("directory", ["etc", "run", "usr/local/lib", "usr/lib"])
@pytest.mark.parametrize(
    ("rule", "gives"), [(r, True) for r in GIVES] + [(r, False) for r in GIVES_NOT]
)
def test_rules_that_decide_who_opens_a_node(
    tmp_path: Path, directory: str, rule: str, *, gives: bool
) -> None:
    place = tmp_path / directory / "udev/rules.d"
    place.mkdir(parents=True)
    (place / "60-guests.rules").write_text(f"{rule}\n")
    assert rules_give_access(HostTree(tmp_path)) is gives


def test_a_rule_file_is_hidden_by_one_of_its_name_before_it(tmp_path: Path) -> None:
    for directory, rule in (("etc", ""), ("usr/lib", GIVES[0])):
        place = tmp_path / directory / "udev/rules.d"
        place.mkdir(parents=True)
        (place / "60-guests.rules").write_text(rule)
    assert not rules_give_access(HostTree(tmp_path))


class Busy(HostTree):
    """A host whose udevd closes some connections before it answers."""

    refusals = 0

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        (root / "run/udev").mkdir(parents=True)
        (root / "run/udev/control").touch()

    @property
    def is_machine(self) -> bool:
        """Whether udevd may be asked."""
        return True

    def call(self, *command: str, limit: float | None = 60) -> None:
        """Fail as udevadm does whose connection was closed."""
        assert limit
        self.refusals -= 1
        if self.refusals >= 0:
            raise ProgramFailed(" ".join(command), "", status=1, said="Broken pipe")


def test_a_busy_udevd_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(udev, "_PAUSE", 0.0)
    tree = Busy(tmp_path)
    tree.refusals = 2
    assert udev.has_received(tree)
    tree.refusals = 2
    udev.reload_rules(tree, 1)
    tree.refusals = 9
    assert not udev.has_received(tree)
    tree.refusals = 9
    with pytest.raises(ProgramFailed):
        udev.reload_rules(tree, 1)
