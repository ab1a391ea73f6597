"""The guests of a pytest session: as many at a time as the processors have use for.

A guest has the tests of one kind, a topology on a platform, and asks for the next module when it
comes to the last test of one. So a kind with many tests is shared by two guests as soon as no other
waits for a processor. What has most tests goes first.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.lab.errors import GuestError, GuestTimeout, LabError, last_lines
from tests.lab.machine import Guest, Job
from tests.lab.processors import measured
from tests.lab.progress import Patience
from tests.lab.reporter import MODULE, REPORTS, read_lines

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import pytest

    from tests.lab.platforms import Platform
    from tests.lab.topology import Topology

_LIMIT_VARIABLE = "VFIOMGR_LAB_TIMEOUT"
_LIMIT = 600.0
"""Seconds without a word from a guest that stands still: one test may die thirty times."""
_POLL = 0.1
_WORTH = 10
"""Tests that must be left for a second guest: its start costs as much as a few of them."""

Module = list[str]
"""The tests of a file, by node id."""


class Kind(NamedTuple):
    """What guests differ in."""

    topology: Topology
    platform: Platform

    def __str__(self) -> str:
        """`sriov on debian13`."""
        return f"{self.topology.name} on {self.platform.name}"

    def __hash__(self) -> int:
        """By the names: a topology has dictionaries."""
        return hash((self.topology.name, self.platform.name))


@dataclass
class Work:
    """The modules of one kind that no guest has taken yet, and its guests at present."""

    kind: Kind
    modules: deque[Module]
    files: list[str]
    guests: int = 0
    is_broken: bool = False

    @property
    def left(self) -> int:
        """The tests that no guest has taken."""
        return sum(map(len, self.modules))

    @property
    def is_worth_a_guest(self) -> bool:
        """Whether one more guest is of use."""
        return not self.is_broken and self.left >= (_WORTH if self.guests else 1)


@dataclass
class Told:
    """What a guest said of one test: its reports, each with the processor time that it took."""

    reports: deque[tuple[object, float]] = field(default_factory=deque)
    is_finished: bool = False
    failure: str = ""


class Guests:
    """All guests of a session; they run in threads of their own."""

    def __init__(self, config: pytest.Config, tests: Mapping[Kind, Sequence[pytest.Item]]) -> None:
        self.costs: list[str] = []
        self._config = config
        self._changed = threading.Condition()
        self._told: defaultdict[str, Told] = defaultdict(Told)
        self._work = [_work(kind, items) for kind, items in tests.items()]
        self._is_closed = False
        self._lanes = measured()
        self._threads = [
            threading.Thread(target=self._run, name=f"laboratory {number}")
            for number in range(self._lanes)
        ]
        for thread in self._threads:
            thread.start()

    def reports(self, nodeid: str) -> Iterator[tuple[object, float]]:
        """Yield the serialised reports of one test and their cost; LabError where it has none."""
        while (report := self._next_report(nodeid)) is not None:
            yield report

    def close(self) -> None:
        """End all guests."""
        with self._changed:
            self._is_closed = True
        for thread in self._threads:
            thread.join()

    @property
    def is_closed(self) -> bool:
        """Whether the session has ended."""
        return self._is_closed

    def take(self, work: Work) -> Module:
        """Return the tests that a guest runs next: none where nothing is left."""
        with self._changed:
            return work.modules.popleft() if work.modules else []

    def tell(self, nodeid: str, *, report: object = None, spent: float = 0.0) -> None:
        """Take in a report of a test, or that it has no further one."""
        with self._changed:
            if report is None:
                self._told[nodeid].is_finished = True
            else:
                self._told[nodeid].reports.append((report, spent))
            self._changed.notify_all()

    def fail(self, nodeids: Iterable[str], why: str) -> None:
        """Say why tests have no reports; at length for the first one."""
        first, *_ = why.splitlines()
        with self._changed:
            for nodeid in nodeids:
                if not self._told[nodeid].is_finished:
                    self._told[nodeid].failure = f"{why}\nno report of {nodeid}"
                    why = first
            self._changed.notify_all()

    def unfinished(self, nodeids: Iterable[str]) -> list[str]:
        """Return the tests whose reports are not complete."""
        with self._changed:
            return [nodeid for nodeid in nodeids if not self._told[nodeid].is_finished]

    def _next_report(self, nodeid: str) -> tuple[object, float] | None:
        with self._changed:
            told = self._told[nodeid]
            self._changed.wait_for(
                lambda: told.reports or told.is_finished or told.failure or not self._lanes
            )
            if told.reports:
                return told.reports.popleft()
            if told.is_finished:
                return None
        raise LabError(told.failure or f"no guest was left to run {nodeid}")

    def _run(self) -> None:
        """Boot one guest after the other, while there is work for one more."""
        try:
            while (work := self._next_work()) is not None:
                self._run_guest(work)
        finally:
            with self._changed:
                self._lanes -= 1
                self._changed.notify_all()

    def _next_work(self) -> Work | None:
        """Return the work whose guest is to be booted next."""
        with self._changed:
            waiting = [work for work in self._work if work.is_worth_a_guest]
            if self._is_closed or not waiting:
                return None
            work = max(waiting, key=lambda work: (not work.guests, work.left))
            work.guests += 1
            return work

    def _run_guest(self, work: Work) -> None:
        run = GuestRun(work, self)
        try:
            run.follow(self._config)
        except LabError as error:
            self.fail(run.taken, str(error))
            # What does not even boot is not booted again.
            work.is_broken |= not run.taken
            if work.is_broken and work.guests == 1:
                self.fail(self._take_all(work), str(error))
        finally:
            with self._changed:
                work.guests -= 1
                self.costs.append(run.cost)

    def _take_all(self, work: Work) -> list[str]:
        """Return all tests that no guest has taken, nor will."""
        nodeids: list[str] = []
        while module := self.take(work):
            nodeids += module
        return nodeids


class GuestRun:
    """One guest, from its boot to its end."""

    def __init__(self, work: Work, guests: Guests) -> None:
        self.taken: list[str] = []
        self._work = work
        self._guests = guests
        self._refused: list[str] = []
        self._busy: list[str] = []
        self._spent = {"start": 0.0, "tests": 0.0}
        self._begin = time.monotonic()

    @property
    def cost(self) -> str:
        """What this guest cost, for a person."""
        spent = self._spent
        return (
            f"{self._work.kind}: {spent['tests']:.0f} s in {len(self.taken)} tests, "
            f"{spent['start']:.0f} s to start, {time.monotonic() - self._begin:.0f} s by the clock"
            + "".join(f"\n  still ran: {line}" for line in self._busy)
        )

    def follow(self, config: pytest.Config) -> None:
        """Boot it, give it work, and take in what it says, until it ends."""
        topology, platform = self._work.kind
        job = _job(config, platform, self._work.files)
        limit = float(os.environ.get(_LIMIT_VARIABLE, _LIMIT))
        with Guest(topology, job) as guest:
            patience = Patience(limit, guest.pid, most=2 * limit)
            with (guest.results / REPORTS).open() as stream:
                while self._is_alive(guest, stream, patience):
                    time.sleep(_POLL)
            if not self._guests.is_closed:
                self._check(guest)

    def _is_alive(self, guest: Guest, stream: Any, patience: Patience) -> bool:
        """Take in what the guest wrote; whether there is more to come."""
        alive = guest.running
        for line in read_lines(stream):
            patience.restart()
            self._take_in(line, guest)
        if alive and patience.is_over:
            what = f"nothing was heard from the guest, and {patience.why}"
            guest.keep = True
            guest.kill()
            raise GuestTimeout(what, console=guest.console)
        return alive and not self._guests.is_closed

    def _take_in(self, line: dict[str, Any], guest: Guest) -> None:
        """Answer or pass on one line of the guest."""
        spent = guest.processor_time - sum(self._spent.values())
        self._spent["tests" if self.taken else "start"] += spent
        match line:
            case {"collect": why}:
                self._refused.append(str(why))
            case {"busy": list(lines)}:
                self._busy = list(map(str, lines))
            case {"wants": int(number)}:
                module = self._guests.take(self._work)
                self.taken += module
                _write_module(guest, number, module)
            case {"nodeid": str(nodeid), "report": report}:
                self._guests.tell(nodeid, report=report, spent=spent)
            case {"nodeid": str(nodeid)}:
                self._guests.tell(nodeid)

    def _check(self, guest: Guest) -> None:
        """Raise what an ended guest says, where it left tests without a report."""
        if not self._guests.unfinished(self.taken) and (self.taken or not self._work.left):
            return
        guest.keep = True
        try:
            how = f"pytest ended with {guest.status()} in the guest"
        except GuestError as error:
            how = str(error)
        output = f"logs: {guest.directory}\noutput:\n{last_lines(guest.output)}"
        raise LabError("\n".join([how, *self._refused, output]))


def _work(kind: Kind, items: Sequence[pytest.Item]) -> Work:
    """Return the work of a kind of guest, the modules with most tests first.

    Those whose marker says `last=True` leave the guest unlike what others expect to find.
    """
    modules: defaultdict[str, Module] = defaultdict(list)
    last: set[str] = set()
    for item in items:
        modules[str(item.path)].append(item.nodeid)
        marker = item.get_closest_marker("topology")
        if marker is not None and marker.kwargs.get("last"):
            last.add(str(item.path))
    ordered = sorted(modules, key=lambda path: (path in last, -len(modules[path])))
    return Work(kind, deque(modules[path] for path in ordered), list(modules))


def _write_module(guest: Guest, number: int, module: Module) -> None:
    """Answer a guest that wants work; it reads no half of a file."""
    written = guest.results / f"{MODULE}.new"
    written.write_text(json.dumps(module))
    written.rename(guest.results / f"{MODULE}.{number}")


def _job(config: pytest.Config, platform: Platform, files: Iterable[str]) -> Job:
    """Return a guest's run of pytest."""
    inifile = ["-c", str(config.inipath)] if config.inipath else []
    # What other plugins do is for the machine; to look for them takes seconds in a guest.
    plugins = ["-p", "tests.lab.reporter", "-p", "no:cacheprovider"]
    rootdir = ["--rootdir", str(config.rootpath)]
    return Job(
        [platform.python, "-m", "pytest", *inifile, *rootdir, *plugins, *files],
        config.rootpath,
        platform,
        environment={"PY_COLORS": "0", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        results={REPORTS: ""},
    )
