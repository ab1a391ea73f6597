"""Children that read for this process: what the kernel may never answer, and large hosts in parts.

Reading `driver_override`, `sriov_numvfs` and, in some kernels, `uevent` takes the lock of the
device (device_lock in drivers/pci/pci-sysfs.c, drivers/pci/iov.c and drivers/base/core.c), which a
hanging unbind keeps until it returns. A mark names the process that hangs.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, TypeVar, cast

from vfiomgr.documents.text import parse_json
from vfiomgr.paths import RUNTIME, HostPath

if TYPE_CHECKING:
    import select
    import subprocess
    from io import FileIO

    from vfiomgr.host.tree import HostTree

    Questions = Mapping[str, Callable[[], Iterable[str | None]]]
    Item = TypeVar("Item")
    Found = TypeVar("Found")

DEADLINE = 1.0
"""Seconds for one answer; the kernel answers in microseconds, or never."""
PATIENCE = 60.0
"""Seconds for a child to get to the question, on an overloaded machine."""
_LOOK, _LOOKS = 0.25, 4
"""Seconds of inactivity, seen so often in a row, that show that a process waits for the kernel.

Once is not enough: on a machine that is short of memory, a process also waits for its own pages.
"""
_CHUNK = 1 << 16
_KILL = 9
"""SIGKILL on every Linux."""


IGNORED = (1, 2, 15)
"""SIGHUP, SIGINT and SIGTERM, sent to an entire terminal or service: the parent handles them."""


def become_silent(closed: Iterable[int] = ()) -> None:
    """In a child: close what a reader of the parent waits for, and ignore signals."""
    import signal  # noqa: PLC0415 - slow to import, and the parent needs none

    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    for descriptor in closed:
        os.close(descriptor)


def start_child(answer: Callable[[FileIO], object]) -> tuple[int, int]:
    """Start a child that only answers; the pipe from which its answer comes, and its PID."""
    source, sink = os.pipe()
    try:
        pid = os.fork()
    except OSError:
        os.close(source)
        os.close(sink)
        raise
    if pid == 0:
        _answer(answer, sink)
    os.close(sink)
    return source, pid


def _answer(answer: Callable[[FileIO], object], sink: int) -> None:
    """In the child: close all else, which must not keep anybody's lock, and answer."""
    status = 1
    try:
        become_silent()
        os.closerange(3, sink)
        os.closerange(sink + 1, os.sysconf("SC_OPEN_MAX"))
        with open(sink, "wb", buffering=0) as out:
            answer(out)
        status = 0
    finally:
        os._exit(status)


def enter_namespace(place: str, kind: int) -> None:
    """In a child: enter the namespace of a file below /proc (setns(2)).

    Raises:
        OSError: it is not possible.
    """
    import ctypes  # noqa: PLC0415 - slow, and few need it

    descriptor = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None).setns(descriptor, kind):
            message = "cannot enter the namespace"
            raise OSError(message)
    finally:
        os.close(descriptor)


def status_of(child: int) -> int | None:
    """The status of a child that has ended; None if SIGCHLD is ignored, as nobody has it then."""
    with suppress(ChildProcessError):
        return os.waitpid(child, 0)[1]
    return None


def read_attributes(
    tree: HostTree, groups: Mapping[str, Sequence[HostPath]]
) -> dict[str, tuple[str | None, ...] | None]:
    """The attributes of each group, in order; None for a group without an answer."""
    questions = {name: partial(_read, tree, paths) for name, paths in groups.items()}
    found: dict[str, tuple[str | None, ...] | None] = {}
    while left := {name: question for name, question in questions.items() if name not in found}:
        found |= ask(tree, left)
        if len(found) < len(groups):
            found[next(name for name in groups if name not in found)] = None
    return found


def _read(tree: HostTree, paths: Sequence[HostPath]) -> Iterable[str | None]:
    return map(tree.read, paths)


def ask(tree: HostTree, questions: Questions) -> dict[str, tuple[str | None, ...]]:
    """The answers up to the first question without one; it and later ones are omitted."""
    if not tree.can_hang:
        return {name: tuple(question()) for name, question in questions.items()}
    source, pid = start_child(partial(_write, questions))
    try:
        lines, has_ended = _receive(source, pid)
    finally:
        os.close(source)
    if has_ended:
        status_of(pid)
    else:
        os.kill(pid, _KILL)  # it dies as soon as the kernel lets go of it
    return dict(zip(questions, map(values_of, lines), strict=False))


def ask_each(tree: HostTree, questions: Questions) -> dict[str, tuple[str | None, ...]]:
    """The answers of all questions, except those without one; each has its own child."""
    found: dict[str, tuple[str | None, ...]] = {}
    left = dict(questions)
    while left:
        answers = ask(tree, left)
        found |= answers
        for name in (*answers, *(name for name in tuple(left)[len(answers) :][:1])):
            del left[name]
    return found


