"""An agent that runs for months: what one hot-plug costs, and what it takes while nothing happens.

A host of 2,048 functions, of which 1,920 are offered, has counters of errors, VFIO nodes and 300
processes. Its functions are read in a child process, as those of a running kernel are.
"""

from __future__ import annotations

import os
import resource
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.table import Row
from benchmarks.trees import make_tree
from vfiomgr.host.tree import HostTree
from vfiomgr.host.udev import DeviceEvents
from vfiomgr.library import Host
from vfiomgr.node.metrics import render
from vfiomgr.node.observing import EVERYTHING, Observer
from vfiomgr.node.scanner import Scanner
from vfiomgr.snapshot.keeping import KeptSnapshot
from vfiomgr.snapshot.scan import scan

if TYPE_CHECKING:
    from collections.abc import Callable

    from vfiomgr.paths import HostPath

FUNCTIONS = 2048
_PROCESSES, _FILES = 300, 20
_NAME, _GROUP = "0010:02:02.3", 64 * 16 + 4 + 11
"""A virtual function on vfio-pci, the twelfth of its adapter."""
_PLUGS, _LOOKS = 40, 5
_HOT_PLUG = 0.002
"""Seconds of processor time."""
_IDLE = 0.001
"""Of a processor."""


class _LiveTree(HostTree):
    """A made tree that is read as `/` is: by the kernel's own resolution of paths and links.

    All of its links are relative. Attributes under locks are read by a child.
    """

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._reading &= ~os.O_NOFOLLOW

    @property
    def can_hang(self) -> bool:
        """Expect it."""
        return True

    def locate(self, path: HostPath) -> str:
        """The path below the root."""
        return f"{self.root}{path}"

    def _open_in(self, above: str, name: str) -> int:
        return os.open(f"{self.root}{above}/{name}", self._reading)

    def link(self, path: HostPath) -> str | None:
        """The target of a link."""
        try:
            return os.readlink(f"{self.root}{path}")
        except OSError:
            return None

    def entries(self, path: HostPath) -> list[str]:
        """The names in a directory."""
        try:
            return os.listdir(f"{self.root}{path}")
        except OSError:
            return []


def percent(share: float) -> str:
    """A part of a processor."""
    return f"{share * 100:.3f} %"


def measure(place: str | None, serving: float) -> list[Row]:
    """One hot-plug, and an idle agent, whose process that serves takes this part of a processor."""
    with tempfile.TemporaryDirectory(prefix="k", dir=place) as directory:
        root = Path(directory)
        make_tree(directory, FUNCTIONS, "vfio-pci")
        _add_facts(root)
        rows = [_hot_plug(root), *_reports(root)]
        return [*rows, _idle(root, serving)]


def _add_facts(root: Path) -> None:
    """Counters of errors, nodes, and processes with open files."""
    for name in os.listdir(root / "sys/bus/pci/devices"):
        for kind in ("correctable", "nonfatal", "fatal"):
            text = "Undefined 0\n" * 12 + f"TOTAL_ERR_{kind.upper()} 0\n"
            (root / f"sys/bus/pci/devices/{name}/aer_dev_{kind}").write_text(text)
    (root / "dev/vfio").mkdir(parents=True)
    for number in range(FUNCTIONS):
        (root / f"dev/vfio/{number}").touch()
    for process in range(1, _PROCESSES + 1):
        directory = root / f"proc/{process}/fd"
        directory.mkdir(parents=True)
        for number in range(_FILES):
            (directory / str(number)).symlink_to(f"/var/log/{number}")


class _Slot:
    """A function that is removed and added again."""

    def __init__(self, root: Path) -> None:
        self._link = root / "sys/bus/pci/devices" / _NAME
        self._target = os.readlink(self._link)
        self._moved = [
            (root / place, root / "away" / place.replace("/", "-"))
            for place in (f"sys/kernel/iommu_groups/{_GROUP}", f"dev/vfio/{_GROUP}")
        ]
        (root / "away").mkdir(exist_ok=True)
        path = f"/devices/{self._target.partition('devices/')[2]}"
        self.events = DeviceEvents(frozenset({path, f"/devices/virtual/vfio/{_GROUP}"}))

    def change(self) -> None:
        """Remove it, or add it."""
        if self._link.is_symlink():
            self._link.unlink()
            for place, other in self._moved:
                place.rename(other)
            return
        self._link.symlink_to(self._target)
        for place, other in self._moved:
            other.rename(place)


def _spent() -> float:
    """Seconds of processor time of this process and its children, also of those that live."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    own = os.getpid()
    living = Path(f"/proc/{own}/task/{own}/children").read_text().split()
    return time.process_time() + ended.ru_utime + ended.ru_stime + sum(map(processor_time, living))


def processor_time(process: int | str) -> float:
    """Seconds that all threads of a process have run (sched_debug: sum_exec_runtime)."""
    tasks = Path(f"/proc/{process}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def _costs(change: Callable[[], None], work: Callable[[], object], times: int) -> float:
    """The median processor time of some work after each change."""
    found = []
    for _ in range(times):
        change()
        begun = _spent()
        work()
        found.append(_spent() - begun)
    return statistics.median(found)


def _hot_plug(root: Path) -> Row:
    tree, slot = _LiveTree(root), _Slot(root)
    kept = KeptSnapshot(tree, tree, partial(scan, tree, tree, with_claims=False, with_links=True))
    kept.read()
    for count in (FUNCTIONS - 1, FUNCTIONS):
        slot.change()
        found = len(kept.follow(slot.events).devices)
        if found != count:
            message = f"{found} functions after a hot-plug, not {count}"
            raise RuntimeError(message)
    cost = _costs(slot.change, partial(kept.follow, slot.events), _PLUGS)
    kept.close()
    text = f"one hot-plug among {FUNCTIONS} functions: processor time until the snapshot is right"
    return Row(text, cost, "at most", _HOT_PLUG, 1.0)


def _reports(root: Path) -> list[Row]:
    scanner, slot = Scanner(Host(_LiveTree(root)), render), _Slot(root)
    full = _costs(lambda: None, scanner.scan, 3)
    cost = _costs(slot.change, partial(scanner.follow, slot.events), 6)
    scanner.close()
    text = f"one hot-plug among {FUNCTIONS} functions: processor time until the node's report"
    return [Row(text, cost, "a scan of all", full)]


def _idle(root: Path, serving: float) -> Row:
    scanner = Scanner(Host(_LiveTree(root)), render)
    scanner.scan()
    scanner.look()
    observer = Observer(Host(_LiveTree(root)))
    full = _costs(lambda: None, observer.read, 3)  # of an unchanged host no report is made
    observer.close()
    reports = []
    cost = _costs(lambda: None, lambda: reports.append(scanner.look()), _LOOKS)
    if not all(report.is_unchanged for report in reports):
        message = "a look at an idle host found a change"
        raise RuntimeError(message)
    pause = scanner.pause(has_events=True)
    share = cost / pause + full / EVERYTHING + serving
    parts = (cost / pause, full / EVERYTHING, serving)
    names = ("looks", "reading everything", "the process that serves")
    told = ", ".join(f"{name} {percent(part)}" for name, part in zip(names, parts, strict=True))
    print(f"  idle agent: {told}", file=sys.stderr)
    text = f"idle agent, {FUNCTIONS} functions: part of a core (looks every {pause:.0f} s)"
    return Row(text, share, "at most", _IDLE, 1.0, shown=percent)
