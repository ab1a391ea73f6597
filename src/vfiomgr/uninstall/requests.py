"""The request to remove what vfiomgr wrote on a host."""

from __future__ import annotations

from typing import ClassVar

from vfiomgr.engine.plan import Request
from vfiomgr.pci.model import PciAddress
from vfiomgr.persistence.steps import ChangeFiles
from vfiomgr.tuning.model import TUNED
from vfiomgr.value import Value


class Uninstall(Request, Value):
    """Remove what vfiomgr wrote; devices stay on their drivers without `unbind`."""

    files: ChangeFiles
    """Files without a snapshot: entries of runtimes, and files of Kata and the node agent."""
    unbind: bool = False
    keep: tuple[PciAddress, ...] = ()
    """With `unbind`: functions that stay on their drivers."""
    update_initramfs: bool = True
    kind: ClassVar[str] = "uninstall"

    @property
    def further_paths(self) -> tuple[str, ...]:
        """The files that it changes, and the record of what is restored when guests end."""
        return (*self.files.only_paths, TUNED)

    @property
    def needs_serials(self) -> bool:
        """Whether devices are compared with the records of their original drivers."""
        return self.unbind
