"""What can go wrong in the laboratory.

LabError
├── BuildError        the kernel, its modules or the initial file system could not be made
└── GuestError        the guest did not bring its command to an end
    ├── GuestTimeout
    ├── GuestPanic
    └── GuestDied
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_TAIL_LINES = 40


class LabError(Exception):
    """The laboratory failed, not what it tests."""


class BuildError(LabError):
    """A part of the guest could not be made."""


class GuestError(LabError):
    """The guest ended without the exit status of its command."""

    def __init__(self, what: str, *, console: Path) -> None:
        super().__init__(f"{what}\nconsole log: {console}\n{last_lines(console)}")


class GuestTimeout(GuestError):
    """The command took longer than it was given."""


class GuestPanic(GuestError):
    """The guest's kernel panicked."""


class GuestDied(GuestError):
    """QEMU ended, or the guest powered off, before the command did."""


def last_lines(log: Path, count: int = _TAIL_LINES) -> str:
    """Return the end of a log, indented; a note where there is none."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return f"  (no {log.name})"
    return "\n".join(f"  {line}" for line in lines[-count:]) or f"  ({log.name} is empty)"