def _write(questions: Questions, out: FileIO) -> None:
    """Write one line for each question, as soon as it is answered."""
    out.writelines(_line(question()) for question in questions.values())


def _line(values: Iterable[str | None]) -> bytes:
    """Values separated by tabs; None becomes empty, others begin with `=`."""
    fields = (b"" if value is None else b"=" + value.encode("unicode_escape") for value in values)
    return b"\t".join(fields) + b"\n"


def values_of(line: bytes) -> tuple[str | None, ...]:
    """The values in a line of `_line`."""
    fields = line.split(b"\t")
    return tuple(field[1:].decode("unicode_escape") if field else None for field in fields)


def _receive(source: int, child: int) -> tuple[list[bytes], bool]:
    """The complete lines received, and whether the child finished."""
    import select  # noqa: PLC0415 - slow to import

    poll = select.poll()
    poll.register(source, select.POLLIN)
    data = b""
    while has_answer(poll, child):
        chunk = os.read(source, _CHUNK)
        if not chunk:
            return data.split(b"\n")[:-1], True
        data += chunk
    return data.split(b"\n")[:-1], False


def has_answer(poll: select.poll, child: int) -> bool:
    """Wait for the next answer, or until the child is seen to wait for the kernel."""
    import time  # noqa: PLC0415 - slow to import

    end = time.monotonic() + PATIENCE
    while not poll.poll(DEADLINE * 1000):
        if time.monotonic() > end or not coming_forward([f"/proc/{child}/status"]):
            return bool(poll.poll(0))
    return True


def coming_forward(status_files: Iterable[str]) -> set[str]:
    """Which of these processes run, wait for a CPU or have ended: they are not stuck."""
    import time  # noqa: PLC0415 - slow to import

    before = {file: _activity(file) for file in status_files}
    found = {file for file, now in before.items() if not now or "R (running)" in now}
    for _ in range(_LOOKS):
        if found:
            break
        time.sleep(_LOOK)
        found = {file for file, activity in before.items() if _activity(file) != activity}
    return found


def _activity(status_file: str) -> tuple[str, ...]:
    """The state of a process and its number of context switches (proc_pid_status(5))."""
    try:
        with open(status_file, encoding="utf-8", errors="replace") as file:
            lines = [line.partition(":") for line in file]
    except (FileNotFoundError, ProcessLookupError):
        return ()  # it has ended
    return tuple(
        value.strip()
        for key, _, value in lines
        if key in ("State", "voluntary_ctxt_switches", "nonvoluntary_ctxt_switches")
    )


_MARKS = RUNTIME / "stuck"
_PROC = HostPath("/proc")
_START_TIME = 19
"""Index of starttime after the command name (proc(5), /proc/PID/stat)."""


def mark(tree: HostTree, device: str, pid: int, what: str) -> None:
    """Record that a process waits in the kernel for a device."""
    import json  # noqa: PLC0415 - slow to import, and lists need none

    tree.make_directory(_MARKS)
    record = {"pid": pid, "started": _start_time(tree, pid), "what": what}
    tree.replace(_MARKS / device, json.dumps(record).encode())


def read_marks(tree: HostTree) -> dict[str, str]:
    """The operation that each stuck device waits for; unknown if its record cannot be read."""
    names = tree.children(_MARKS)
    if not names:
        return {}

    found: dict[str, str] = {}
    for name in names:
        text = tree.read(_MARKS / name)
        if name.startswith(".") or (text is None and not tree.exists(_MARKS / name)):
            continue  # not in its place yet, or removed meanwhile
        try:
            record = parse_json(text or "")
            if _start_time(tree, record["pid"]) == record["started"] is not None:
                found[name] = f"{record['what']} (PID {record['pid']})"
        except (ValueError, KeyError, TypeError):
            found[name] = f"an unknown operation ({_MARKS / name} is not a record of vfiomgr)"
    return found


def _start_time(tree: HostTree, pid: int) -> str | None:
    """The start time of a process, which distinguishes reused PIDs; None if it ended."""
    _, _, fields = (tree.read(_PROC / str(pid) / "stat") or "").rpartition(")")
    words = fields.split()
    if len(words) <= _START_TIME or words[0] == "Z":
        return None
    return words[_START_TIME]


_BYTES = 1 << 16
_ENDING = 0.5
"""Seconds that a killed process may take to end."""


