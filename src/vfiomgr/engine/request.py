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
    """What only the host before a run could tell, and is needed to finish the run.

    A capability derives its own from it next to the request that needs one, and finds it in a
    function with `resolves` (`vfiomgr.engine.registry`). The journal keeps it with the plan.
    """

    def resumed(self, _begun: Iterable[str]) -> Self:
        """The checkpoint of an interrupted run that had begun to change the devices `begun`."""
        return self

    def completed(self, found: Self) -> Self:
        """The checkpoint, with what it does not know (None) as it is found now."""
        unknown = (name for name in self.__struct_fields__ if getattr(self, name) is None)
        return replace(self, **{name: getattr(found, name) for name in unknown})


class Request:
    """What the host is to become, and which facts that decision needs.

    Requests are values (`vfiomgr.value`) of a `kind`, by which journals name them. They hold what a
    user asks for, and nothing else.
    """

    __slots__ = ()
    kind: ClassVar[str]
    checkpoint: ClassVar[type[Checkpoint] | None] = None
    """What finishing an interrupted request needs besides the request."""

    is_about_files: ClassVar[bool] = False
    """Whether files alone are changed, so that a root without a kernel will do."""
    needs_gpu_modes: ClassVar[bool] = False
    """Whether nvidia-smi is asked how GPUs divide their memory."""
    deferred_types: ClassVar[dict[str, str]] = {}
    """Types of its fields that its module does not import, each with the module that has it."""

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


KINDS: dict[str, type[Request]] = {}
"""By kind, of the modules that are imported; all of them: `vfiomgr.engine.registry`."""
