"""Reading a large host on several processors: children read parts of it meanwhile."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar, cast

from vfiomgr.host.bounded import become_silent, keep_only

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vfiomgr.host.tree import HostTree

    Item = TypeVar("Item")
    Found = TypeVar("Found")

_LEAST = 256
"""Items for each process: reading them takes some 30 ms, a fork and its answer a few."""
_MOST = 4
"""Processes; more gain little, and a host has other work."""
_CHUNK = 1 << 20


def in_parts(
    tree: HostTree, work: Callable[[Sequence[Item]], list[Found]], items: Sequence[Item]
) -> list[Found]:
    """The results of `work` for all items, in order; children do it for parts of them.

    What `work` returns is copied from the children; what else it changes there is lost. The part of
    a child that fails is done here.
    """
    count = min(_MOST, len(items) // _LEAST)
    if count > 1:
        count = 1 if tree.reads_alone or _has_threads() else min(count, _processors())
    if count <= 1:
        return work(items)
    import pickle  # noqa: PLC0415 - slow to import, and few hosts are that large

    size = -(-len(items) // count)
    parts = [items[start : start + size] for start in range(0, len(items), size)]
    children: list[tuple[int, int, Sequence[Item]]] = []
    for part in parts[1:]:
        source, sink = os.pipe()
        pid = os.fork()
        if pid == 0:
            _answer(work, part, sink)
        os.close(sink)
        children.append((pid, source, part))
    found = work(parts[0])
    for pid, source, part in children:
        data = _receive(source, pid)
        # Of this program's own child, through a pipe of its own.
        found += work(part) if data is None else cast("list[Found]", pickle.loads(data))  # noqa: S301
    return found


def _processors() -> int:
    return len(os.sched_getaffinity(0))


def _has_threads() -> bool:
    """Whether a child could wait for a lock that a thread of this process holds."""
    return len(os.listdir("/proc/self/task")) > 1


def _answer(work: Callable[[Sequence[Item]], list[Found]], part: Sequence[Item], sink: int) -> None:
    """In the child: write the result, or end with a status."""
    import pickle  # noqa: PLC0415 - as above

    status = 1
    try:
        become_silent()
        keep_only(sink)
        with open(sink, "wb", buffering=0) as out:
            data = memoryview(pickle.dumps(work(part), pickle.HIGHEST_PROTOCOL))
            while data:
                data = data[out.write(data) or 0 :]
        status = 0
    finally:
        os._exit(status)


def _receive(source: int, child: int) -> bytes | None:
    """What a child wrote; None if it failed."""
    chunks: list[bytes] = []
    with open(source, "rb", buffering=0) as pipe:
        while chunk := pipe.read(_CHUNK):
            chunks.append(chunk)
    status = 1
    with suppress(ChildProcessError):  # whoever ignores SIGCHLD has no children to wait for
        status = os.waitpid(child, 0)[1]
    return b"".join(chunks) if status == 0 else None