class AttributeReader:
    """Reads attributes as `read_attributes` in a process that is kept, and replaced if stuck.

    Forking a process of 50 MiB for each event takes milliseconds, and a child that is kept would
    share less and less of its memory: this one runs a small program, `host/answering.py`.
    """

    def __init__(self, tree: HostTree) -> None:
        self._tree = tree
        self._process: subprocess.Popen[bytes] | None = None

    def read_attributes(
        self, groups: Mapping[str, Sequence[HostPath]]
    ) -> dict[str, tuple[str | None, ...] | None]:
        """The attributes of each group, in order; None for a group without an answer."""
        return {name: self._read(paths) for name, paths in groups.items()}

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None and process.stdin is not None and process.stdout is not None:
            import subprocess  # noqa: PLC0415 - slow to import

            process.stdin.close()
            process.stdout.close()
            process.kill()
            with suppress(subprocess.TimeoutExpired):  # it dies when the kernel lets go of it
                process.wait(_ENDING)

    def _read(self, paths: Sequence[HostPath]) -> tuple[str | None, ...] | None:
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = self._start()
        process = self._process
        assert process.stdin is not None  # noqa: S101 - it was asked for
        assert process.stdout is not None  # noqa: S101
        import select  # noqa: PLC0415 - slow to import

        places = (os.fsencode(self._tree.locate(path)) for path in paths)
        os.write(process.stdin.fileno(), b"\0".join(places) + b"\n")
        poll = select.poll()
        poll.register(process.stdout, select.POLLIN)
        data = b""
        while not data.endswith(b"\n"):
            chunk = (
                os.read(process.stdout.fileno(), _BYTES) if has_answer(poll, process.pid) else b""
            )
            if not chunk:
                self.close()
                return None
            data += chunk
        return values_of(data[:-1])

    def _start(self) -> subprocess.Popen[bytes]:
        import subprocess  # noqa: PLC0415 - slow to import
        import sys  # noqa: PLC0415

        from vfiomgr.host import answering  # noqa: PLC0415

        return subprocess.Popen(  # noqa: S603 - a program of ours
            (sys.executable, "-I", "-S", answering.__file__),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )


_LEAST_ITEMS = 256
"""Items for each process: reading them takes some 30 ms, a fork and its answer a few."""
_MOST_PROCESSES = 4
"""Processes; more gain little, and a host has other work."""
_PART = 1 << 20


def in_parts(
    tree: HostTree, read: Callable[[Sequence[Item]], list[Found]], items: Sequence[Item]
) -> list[Found]:
    """The results of `read` for all items, in order; children do it for parts of them.

    What `read` returns is copied from the children; what else it changes there is lost. The part of
    a child that fails is done here.
    """

    def work(part: Sequence[Item]) -> list[Found]:
        with tree.closer.together():
            return read(part)

    count = min(_MOST_PROCESSES, len(items) // _LEAST_ITEMS)
    if count > 1:
        count = 1 if tree.reads_alone or _has_threads() else min(count, _processors())
    if count <= 1:
        return work(items)
    import pickle  # noqa: PLC0415 - slow to import, and few hosts are that large

    size = -(-len(items) // count)
    parts = [items[start : start + size] for start in range(0, len(items), size)]
    children: deque[tuple[int, int]] = deque()
    try:
        with suppress(OSError):  # no more processes or files: a part without a child is done here
            for part in parts[1:]:
                children.append(start_child(partial(_write_result, work, part)))
        found = work(parts[0])
        for part in parts[1:]:
            data = _received(*children[0]) if children else None
            if children:
                children.popleft()
            # Of this program's own child, through a pipe of its own.
            found += work(part) if data is None else cast("list[Found]", pickle.loads(data))  # noqa: S301
    finally:
        for source, pid in children:
            _end(source, pid)
    return found


def _end(source: int, child: int) -> None:
    """End a child whose result nobody waits for."""
    with suppress(OSError):  # its pipe was closed
        os.close(source)
    with suppress(ProcessLookupError):
        os.kill(child, 9)
        status_of(child)


def _processors() -> int:
    return len(os.sched_getaffinity(0))


def _has_threads() -> bool:
    """Whether a child could wait for a lock that a thread of this process holds."""
    try:
        return len(os.listdir("/proc/self/task")) > 1
    except OSError:
        return True  # nobody knows, in a root without /proc


def _write_result(
    work: Callable[[Sequence[Item]], list[Found]], part: Sequence[Item], out: FileIO
) -> None:
    """In the child: write the result."""
    import pickle  # noqa: PLC0415 - as above

    data = memoryview(pickle.dumps(work(part), pickle.HIGHEST_PROTOCOL))
    while data:
        data = data[out.write(data) or 0 :]


def _received(source: int, child: int) -> bytes | None:
    """What a child wrote; None if it failed."""
    chunks: list[bytes] = []
    with open(source, "rb", buffering=0) as pipe:
        while chunk := pipe.read(_PART):
            chunks.append(chunk)
    return b"".join(chunks) if status_of(child) == 0 else None
