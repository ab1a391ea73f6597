"""Programs of the fake host: a file at its place in the tree decides whether one can be run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.fakes.sysfs import Sysfs

_PATH = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")


@dataclass(frozen=True)
class Said:
    """How a program ended, and what it said."""

    code: int = 0
    output: str = ""
    error: str = ""


HANGS = Said(-9)
"""It did not come to its end, and was killed when somebody lost patience."""


class Program(Protocol):
    """One program."""

    def changes(self, arguments: Sequence[str]) -> bool:
        """Whether it does more than tell."""
        ...

    def run(self, arguments: Sequence[str]) -> Said:
        """Do it."""
        ...


class _Dmesg:
    """Prints what the tree has as /var/log/dmesg, for the log of the kernel."""

    def __init__(self, sysfs: Sysfs) -> None:
        self._sysfs = sysfs

    def changes(self, _arguments: Sequence[str]) -> bool:
        """Whether it does more than tell."""
        return False

    def run(self, _arguments: Sequence[str]) -> Said:
        """Print it."""
        log = "/var/log/dmesg"
        return Said(output=self._sysfs.get(log) if self._sysfs.exists(log) else "")


class Programs:
    """All that the fake host knows, by their paths."""

    def __init__(self, sysfs: Sysfs) -> None:
        self._sysfs = sysfs
        self.known: dict[str, Program] = {}

    def install(self, path: str) -> None:
        """Put the file of a program in its place, as its package does."""
        self._sysfs.put_bytes(path, b"#!/bin/false\n", 0o755)

    def find(self, name: str) -> Program | None:
        """The program of a path, or of a name on the PATH; None where its file is absent.

        dmesg is always there.
        """
        if name == "dmesg":
            return _Dmesg(self._sysfs)
        paths = [name] if name.startswith("/") else [f"{place}/{name}" for place in _PATH]
        there = (path for path in paths if self._sysfs.exists(path))
        return self.known.get(next(there, ""))
