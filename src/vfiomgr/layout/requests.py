"""Requests about layouts: apply, revert, install, uninstall."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from msgspec.structs import replace

from vfiomgr.diagnostic import Override
from vfiomgr.engine.request import Checkpoint, Request
from vfiomgr.engine.step import Step
from vfiomgr.host.accounts import NodeOwner
from vfiomgr.pci.model import PciAddress
from vfiomgr.value import Value
from vfiomgr.vgpu.mig.model import InstancePlace

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vfiomgr.layout.model import Layout  # noqa: TC004 - slow to import: deferred_types

_DEFERRED = {"Layout": "vfiomgr.layout.model"}


class FunctionBefore(Value):
    """What a run found of a function that makes virtual ones."""

    address: PciAddress
    autoprobe: bool | None
    heterogeneous: bool | None
    instances: tuple[InstancePlace, ...] = ()


class LayoutCheckpoint(Checkpoint):
    """What a run found of the devices of a layout, and which vGPUs it changed."""

    begun: tuple[str, ...] = ()
    """The vGPUs that it had made, or removed."""
    functions: tuple[FunctionBefore, ...] = ()

    def resumed(self, begun: Iterable[str]) -> LayoutCheckpoint:
        """The checkpoint with the vGPUs that were made or removed already."""
        return replace(self, begun=tuple(dict.fromkeys((*self.begun, *begun))))


class ApplyLayout(Request, Value):
    """Bring the host to a layout; what is so already is not touched."""

    name: str
    layout: Layout
    owners: tuple[NodeOwner, ...] = ()
    """Who those are that the layout gives nodes to."""
    seed: str = ""
    """What the names of vGPUs that the layout does not name are made from."""
    allow: frozenset[Override] = frozenset()
    only: tuple[str, ...] = ()
    """These parts alone, by the device that they stand under."""
    kind: ClassVar[str] = "apply-layout"
    deferred_types: ClassVar[dict[str, str]] = _DEFERRED
    checkpoint = LayoutCheckpoint

    needs_gpu_modes: ClassVar[bool] = True

    @property
    def needs_resets(self) -> bool:
        """A rule may choose a reset method."""
        return True

    @property
    def needs_serials(self) -> bool:
        """Whether a rule selects devices by serial number."""
        return self.layout.selects_by_serial


class RevertLayout(Request, Value):
    """Take back what applying a layout did."""

    name: str
    steps: tuple[Step, ...]
    """What was done, in its order."""
    runs: tuple[str, ...]
    """The journals that tell of it."""
    allow: frozenset[Override] = frozenset()
    locks: tuple[str, ...] = ()
    """What those runs held."""
    kind: ClassVar[str] = "revert-layout"

    def is_same_as(self, other: RevertLayout) -> bool:
        """Whether both take the same runs back."""
        return self.runs == other.runs


class InstallLayout(Request, Value):
    """Keep a layout, and have the host brought to it at each boot; nothing moves now."""

    apply: ApplyLayout
    text: str
    """The file that it stands in, whole."""
    enforce: bool = False
    """Have it kept after the boot, too."""
    update_initramfs: bool = False
    program: str | None = None
    """Where vfiomgr itself is, for the services."""
    kind: ClassVar[str] = "install-layout"
    deferred_types: ClassVar[dict[str, str]] = _DEFERRED

    needs_gpu_modes: ClassVar[bool] = True

    @property
    def needs_resets(self) -> bool:
        """A rule may choose a reset method."""
        return True

    @property
    def needs_serials(self) -> bool:
        """Whether a rule selects devices by serial number."""
        return self.apply.layout.selects_by_serial


class UninstallLayout(Request, Value):
    """Take back what installing a layout wrote; nothing moves now."""

    update_initramfs: bool = False
    program: str | None = None
    """Where vfiomgr itself is, for the service of rules that are there again."""
    kind: ClassVar[str] = "uninstall-layout"
