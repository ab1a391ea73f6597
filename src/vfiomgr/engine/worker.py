"""Child processes that carry out steps, so that the parent never hangs in the kernel.

A driver's remove may wait forever, and a process inside it cannot be killed. So a child carries
out the step; the parent waits with a deadline and continues even if the child cannot.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Self

from vfiomgr.errors import DeviceDamaged, HostError, VfiomgrError
from vfiomgr.host.bounded import IGNORED, become_silent
from vfiomgr.value import Value

if TYPE_CHECKING:
    Task = Callable[[], None]

_MESSAGE_LIMIT = 4096
"""PIPE_BUF: a message of this length is written, and read, in one piece."""

_MOST_WARNINGS = 3
"""Maximum number of warnings of a task; their beginnings fit in beside an error."""
_PATIENCE = 0.05
"""Seconds before another worker is forked: a fork costs more than most steps."""


class Result(Value):
    """The result of a task: nothing (done), an error, or a child that has not returned."""

    task: int
    error: BaseException | None = None
    stuck_pid: int | None = None


class InlineWorker:
    """Carries out tasks in this process, where no kernel can hang."""

    def __init__(self, tasks: Sequence[Task], *, is_kept: bool = True) -> None:
        self.is_alive = is_kept
        self._tasks = tasks
        self._result: Result | None = None

    def start(self, task: int, _seconds: float) -> None:
        """Carry out the entire task immediately."""
        try:
            self._tasks[task]()
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - told to whoever waits
            self._result = Result(task, error)
        else:
            self._result = Result(task)

    def result(self) -> Result:
        """What came of it."""
        assert self._result is not None  # noqa: S101 - a task was started
        return self._result

    def stop(self) -> None:
        """Nothing to stop."""


class ForkedWorker:
    """Carries out tasks in a process of its own."""

    def __init__(self, tasks: Sequence[Task], closed: Sequence[int] = ()) -> None:
        """Fork; `closed` are descriptors of the parent that the child must close.

        The child keeps the locks: no other process begins while it may still write.
        """
        self.task = -1
        self.due = 0.0
        self.is_alive = True
        requests, self._requests = os.pipe()
        self.replies, replies = os.pipe()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)  # until the child ignores them
        self.pid = os.fork()
        if self.pid == 0:
            _serve(tasks, requests, replies, (self._requests, self.replies, *closed))
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(requests)
        os.close(replies)

    def start(self, task: int, seconds: float) -> None:
        """Give the child a task with this time limit."""
        self.task = task
        self.due = time.monotonic() + seconds
        os.write(self._requests, b"%d" % task)

    def result(self) -> Result:
        """Read the result."""
        message = os.read(self.replies, _MESSAGE_LIMIT)
        if not message:
            self.is_alive = False
            cause = "the process that carried out the step was killed"
            return Result(self.task, HostError(cause, "run the command again; see dmesg"))
        error, told = json.loads(message)
        for text in told:
            warnings.warn(text, stacklevel=2)
        return Result(self.task, _error(*error) if error else None)

    @property
    def pipes(self) -> tuple[int, int]:
        """The parent's ends."""
        return (self._requests, self.replies)

    def abandon(self) -> Result:
        """Abandon a child that does not return; it dies when the kernel returns."""
        os.kill(self.pid, signal.SIGKILL)
        self._close()
        return Result(self.task, stuck_pid=self.pid)

    def stop(self) -> None:
        """Stop the child, which is idle."""
        self._close()
        with suppress(ChildProcessError):  # whoever ignores SIGCHLD has no children to wait for
            os.waitpid(self.pid, 0)

    def _close(self) -> None:
        for descriptor in self.pipes:
            os.close(descriptor)


class _Error(HostError):
    """An error received from a child."""


class _DamageError(_Error, DeviceDamaged):
    """One that undoing the step does not repair."""


def _error(message: str, hint: str, damage: str = "") -> _Error:
    return _DamageError(message, hint) if damage else _Error(message, hint)


def _serve(tasks: Sequence[Task], requests: int, replies: int, closed: Sequence[int]) -> None:
    """Serve requests in the child until the parent is gone."""
    status = 1
    try:
        become_silent(closed)
        while request := os.read(requests, _MESSAGE_LIMIT):
            os.write(replies, _attempt(tasks[int(request)]))
        status = 0
    finally:
        os._exit(status)


