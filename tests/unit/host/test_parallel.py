"""Children that read parts of a large host: the result is that of one process."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Literal

import pytest

from benchmarks.trees import make_tree
from tests.fakes.vgpu_trees import make_vgpu_tree
from vfiomgr.host import bounded
from vfiomgr.host.bounded import in_parts
from vfiomgr.host.tree import HostTree
from vfiomgr.snapshot.scan import scan

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from vfiomgr.snapshot.model import HostSnapshot

ITEMS = list(range(1000))


@pytest.fixture(autouse=True)
def _four_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with as many, whatever this one has; and pytest may have threads."""
    monkeypatch.setattr(bounded, "_processors", lambda: 4)
    monkeypatch.setattr(bounded, "_has_threads", lambda: False)


def who(part: Sequence[int]) -> list[tuple[int, int]]:
    return [(item, os.getpid()) for item in part]


def test_each_part_has_a_process_and_the_order_stays(tmp_path: Path) -> None:
    found = in_parts(HostTree(tmp_path), who, ITEMS)
    assert [item for item, _ in found] == ITEMS
    processes = [pid for _, pid in found]
    assert len(set(processes)) == len(ITEMS) // bounded._LEAST_ITEMS
    assert processes[0] == os.getpid()


@pytest.mark.parametrize("why", ["few items", "reads alone", "one processor", "threads"])
def test_where_children_do_not_help_or_are_unsafe_there_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    tree, items = HostTree(tmp_path), ITEMS
    match why:
        case "few items":
            items = ITEMS[: 2 * bounded._LEAST_ITEMS - 1]
        case "reads alone":
            tree.reads_alone = True
        case "one processor":
            monkeypatch.setattr(bounded, "_processors", lambda: 1)
        case "threads":
            monkeypatch.setattr(bounded, "_has_threads", lambda: True)
    assert in_parts(tree, who, items) == [(item, os.getpid()) for item in items]


def test_a_thread_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    before = len(os.listdir("/proc/self/task"))
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    try:
        assert bounded._has_threads()
        assert len(os.listdir("/proc/self/task")) == before + 1
    finally:
        end.set()
        thread.join()


@pytest.mark.parametrize("how", ["an error", "a signal", "an unreadable answer"])
def test_what_a_child_fails_to_do_is_done_here(tmp_path: Path, how: str) -> None:
    parent = os.getpid()

    def work(part: Sequence[int]) -> list[object]:
        if os.getpid() != parent:
            match how:
                case "an error":
                    raise ValueError
                case "a signal":
                    os.kill(os.getpid(), 9)
                case _:
                    return [lambda: None]  # cannot be copied
        return list(part)

    assert in_parts(HostTree(tmp_path), work, ITEMS) == ITEMS


def test_children_keep_no_file_open_and_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = forks(monkeypatch)
    lock = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)

    def work(part: Sequence[int]) -> list[list[str]]:
        return [os.listdir("/proc/self/fd")] * len(part)

    before = os.listdir("/proc/self/fd")
    found = in_parts(HostTree(tmp_path), work, ITEMS)
    os.close(lock)
    assert str(lock) in found[0]
    assert str(lock) not in found[-1]
    assert len(os.listdir("/proc/self/fd")) == len(before) - 1
    assert len(started) == 2
    for pid in started:
        with pytest.raises(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def test_without_more_processes_all_is_done_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork, started = os.fork, forks(monkeypatch)

    def once() -> int:
        if started:
            raise BlockingIOError
        started.append(pid := fork())
        return pid

    monkeypatch.setattr(os, "fork", once)
    before = os.listdir("/proc/self/fd")
    found = in_parts(HostTree(tmp_path), who, ITEMS)
    assert [item for item, _ in found] == ITEMS
    assert [pid == os.getpid() for _, pid in found].count(False) == -(-len(ITEMS) // 3)
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_an_interrupt_ends_the_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started, parent = forks(monkeypatch), os.getpid()

    def work(part: Sequence[int]) -> list[int]:
        if os.getpid() == parent:
            raise KeyboardInterrupt
        threading.Event().wait(60)
        return list(part)

    before = os.listdir("/proc/self/fd")
    with pytest.raises(KeyboardInterrupt):
        in_parts(HostTree(tmp_path), work, ITEMS)
    assert len(started) == 2
    for pid in started:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert len(os.listdir("/proc/self/fd")) == len(before)


def both(root: Path) -> tuple[HostSnapshot, HostSnapshot]:
    """The snapshots of a host that was read alone, and by several processes."""
    alone, together = HostTree(root), HostTree(root)
    alone.reads_alone = True
    return scan(alone, alone), scan(together, together)


def forks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The children that are started from now on."""
    found: list[int] = []
    fork = os.fork

    def counted() -> int:
        pid = fork()
        found.append(pid)
        return pid

    monkeypatch.setattr(os, "fork", counted)
    return found


def test_a_snapshot_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tree(str(tmp_path), 1024)
    devices = tmp_path / "sys/bus/pci/devices"
    names = sorted(os.listdir(devices))
    os.rename(devices / names[-1] / "modalias", devices / names[-1] / "other")
    for name in ("vendor", "device", "class"):
        (devices / names[-1] / name).unlink(missing_ok=True)
    started = forks(monkeypatch)
    with pytest.warns(UserWarning, match=f"cannot identify {names[-1]}"):
        one, other = both(tmp_path)
    assert len(started) == 6
    assert len(one.devices) == 1023
    assert one == other


@pytest.mark.parametrize("family", ["mdev-sriov", "vendor"])
def test_vgpus_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: Literal["mdev-sriov", "vendor"]
) -> None:
    make_vgpu_tree(str(tmp_path), gpus=20, vfs=32, types=3, family=family)
    started = forks(monkeypatch)
    one, other = both(tmp_path)
    assert len(one.vgpus.parents) == 640
    assert len(started) == {"mdev-sriov": 3, "vendor": 2}[family]
    assert one == other
