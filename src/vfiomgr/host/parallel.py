"""Reading a large host on several processors: children read parts of it meanwhile."""

from __future__ import annotations

import os
from collections import deque
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, TypeVar, cast

from vfiomgr.host.bounded import start_child, status_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from io import FileIO

    from vfiomgr.host.tree import HostTree

    Item = TypeVar("Item")
    Found = TypeVar("Found")

_LEAST = 256
"""Items for each process: reading them takes some 30 ms, a fork and its answer a few."""
_MOST = 4
"""Processes; more gain little, and a host has other work."""
_CHUNK = 1 << 20


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

    count = min(_MOST, len(items) // _LEAST)
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
                children.append(start_child(partial(_answer, work, part)))
        found = work(parts[0])
        for part in parts[1:]:
            data = _receive(*children[0]) if children else None
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


def _answer(
    work: Callable[[Sequence[Item]], list[Found]], part: Sequence[Item], out: FileIO
) -> None:
    """In the child: write the result."""
    import pickle  # noqa: PLC0415 - as above

    data = memoryview(pickle.dumps(work(part), pickle.HIGHEST_PROTOCOL))
    while data:
        data = data[out.write(data) or 0 :]


def _receive(source: int, child: int) -> bytes | None:
    """What a child wrote; None if it failed."""
    chunks: list[bytes] = []
    with open(source, "rb", buffering=0) as pipe:
        while chunk := pipe.read(_CHUNK):
            chunks.append(chunk)
    return b"".join(chunks) if status_of(child) == 0 else None
