"""Workers: tasks in children, their errors, and children that never return."""

from __future__ import annotations

import os
import signal
import time
import warnings
from typing import TYPE_CHECKING

import pytest

from vfiomgr.engine.worker import WorkerPool
from vfiomgr.errors import DeviceDamaged, HostError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def crew(*tasks: Callable[[], None], size: int = 1, deadline: float = 20.0) -> WorkerPool:
    return WorkerPool(tasks, size=size, in_children=True, deadline=deadline)


def test_a_child_does_the_task_in_a_process_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "who"
    with crew(lambda: _write(file, str(os.getpid()))) as workers:
        workers.start(0)
        result = workers.wait()
    assert (result.task, result.error, result.stuck_pid) == (0, None, None)
    assert file.read_text() != str(os.getpid())


def test_tasks_of_its_own_that_begin_together_have_a_result_each() -> None:
    """As the records of devices in several lanes do, once a child is idle."""
    done: list[int] = []
    tasks = [lambda number=number: done.append(number) for number in range(4)]
    with WorkerPool(
        tasks, size=3, in_children=True, deadline=20, own=frozenset({1, 2, 3})
    ) as workers:
        workers.start(0)
        assert workers.wait().task == 0
        for number in (1, 2, 3):
            workers.start(number)
        assert sorted(workers.wait().task for _ in range(3)) == [1, 2, 3]
        assert not workers.is_busy
        assert workers.room == 2
    assert done == [1, 2, 3]


def _write(file: Path, text: str) -> None:
    file.write_text(text)


def _fail() -> None:
    message = "the driver refuses"
    raise HostError(message, "see dmesg")


def _break() -> None:
    message = "of its own"
    raise ValueError(message)


def _harm() -> None:
    message = "it fell off the bus"
    raise DeviceDamaged(message, "power-cycle it")


def test_damage_crosses_as_such() -> None:
    with crew(_fail, _harm) as workers:
        workers.start(0)
        assert not isinstance(workers.wait().error, DeviceDamaged)
        workers.start(1)
        error = workers.wait().error
        assert isinstance(error, DeviceDamaged)
        assert (error.message, error.hint) == ("it fell off the bus", "power-cycle it")


def test_an_error_crosses_with_its_remedy_and_the_child_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "after"
    with crew(_fail, _break, lambda: _write(file, "x")) as workers:
        workers.start(0)
        error = workers.wait().error
        assert isinstance(error, HostError)
        assert (error.message, error.hint) == ("the driver refuses", "see dmesg")
        workers.start(1)
        defect = workers.wait().error
        assert isinstance(defect, HostError)
        assert "ValueError: of its own" in defect.message
        workers.start(2)
        assert workers.wait().error is None
    assert file.exists()


@pytest.mark.parametrize(("letter", "whole"), [("x", True), ("\U0001f4a5", False)])
def test_a_long_message_crosses_whole_where_it_fits(letter: str, *, whole: bool) -> None:
    said = letter * 1500

    def fail() -> None:
        raise HostError(said, said)

    with WorkerPool([fail], size=1, in_children=True, deadline=5) as crew:
        crew.start(0)
        error = crew.wait().error
    assert isinstance(error, HostError)
    assert said.startswith(error.message)
    assert (error.message == error.hint == said) is whole


def test_warnings_cross_with_and_without_an_error() -> None:
    def warn() -> None:
        warnings.warn("the reader was not told", stacklevel=1)

    def warn_and_fail() -> None:
        warn()
        _fail()

    with crew(warn, warn_and_fail) as workers:
        for task, fails in ((0, False), (1, True)):
            workers.start(task)
            with pytest.warns(UserWarning, match="^the reader was not told$"):
                result = workers.wait()
            assert (result.error is not None) is fails


def test_many_long_warnings_leave_room_for_the_error() -> None:
    letter = "\U0001f4a5"
    long = letter * 500

    def fail() -> None:
        for number in range(9):
            warnings.warn(f"{number}{long}", stacklevel=1)
        raise HostError(long, long)

    with crew(fail) as workers:
        workers.start(0)
        with pytest.warns(UserWarning, match=letter) as told:
            error = workers.wait().error
    assert isinstance(error, HostError)
    assert set(error.message + error.hint) == {letter}
    assert [str(warning.message)[0] for warning in told] == ["0", "1", "2"]


def test_a_child_that_does_not_return_is_left_behind_at_the_deadline() -> None:
    with crew(lambda: time.sleep(120), deadline=0.2) as workers:
        workers.start(0)
        result = workers.wait()
    assert result.stuck_pid is not None
    _, status = os.waitpid(result.stuck_pid, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL


def test_a_child_that_is_killed_is_an_error() -> None:
    with crew(lambda: os.kill(os.getpid(), signal.SIGKILL)) as workers:
        workers.start(0)
        error = workers.wait().error
        assert isinstance(error, HostError)
        assert "was killed" in error.message


def test_tasks_run_side_by_side(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    os.mkfifo(here)
    os.mkfifo(there)

    def meet(mine: Path, other: Path) -> None:
        """Opening a FIFO waits for the other end: alone, either task would wait for ever."""
        first, second = sorted((mine, other))
        for path in (first, second):
            flags = os.O_WRONLY if path == mine else os.O_RDONLY
            os.close(os.open(path, flags))

    with crew(lambda: meet(here, there), lambda: meet(there, here), size=2) as workers:
        assert workers.room == 1
        workers.start(0)
        assert workers.room == 0
        assert workers.wait_a_moment() is None  # it takes its time, so another may begin
        assert workers.room == 1
        workers.start(1)
        assert workers.room == 0
        results = [workers.wait(), workers.wait()]
    assert {result.task for result in results} == {0, 1}
    assert all(result.error is None and result.stuck_pid is None for result in results)


def test_children_end_when_their_parent_dies(tmp_path: Path) -> None:
    """No child holds another's pipe open, and none waits for ever for an orphaned request."""
    file = tmp_path / "pids"
    parent = os.fork()
    if parent == 0:
        workers = crew(lambda: _append(file), lambda: _append(file), size=2)
        for task in (0, 1):
            workers.start(task)
        while len(file.read_text().split() if file.exists() else ()) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(parent, 0)
    pids = [int(text) for text in file.read_text().split()]
    assert len(set(pids)) == 2
    deadline = time.monotonic() + 20
    while any(_is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _append(file: Path) -> None:
    with file.open("a") as out:
        out.write(f"{os.getpid()}\n")


def _is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("in_children", [True, False])
def test_the_first_result_is_told_whoever_works(in_children: bool) -> None:  # noqa: FBT001 - pytest's
    workers = WorkerPool([lambda: None, _fail], size=4, in_children=in_children, deadline=20)
    with workers:
        workers.start(1)
        assert isinstance(workers.wait().error, HostError)
        assert not workers.is_busy


def test_a_worker_that_dies_is_replaced_by_another(tmp_path: Path) -> None:
    file = tmp_path / "after"
    with crew(lambda: os.kill(os.getpid(), signal.SIGKILL), lambda: _write(file, "x")) as workers:
        workers.start(0)
        assert workers.wait().error is not None
        workers.start(1)
        assert workers.wait().error is None
    assert file.exists()


def test_a_worker_that_is_killed_while_idle_is_replaced(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    with crew(lambda: _write(file, str(os.getpid()))) as workers:
        workers.start(0)
        assert workers.wait().error is None
        pid = int(file.read_text())
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        workers.start(0)
        assert workers.wait().error is None
    assert int(file.read_text()) != pid
