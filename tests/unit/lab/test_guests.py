"""Which guest runs which tests, with guests that are none."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, cast

import pytest

from tests.lab import guests as guests_module
from tests.lab import reporter
from tests.lab.errors import GuestDied, LabError
from tests.lab.guests import Guests, Kind
from tests.lab.platforms import DEFAULT, PLATFORMS
from tests.lab.reporter import MODULE, REPORTS
from tests.lab.topology import TOPOLOGIES

if TYPE_CHECKING:
    from tests.lab.platforms import Platform
    from tests.lab.topology import Topology


class Item(NamedTuple):
    """What is read of a test."""

    path: Path
    nodeid: str
    is_last: bool = False

    def get_closest_marker(self, name: str) -> pytest.Mark:
        """The marker of its module."""
        return pytest.Mark(name, (), {"last": self.is_last}, _ispytest=True)


class Standin:
    """A guest that answers at once: all that it is given passes, but for `dies`."""

    place: Path
    booted: Counter[str]
    boots: bool
    dies: str
    lock = threading.Lock()
    pid = 1
    processor_time = 0.0
    keep = False

    def __init__(self, topology: Topology, platform: Platform) -> None:
        kind = str(Kind(topology, platform))
        with self.lock:
            self.results = Path(Standin.place, f"{kind}-{Standin.booted[kind]}")
            self.results.mkdir()
            Standin.booted[kind] += 1
        self.output = self.console = self.directory = self.results / "log"
        (self.results / REPORTS).touch()
        self.running = True
        self._number = 0

    def __enter__(self) -> Self:
        """It wants work, if it boots."""
        if self.boots:
            self._say({"wants": 0})
        else:
            self.running = False
        return self

    def __exit__(self, *_: object) -> None:
        """It is over."""

    def step(self) -> None:
        """Run the module that it was given."""
        answer = self.results / f"{MODULE}.{self._number}"
        if not self.running or not answer.exists():
            return
        for nodeid in (module := json.loads(answer.read_text())):
            if nodeid == self.dies:
                self.running = False
                return
            self._say({"nodeid": nodeid, "report": nodeid.upper()}, {"nodeid": nodeid})
        self._number += 1
        if module:
            self._say({"wants": self._number})
        else:
            self._say({"busy": ["12 s: sleep 3600"]})
            self.running = False

    def status(self) -> int:
        """It left none."""
        what = "it died"
        raise GuestDied(what, console=self.console)

    def _say(self, *lines: dict[str, Any]) -> None:
        with (self.results / REPORTS).open("a") as stream:
            stream.writelines(json.dumps(line) + "\n" for line in lines)


@pytest.fixture(autouse=True)
def _standins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Standin.place, Standin.booted, Standin.boots, Standin.dies = tmp_path, Counter(), True, ""

    def alive(run: guests_module.GuestRun, guest: Any, stream: Any, patience: Any) -> bool:
        guest.step()
        return real(run, guest, stream, patience)

    real = guests_module.GuestRun._is_alive
    monkeypatch.setattr(guests_module, "Guest", Standin)
    monkeypatch.setattr(guests_module, "_job", lambda _, platform, __: platform)
    monkeypatch.setattr(guests_module, "_POLL", 0.001)
    monkeypatch.setattr(guests_module.GuestRun, "_is_alive", alive)
    monkeypatch.setattr(guests_module, "measured", lambda: 2)  # which takes seconds


def started(*names: str, **counts: list[int]) -> tuple[Guests, list[str]]:
    """The guests of topologies with modules of so many tests, on these platforms, and the tests."""
    tests = {
        Kind(TOPOLOGIES[topology], PLATFORMS[name]): [
            Item(Path(f"{module}.py"), f"{topology}-{module}-{number}{f'-{name}' if names else ''}")
            for module, count in enumerate(modules)
            for number in range(count)
        ]
        for name in names or (DEFAULT.name,)
        for topology, modules in counts.items()
    }
    nodeids = [item.nodeid for items in tests.values() for item in items]
    return Guests(cast("Any", None), cast("Any", tests)), nodeids


def outcome(guests: Guests, nodeid: str) -> list[object] | str:
    """The reports of a test, or why it has none."""
    try:
        return [report for report, _ in guests.reports(nodeid)]
    except LabError as error:
        return str(error)


def test_every_test_is_run_once_by_a_guest_of_its_topology() -> None:
    guests, nodeids = started(workstation=[3, 30, 2], sriov=[5])
    assert [outcome(guests, nodeid) for nodeid in nodeids] == [[n.upper()] for n in nodeids]
    guests.close()
    assert set(Standin.booted) == {"workstation on debian12", "sriov on debian12"}
    assert sum(Standin.booted.values()) == len(guests.costs)


def test_a_guest_runs_the_tests_of_one_platform() -> None:
    guests, nodeids = started("debian12", "sid", workstation=[3, 2])
    assert [outcome(guests, nodeid) for nodeid in nodeids] == [[n.upper()] for n in nodeids]
    guests.close()
    assert Standin.booted == {"workstation on debian12": 1, "workstation on sid": 1}
    assert {line.partition(":")[0] for line in guests.costs} == set(Standin.booted)


def test_what_leaves_a_guest_unlike_before_is_run_last() -> None:
    large = [Item(Path("large.py"), f"large-{number}", is_last=True) for number in range(9)]
    small = [Item(Path("small.py"), "small")]
    kind = Kind(TOPOLOGIES["workstation"], DEFAULT)
    work = guests_module._work(kind, cast("Any", [*large, *small]))
    assert [module[0] for module in work.modules] == ["small", "large-0"]


def test_a_guest_that_dies_leaves_the_other_modules_to_a_new_one() -> None:
    Standin.dies = "workstation-0-1"
    guests, nodeids = started(workstation=[8, 2])
    found = {nodeid: outcome(guests, nodeid) for nodeid in nodeids}
    guests.close()
    failed = [nodeid for nodeid, what in found.items() if isinstance(what, str)]
    assert failed == [f"workstation-0-{number}" for number in range(1, 8)]
    assert "no report of workstation-0-1" in found["workstation-0-1"]
    assert Standin.booted == {"workstation on debian12": 2}


def test_what_does_not_boot_fails_all_its_tests_and_is_not_booted_again() -> None:
    Standin.boots = False
    guests, nodeids = started(workstation=[4, 3])
    assert all("it died" in outcome(guests, nodeid) for nodeid in nodeids)
    guests.close()
    assert Standin.booted == {"workstation on debian12": 1}


def test_what_a_guest_still_runs_at_its_end_is_told() -> None:
    guests, nodeids = started(workstation=[2])
    assert all(outcome(guests, nodeid) for nodeid in nodeids)
    while not guests.costs:
        time.sleep(0.01)
    guests.close()
    (cost,) = guests.costs
    assert cost.splitlines()[1:] == ["  still ran: 12 s: sleep 3600"]


def test_what_ran_long_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporter, "_LONG", 0.2)
    code = "while True: pass"
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        while f"{sys.executable} -c {code}" not in " ".join(reporter.busy_processes()):
            assert process.poll() is None
        process.kill()
