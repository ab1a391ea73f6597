"""Faults at chosen operations, and the two ways in which a fake kernel ends a test's code."""

from __future__ import annotations

import fcntl
import json
import os
import select
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NoReturn

from tests.fakes.sysfs import read_file
from vfiomgr.paths import HostPath

if TYPE_CHECKING:
    from collections.abc import Iterator

_TESTS = os.getpid()

FaultKind = Literal["fail", "fail-after", "kill", "kill-after", "vanish"]
OperationKind = Literal[
    "write",
    "replace",
    "remove",
    "make-directory",
    "load-module",
    "change-access",
    "run-program",
]


class PowerCut(BaseException):
    """The process is gone at this point: no handler of it may run on and touch the host."""


class WouldBlockForEver(AssertionError):  # noqa: N818 - it names what happened
    """A real kernel would not return from this call: code under test should never have made it."""


@dataclass(frozen=True)
class Operation:
    """One thing that was asked of the host; `text` is what was written, or empty."""

    kind: OperationKind
    path: HostPath
    text: str = ""

    def __str__(self) -> str:
        """For the message of an assertion."""
        return f"{self.kind} {self.path} {self.text!r}".rstrip()


@dataclass(frozen=True)
class Fault:
    """What happens at the operation with the number `at`, counted from 1 since the boot."""

    at: int
    kind: FaultKind
    errno: int = 0
    address: str = ""


class Record:
    """All operations so far, in a file: those of child processes count too."""

    def __init__(self, file: str) -> None:
        self._file = file
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        with open(self._file, "w", encoding="utf-8"):
            pass

    def add(self, operation: Operation) -> int:
        """Note one operation and tell its number."""
        line = json.dumps([operation.kind, operation.path, operation.text]) + "\n"
        descriptor = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)
        return len(self)

    def __len__(self) -> int:
        """How many there were."""
        return read_file(self._file).count(b"\n")

    def all(self) -> list[Operation]:
        """The operations in their order."""
        with open(self._file, encoding="utf-8") as file:
            rows = [json.loads(line) for line in file]
        return [Operation(kind, HostPath(path), text) for kind, path, text in rows]


def sleep_while_anybody_cares() -> None:
    """Sleep until killed, or until the process that forked this one, or all of the tests, is gone.

    As in a kernel: without waking up meanwhile.
    """
    try:
        waiting = [os.pidfd_open(os.getppid()), os.pidfd_open(_TESTS)]
    except ProcessLookupError:
        return
    select.select(waiting, [], [])


class Stuck:
    """Calls that the kernel never returned from, as marks in a directory: children leave them too.

    With `really`, the caller sleeps as it would in a kernel; else it gets WouldBlockForEver.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self.really = False
        os.makedirs(directory, exist_ok=True)
        self._lock = -1

    @contextmanager
    def one_at_a_time(self) -> Iterator[None]:
        """Keep the processes of a fake kernel from changing it at once, until one hangs."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._lock = os.open(f"{self._directory}.lock", flags, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            os.close(self._lock)

    def names(self) -> list[str]:
        """The devices whose removal hangs."""
        return sorted(os.listdir(self._directory))

    def forever(self, name: str, why: str, driver: str = "") -> NoReturn:
        """Hang in the removal of a device from its driver."""
        if name not in self.names():
            with open(self._mark(name), "w", encoding="utf-8") as file:
                file.write(driver)
        if self.really:
            fcntl.flock(self._lock, fcntl.LOCK_UN)
            sleep_while_anybody_cares()
        message = f"{name}: the kernel would not return, because {why}"
        raise WouldBlockForEver(message)

    def driver(self, name: str) -> str:
        """The driver whose removal from a device hangs."""
        with open(self._mark(name), encoding="utf-8") as file:
            return file.read()

    def forget(self, name: str) -> None:
        """The removal of a device has come to its end."""
        if name in self.names():
            os.unlink(self._mark(name))

    def _mark(self, name: str) -> str:
        return os.path.join(self._directory, name)
