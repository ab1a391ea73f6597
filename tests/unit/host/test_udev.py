from __future__ import annotations

import errno
from typing import TYPE_CHECKING, NamedTuple

import pytest

from vfiomgr.host.tree import HostTree
from vfiomgr.host.udev import DeviceChanges, DeviceEvents, is_settled, rules_give_access
from vfiomgr.paths import HostPath

if TYPE_CHECKING:
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

    def __init__(self, *files: str) -> None:
        super().__init__("/")
        self._files = files

    def exists(self, path: HostPath) -> bool:
        """Whether the test gave it."""
        return path in self._files


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
