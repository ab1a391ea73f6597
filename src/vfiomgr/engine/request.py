"""What a user asks for: a request is planned on a snapshot of the host.

A capability derives its requests from `Request` and says in its module `plan` how they are planned
(`vfiomgr.engine.registry`); the engine itself knows no kind of request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Self

from msgspec.structs import replace

from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vfiomgr.pci.model import PciAddress


class Checkpoint(Value):
    """Facts from before a run that are needed to finish it.

    A capability derives its own checkpoint next to the request that needs one, and finds it in a
    function with `resolves` (`vfiomgr.engine.registry`). The journal stores it with the plan.
    """

    def resumed(self, _begun: Iterable[str]) -> Self:
        """The checkpoint for an interrupted run that had begun to change the devices `begun`."""
        return self

    def completed(self, found: Self) -> Self:
        """The checkpoint, with its unknown values (None) filled from the present host."""
        unknown = (name for name in self.__struct_fields__ if getattr(self, name) is None)
        return replace(self, **{name: getattr(found, name) for name in unknown})


class Request:
    """The desired state of the host, and which facts that decision needs.

    Requests are values (`vfiomgr.value`) of a `kind`, which identifies them in journals. They
    contain only what a user asks for.
    """

    __slots__ = ()
    kind: ClassVar[str]
    checkpoint: ClassVar[type[Checkpoint] | None] = None
    """The class of its checkpoint, if finishing an interrupted request needs one."""

    is_about_files: ClassVar[bool] = False
    """Whether it only changes files, so that a root without a kernel is sufficient."""
    needs_gpu_modes: ClassVar[bool] = False
    """Whether nvidia-smi is asked how GPUs divide their memory."""
    deferred_types: ClassVar[dict[str, str]] = {}
    """Types of its fields that its module does not import, with their modules."""

    def __init_subclass__(cls) -> None:
        """Register the kind, by which journals are read."""
        if "kind" in cls.__dict__:
            KINDS[cls.kind] = cls

    from_document: ClassVar[Any]
    """Reads a request of any kind; set by the registry."""

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
        """Whether the serial numbers of all functions are read, not only of the named ones."""
        return False

    @property
    def only_paths(self) -> tuple[str, ...] | None:
        """The files that it concerns, if it needs no other fact of the host; otherwise None."""
        return None


KINDS: dict[str, type[Request]] = {}
"""Classes of the imported modules by kind; for all: `vfiomgr.engine.registry`."""