def _attempt(task: Task) -> bytes:
    """Carry out a task and report the result: an error's message, remedy, kind, and warnings."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            task()
        except VfiomgrError as error:
            said = [error.message, error.hint]
            said += ["damage"] if isinstance(error, DeviceDamaged) else []
        except Exception as error:  # noqa: BLE001 - a defect is also reported and rolled back
            said = [f"unexpected {type(error).__name__}: {error}", "this is a bug in vfiomgr"]
    told = [str(warning.message) for warning in caught[:_MOST_WARNINGS]]
    for limit in (_MESSAGE_LIMIT, _MESSAGE_LIMIT // 64):  # JSON may take 12 bytes for a character
        message = json.dumps([[text[:limit] for text in texts] for texts in (said, told)]).encode()
        if len(message) <= _MESSAGE_LIMIT:
            break
    return message


class WorkerPool:
    """The workers of one run; another one is forked only while all others are busy."""

    def __init__(  # noqa: PLR0913 - all but the tasks are about them
        self,
        tasks: Sequence[Task],
        *,
        size: int,
        in_children: bool,
        deadline: float,
        closed: Sequence[int] = (),
        own: frozenset[int] = frozenset(),
    ) -> None:
        """`own` tasks do not touch devices, so this process carries them out itself."""
        self._own = own
        self._deadline = deadline
        self._tasks = tasks
        self._in_children = in_children
        self._closed = tuple(closed)
        self._idle: list[ForkedWorker | InlineWorker] = []
        self._busy: list[ForkedWorker | InlineWorker] = []
        self._size = size if in_children else 1
        self._is_slow = False

    @property
    def room(self) -> int:
        """The number of tasks that may begin now."""
        may_grow = self._may_grow and (self._is_slow or not self._busy)
        return len(self._idle) + may_grow

    @property
    def _may_grow(self) -> bool:
        return len(self._idle) + len(self._busy) < self._size

    @property
    def is_busy(self) -> bool:
        """Whether a result is still outstanding."""
        return bool(self._busy)

    def start(self, task: int, seconds: float | None = None) -> None:
        """Begin a task, with its own deadline or the common one."""
        self._is_slow = False
        if task in self._own:
            once = InlineWorker(
                self._tasks, is_kept=False
            )  # several begin before one is waited for
            once.start(task, self._deadline)
            self._busy.append(once)
            return
        while True:
            worker = self._idle.pop() if self._idle else self._make()
            try:
                worker.start(task, seconds or self._deadline)
            except BrokenPipeError:
                worker.stop()  # somebody has killed it while it was idle
            else:
                self._busy.append(worker)
                return

    def _make(self) -> ForkedWorker | InlineWorker:
        """Fork another worker; it must close its siblings' pipes, or they outlive the parent."""
        if not self._in_children:
            return InlineWorker(self._tasks)
        siblings = [
            worker for worker in (*self._idle, *self._busy) if isinstance(worker, ForkedWorker)
        ]
        pipes = [descriptor for child in siblings for descriptor in child.pipes]
        return ForkedWorker(self._tasks, (*self._closed, *pipes))

    def wait(self) -> Result:
        """The next result; a child past its deadline is abandoned."""
        while (result := self.wait_a_moment()) is None:
            continue
        return result

    def wait_a_moment(self) -> Result | None:
        """The next result; None if all take longer, so that another task could begin."""
        worker = self._next()
        if worker is None:
            self._is_slow = True
            return None
        self._busy.remove(worker)
        if isinstance(worker, ForkedWorker) and not _is_readable([worker], 0):
            return worker.abandon()
        result = worker.result()
        if worker.is_alive:
            self._idle.append(worker)
        else:
            worker.stop()
        return result

    def _next(self) -> ForkedWorker | InlineWorker | None:
        """The first worker that is ready or late; None if another could be forked."""
        done = next((worker for worker in self._busy if isinstance(worker, InlineWorker)), None)
        if done is not None:
            return done
        children = [worker for worker in self._busy if isinstance(worker, ForkedWorker)]
        first = min(children, key=lambda child: child.due)
        left = max(0.0, first.due - time.monotonic())
        is_short = self._may_grow and not self._is_slow and left > _PATIENCE
        ready = _is_readable(children, _PATIENCE if is_short else left)
        return ready or (None if is_short else first)

    def __enter__(self) -> Self:
        """Stay for the run."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop all workers."""
        for worker in self._idle:
            worker.stop()


def _is_readable(children: Sequence[ForkedWorker], seconds: float) -> ForkedWorker | None:
    """Whether the child has answered within this time."""
    poll = select.poll()
    for child in children:
        poll.register(child.replies, select.POLLIN)
    ready = {descriptor for descriptor, _ in poll.poll(seconds * 1000)}
    return next((child for child in children if child.replies in ready), None)
