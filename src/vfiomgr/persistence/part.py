"""What persistence adds to a plan: steps and notes, and the rules that they start from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.engine.plan import Step
from vfiomgr.persistence.steps import ReplaceFile
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from vfiomgr.pci.model import PciAddress
    from vfiomgr.persistence.model import PersistedBinding
    from vfiomgr.snapshot.model import HostSnapshot

    Bindings = dict[PciAddress, PersistedBinding]


class Part(Value):
    """The steps and notes that persistence adds to a plan."""

    steps: tuple[Step, ...] = ()
    notes: tuple[str, ...] = ()
    already: tuple[str, ...] = ()
    locks: tuple[str, ...] = ()

    def with_notes(self, notes: Iterable[str]) -> Part:
        """Return a copy with these notes first."""
        return Part(self.steps, (*notes, *self.notes), self.already, self.locks)


def bindings(host: HostSnapshot) -> Bindings:
    """The bindings of the current rules."""
    return {binding.address: binding for binding in host.files.bindings}


def replaced(
    host: HostSnapshot, path: str, after: str | None, mode: int = 0o644
) -> Iterator[ReplaceFile]:
    """The step to a file's new text, unless it is equal."""
    before = host.files.text(path)
    if before != after:
        yield ReplaceFile(path, before, after, mode)
