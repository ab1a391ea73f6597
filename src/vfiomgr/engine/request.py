"""What a user asks for: a request is planned on a snapshot of the host.

A capability derives its requests from `Request` and says in its module `plan` how they are planned
(`vfiomgr.engine.registry`); the engine itself knows no kind of request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Self

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vfiomgr.pci.model import PciAddress


class Request:
    """What the host is to become, and which facts that decision needs.

    Requests are values (`vfiomgr.value`) of a `kind`, by which journals name them.
    """

    __slots__ = ()
    kind: ClassVar[str]

    is_about_files: ClassVar[bool] = False
    """Whether files alone are changed, so that a root without a kernel will do."""
    needs_gpu_modes: ClassVar[bool] = False
    """Whether nvidia-smi is asked how GPUs divide their memory."""

    def __init_subclass__(cls) -> None:
        """Note the kind, by which journals are read."""
        if "kind" in cls.__dict__:
            KINDS[cls.kind] = cls

    from_document: ClassVar[Any]
    """Reads a request of any kind; the registry knows them all."""

    @property
    def named_functions(self) -> tuple[PciAddress, ...]:
        """The PCI functions that it names."""
        return ()

    @property
    def needs_resets(self) -> bool:
        """Whether the reset capabilities of functions are read."""
        return False

    @property
    def needs_serials(self) -> bool:
        """Whether the serial numbers of all functions are read, not of the named ones alone."""
        return False

    @property
    def only_paths(self) -> tuple[str, ...] | None:
        """The files that it is about, where it needs no other fact of the host; else None."""
        return None

    @classmethod
    def read_types(cls) -> dict[str, type]:
        """Types of its fields that its module does not import, for reading journals."""
        return {}

    def resumed(self, _begun: Iterable[str]) -> Self:
        """The request to finish where an interrupted operation had begun to change `begun`."""
        return self


KINDS: dict[str, type[Request]] = {}
"""By kind, of the modules that are imported; all of them: `vfiomgr.engine.registry`."""
