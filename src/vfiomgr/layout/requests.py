"""Requests about layouts: apply, revert, install and uninstall."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

from msgspec.structs import replace

from vfiomgr.diagnostic import Override
from vfiomgr.engine.plan import Checkpoint, Request, Step
from vfiomgr.host.owners import NodeOwner
from vfiomgr.pci.model import PciAddress
from vfiomgr.value import Value
from vfiomgr.vgpu.instance_model import InstancePlace

if TYPE_CHECKING:
    from vfiomgr.layout.model import Layout  # noqa: TC004 - slow to import: deferred_types
    from vfiomgr.pci.function import Purpose

_DEFERRED = {"Layout": "vfiomgr.layout.model"}


class FunctionBefore(Value):
    """The state of a physical function before a run."""

    address: PciAddress
    autoprobe: bool | None
    heterogeneous: bool | None
    instances: tuple[InstancePlace, ...] = ()


class LayoutCheckpoint(Checkpoint):
    """The state of a layout's devices before a run, and the vGPUs that the run changed."""

    begun: tuple[str, ...] = ()
    """The vGPUs that it had created or removed."""
    functions: tuple[FunctionBefore, ...] = ()

    def resumed(self, begun: Iterable[str]) -> LayoutCheckpoint:
        """The checkpoint with the vGPUs that were already created or removed."""
        return replace(self, begun=tuple(dict.fromkeys((*self.begun, *begun))))


class ApplyLayout(Request, Value):
    """Apply a layout; devices already in the desired state are left alone."""

    name: str
    layout: Layout
    owners: tuple[NodeOwner, ...] = ()
    """The owners of device nodes in the layout, looked up."""
    seed: str = ""
    """The machine ID, from which the names of unnamed vGPUs are derived."""
    allow: frozenset[Override] = frozenset()
    only: tuple[str, ...] = ()
    """Only these parts, by the device that they are listed under."""
    adopt: bool = False
    """Record vGPUs that others created and that fit the layout as vfiomgr's own."""
    kind: ClassVar[str] = "apply-layout"
    has_long_journal: ClassVar[bool] = True
    deferred_types: ClassVar[dict[str, str]] = _DEFERRED
    checkpoint = LayoutCheckpoint

    needs_gpu_modes: ClassVar[bool] = True

    @property
    def needs_resets(self) -> bool:
        """Whether a rule names a reset method, which can be refused."""
        return self.layout.chooses_resets

    @property
    def needs_serials(self) -> bool:
        """Whether a rule selects devices by serial number."""
        return self.layout.selects_by_serial

    @property
    def needs_readiness(self) -> bool:
        """Whether a plan names what else binds its functions at boot."""
        return self.adopt

    @property
    def named_types(self) -> frozenset[str] | None:
        """The vGPU types of its rules."""
        return self.layout.named_types

    @property
    def purpose(self) -> Purpose | None:
        """Not what is only shown of virtual functions."""
        return "layout"


class RevertLayout(Request, Value):
    """Undo an applied layout."""

    name: str
    steps: tuple[Step, ...]
    """The steps that were taken, in order."""
    runs: tuple[str, ...]
    """The journals that recorded them."""
    allow: frozenset[Override] = frozenset()
    locks: tuple[str, ...] = ()
    """The requests of those runs."""
    kind: ClassVar[str] = "revert-layout"
    has_long_journal: ClassVar[bool] = True

    def is_same_as(self, other: RevertLayout) -> bool:
        """Whether both undo the same runs."""
        return self.runs == other.runs


class InstallLayout(Request, Value):
    """Install a layout to be applied at each boot; no device is changed now."""

    apply: ApplyLayout
    text: str
    """The entire file."""
    enforce: bool = False
    """Also correct drift after the boot."""
    update_initramfs: bool = False
    program: str | None = None
    """The path of vfiomgr, for the services."""
    kind: ClassVar[str] = "install-layout"
    deferred_types: ClassVar[dict[str, str]] = _DEFERRED

    needs_gpu_modes: ClassVar[bool] = True

    @property
    def needs_resets(self) -> bool:
        """Whether a rule names a reset method, which can be refused."""
        return self.apply.needs_resets

    @property
    def needs_serials(self) -> bool:
        """Whether a rule selects devices by serial number."""
        return self.apply.layout.selects_by_serial


class UninstallLayout(Request, Value):
    """Remove an installed layout; no device is changed."""

    update_initramfs: bool = False
    program: str | None = None
    """The path of vfiomgr, for the service of restored rules."""
    kind: ClassVar[str] = "uninstall-layout"
