"""The vGPU definitions of a host, what starts them at boot, and current attributes."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

from msgspec import field

from vfiomgr.definitions.model import gpu, vgpu
from vfiomgr.documents.text_file import TextFile
from vfiomgr.errors import InvalidDocument
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Callable

    from vfiomgr.definitions.model.gpu import GpuDefinition
    from vfiomgr.definitions.model.vgpu import Attributes, VgpuDefinition

    _Parse = Callable[[TextFile], "_Definition"]

_Definition = TypeVar("_Definition")


class DefinitionProblem(Value):
    """A file that is not a valid definition, and why."""

    path: str
    reason: str


class MdevctlRule(Value):
    """mdevctl's udev rule, which starts mediated devices when their parent appears."""

    path: str
    program: str
    """The program that it runs."""
    has_program: bool
    """Whether the program exists; Debian 12 installs mdevctl at another path than its rule."""


class VgpuAttribute(Value):
    """The value of an attribute of an active vGPU."""

    vgpu: str
    name: str
    text: str


class DefinitionFacts(Value, dict=True):
    """The complete definition files, and related facts."""

    files: tuple[TextFile, ...] = ()
    """Definitions of mdevctl and vfiomgr, and the files of vfiomgr that start them."""
    unreadable: tuple[str, ...] = ()
    mdevctl: MdevctlRule | None = None
    callouts: tuple[str, ...] = ()
    """Programs that mdevctl runs for some types; vfiomgr does not."""
    attributes: tuple[VgpuAttribute, ...] = field(default=())

    @cached_property
    def vgpus(self) -> tuple[VgpuDefinition, ...]:
        """The mediated devices that are defined, by parent and UUID."""
        return self._mdevs[0]

    @cached_property
    def gpus(self) -> tuple[GpuDefinition, ...]:
        """The GPUs whose virtual functions are defined, by address."""
        return tuple(sorted(self._gpus[0], key=lambda known: known.gpu.address))

    @cached_property
    def problems(self) -> tuple[DefinitionProblem, ...]:
        """Files that are not valid definitions."""
        unread = (DefinitionProblem(path, "cannot be read") for path in self.unreadable)
        return (*self._mdevs[1], *self._gpus[1], *unread)

    @property
    def is_started_by_mdevctl(self) -> bool:
        """Whether mdevctl's rule starts autostart mediated devices."""
        return self.mdevctl is not None and self.mdevctl.has_program

    def file(self, path: str) -> str | None:
        """The text of one of the files."""
        return next((file.text for file in self.files if file.path == path), None)

    def attributes_of(self, vgpu: str) -> Attributes:
        """The attributes of an active vGPU, by name."""
        return tuple((fact.name, fact.text) for fact in self.attributes if fact.vgpu == vgpu)

    @cached_property
    def _mdevs(self) -> tuple[tuple[VgpuDefinition, ...], tuple[DefinitionProblem, ...]]:
        return self._parsed(vgpu.DIRECTORY, vgpu.parse_definition)

    @cached_property
    def _gpus(self) -> tuple[tuple[GpuDefinition, ...], tuple[DefinitionProblem, ...]]:
        return self._parsed(gpu.DIRECTORY, gpu.parse_gpu_definition)

    def _parsed(
        self, directory: str, parse: _Parse[_Definition]
    ) -> tuple[tuple[_Definition, ...], tuple[DefinitionProblem, ...]]:
        """Parse the files of a directory; return definitions and invalid files."""
        found: list[_Definition] = []
        problems: list[DefinitionProblem] = []
        for file in self.files:
            if not file.path.startswith(f"{directory}/"):
                continue
            try:
                found.append(parse(file))
            except InvalidDocument as error:
                problems.append(DefinitionProblem(file.path, error.message))
        return tuple(found), tuple(problems)
