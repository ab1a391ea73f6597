"""Requests about persistent bindings and configuration files."""

from __future__ import annotations

from typing import ClassVar

from vfiomgr.engine.request import Request
from vfiomgr.pci.model import PciAddress
from vfiomgr.value import Value


class ForgetPersisted(Request, Value):
    """Remove the rules of functions, or all with `every`; drivers do not change now."""

    addresses: tuple[PciAddress, ...] = ()
    every: bool = False
    update_initramfs: bool = False
    kind: ClassVar[str] = "forget-persisted"


class ImportDriverctl(Request, Value):
    """Import driverctl entries for VFIO drivers; drivers do not change now."""

    update_initramfs: bool = False
    program: str | None = None
    kind: ClassVar[str] = "import-driverctl"


class FileChange(Value):
    """The text of a file before and after; None if the file does not exist."""

    path: str
    before: str | None
    after: str | None
    mode: int = 0o644


class ChangeFiles(Request, Value):
    """Replace configuration files of the host, in this order, all or none.

    A file may be replaced several times. No devices are involved, so no running kernel is needed.
    """

    summary: str
    changes: tuple[FileChange, ...]
    locks: tuple[str, ...]
    notes: tuple[str, ...] = ()
    already: tuple[str, ...] = ()
    """The note if there is nothing to change."""
    kind: ClassVar[str] = "change-files"

    is_about_files: ClassVar[bool] = True

    @property
    def only_paths(self) -> tuple[str, ...]:
        """The files that it replaces."""
        return tuple(dict.fromkeys(change.path for change in self.changes))

    def inverse(self) -> ChangeFiles:
        """Return the request that undoes all changes."""
        back = (FileChange(c.path, c.after, c.before, c.mode) for c in reversed(self.changes))
        return ChangeFiles(f"undo: {self.summary}", tuple(back), self.locks)
