"""Requests about what is kept for the next boot, and about files of the configuration."""

from __future__ import annotations

from typing import ClassVar

from vfiomgr.engine.request import Request
from vfiomgr.pci.model import PciAddress
from vfiomgr.value import Value


class ForgetPersisted(Request, Value):
    """Remove the rules of functions, of all with `every`; nothing moves now."""

    addresses: tuple[PciAddress, ...] = ()
    every: bool = False
    update_initramfs: bool = False
    kind: ClassVar[str] = "forget-persisted"


class ImportDriverctl(Request, Value):
    """Take over what driverctl keeps for VFIO drivers; nothing moves now."""

    update_initramfs: bool = False
    program: str | None = None
    kind: ClassVar[str] = "import-driverctl"


class FileChange(Value):
    """A file's whole text before and after; None where there is none."""

    path: str
    before: str | None
    after: str | None
    mode: int = 0o644


class ChangeFiles(Request, Value):
    """Exchange files of the host's configuration, in this order, all or none.

    A file may be exchanged several times. Devices have no part in it: no kernel need be there.
    """

    summary: str
    changes: tuple[FileChange, ...]
    locks: tuple[str, ...]
    notes: tuple[str, ...] = ()
    already: tuple[str, ...] = ()
    """What is told where there is nothing to change."""
    kind: ClassVar[str] = "change-files"

    is_about_files: ClassVar[bool] = True

    @property
    def only_paths(self) -> tuple[str, ...]:
        """The files that it exchanges."""
        return tuple(dict.fromkeys(change.path for change in self.changes))

    def inverse(self) -> ChangeFiles:
        """What takes all of it back."""
        back = (FileChange(c.path, c.after, c.before, c.mode) for c in reversed(self.changes))
        return ChangeFiles(f"take back: {self.summary}", tuple(back), self.locks)
