"""Attributes under locks, read by a process that is kept: a fork for each event would cost more.

Forking a process of 50 MiB takes milliseconds, and a child that is kept would share less and less
of its memory. Therefore this one runs a small program of its own, `host/answering.py`.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from vfiomgr.host import answering
from vfiomgr.host.bounded import has_answer, values_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vfiomgr.host.tree import HostTree
    from vfiomgr.paths import HostPath

_BYTES = 1 << 16
_ENDING = 0.5
"""Seconds that a killed process may take to end."""


class AttributeReader:
    """Reads attributes like `bounded.read_attributes`; its process is replaced if it gets stuck."""

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
        return subprocess.Popen(  # noqa: S603 - a program of ours
            (sys.executable, "-I", "-S", answering.__file__),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
