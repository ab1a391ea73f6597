"""Requests to create and remove vGPUs, and the steps that they consist of."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, ClassVar, Literal

from msgspec.structs import replace

from vfiomgr import paths
from vfiomgr.diagnostic import Override
from vfiomgr.engine.plan import (
    UDEV_DEADLINE,
    Checkpoint,
    Exchange,
    Request,
    Step,
    UndoEffects,
)
from vfiomgr.engine.registry import reports_undo
from vfiomgr.paths import echo
from vfiomgr.pci.model import DeviceIdentity, pci_device
from vfiomgr.value import Value
from vfiomgr.vgpu.model import PARAMETERS

if TYPE_CHECKING:
    from vfiomgr.engine.plan import Topic
    from vfiomgr.snapshot.model import HostSnapshot


Strategy = Literal["pack", "spread"]
"""Fill one GPU after the other, or spread vGPUs evenly."""


class CreateCheckpoint(Checkpoint):
    """The selected placements of vGPUs."""

    places: tuple[tuple[str, str], ...]
    """Parent and type of each."""


class CreateVgpu(Request, Value):
    """Create one vGPU per UUID, all or none."""

    uuids: tuple[str, ...]
    """The UUIDs of mediated devices; a virtual function is named by its address instead."""
    type: str | None = None
    """The type by ID, number, full name or short name."""
    framebuffer: int | None = None
    """The minimum MiB; the smallest matching type is used."""
    series: str | None = None
    heads: int | None = None
    parent: str | None = None
    """The device to use: a GPU, or one of its virtual functions."""
    numa_node: int | None = None
    strategy: Strategy = "pack"
    kind: ClassVar[str] = "create-vgpu"
    checkpoint = CreateCheckpoint

    needs_gpu_modes: ClassVar[bool] = True


class RemoveVgpu(Request, Value):
    """Remove vGPUs, by UUID or the address of a virtual function."""

    names: tuple[str, ...] = ()
    every: bool = False
    """Remove all vGPUs created by vfiomgr."""
    parent: str | None = None
    """With `every`: only vGPUs of this device."""
    allow: frozenset[Override] = frozenset()
    kind: ClassVar[str] = "remove-vgpu"


class SetVgpuAttribute(Step, Value):
    """Write an attribute of a vGPU; `before` is None if the old value is not needed.

    That is the case for a vGPU that the same plan creates: undoing removes it entirely.
    """

    vgpu: str
    """Its UUID, or the address of its virtual function."""
    directory: str
    attribute: str
    """Its path below the directory."""
    before: str | None
    after: str
    kind: ClassVar[str] = "set-vgpu-attribute"

    @property
    def subject(self) -> str:
        """The vGPU."""
        return self.vgpu

    @property
    def topic(self) -> Topic:
        """Identify the attribute of the vGPU."""
        return (self.kind, self.subject, self.attribute)

    def describe(self) -> str:
        """Describe the step in one line."""
        if self.before == self.after:
            return f"{self.vgpu}: save {self.attribute} ({self.after!r})"
        return f"{self.vgpu}: set {self.attribute} to {self.after!r}"

    def commands(self) -> tuple[str, ...]:
        """Return the equivalent shell commands."""
        if self.before == self.after:
            return ()
        text = shlex.quote(self.written.removesuffix("\n"))
        end = "\\n" if self.written.endswith("\n") else ""
        target = shlex.quote(f"{self.directory}/{self.attribute}")
        return (f"printf '%s{end}' {text} > {target}",)

    @property
    def written(self) -> str:
        """The bytes to write.

        NVIDIA's driver treats the last byte as a newline, and needs a blank for an empty value
        (vgpu_params_store in its nvidia-vgpu-vfio).
        """
        if self.attribute != PARAMETERS:
            return self.after
        return f"{self.after.rstrip() or ' '}\n"

    def inverse(self) -> SetVgpuAttribute | None:
        """Return the step that restores the old value; None if it is unknown."""
        if self.before is None:
            return None
        return replace(self, before=self.after, after=self.before)


class _MdevStep(Step, Value):
    """A step on a mediated device."""

    parent: str
    parent_path: str
    type_id: str
    uuid: str

    affects: ClassVar[str] = "mdev"

    @property
    def subject(self) -> str:
        """The vGPU."""
        return self.uuid

    @property
    def topic(self) -> Topic:
        """Identify the vGPU by UUID, parent and type."""
        return (self.affects, self.uuid, self.parent, self.type_id)


class CreateMdev(_MdevStep):
    """Create a mediated device."""

    kind: ClassVar[str] = "create-mdev"
    deadline: ClassVar[float | None] = UDEV_DEADLINE

    def describe(self) -> str:
        """Describe the step in one line."""
        return f"{self.parent}: create vGPU {self.uuid} of type {self.type_id}"

    def commands(self) -> tuple[str, ...]:
        """Return the equivalent shell commands."""
        target = f"{self.parent_path}/mdev_supported_types/{self.type_id}/create"
        return (echo(self.uuid, target),)

    def inverse(self) -> RemoveMdev:
        """Return the step that removes the vGPU."""
        return RemoveMdev(self.parent, self.parent_path, self.type_id, self.uuid)


@reports_undo(CreateMdev)
def removed_mdev(host: HostSnapshot, step: CreateMdev) -> UndoEffects:
    """The vGPU, if it exists."""
    vgpu = host.vgpus.named(step.uuid)
    return UndoEffects(removed=() if vgpu is None else (vgpu,))


class RemoveMdev(_MdevStep):
    """Remove a mediated device."""

    kind: ClassVar[str] = "remove-mdev"

    def describe(self) -> str:
        """Describe the step in one line."""
        return f"{self.parent}: remove vGPU {self.uuid} of type {self.type_id}"

    def commands(self) -> tuple[str, ...]:
        """Return the equivalent shell commands."""
        return (echo("1", paths.MDEV_DEVICES / self.uuid / "remove"),)

    def inverse(self) -> CreateMdev:
        """Return the step that creates the vGPU again, with the same UUID."""
        return CreateMdev(self.parent, self.parent_path, self.type_id, self.uuid)


class SetVgpuType(Exchange, Value):
    """Set the vendor's vGPU type of a virtual function; type 0 removes the vGPU."""

    device: DeviceIdentity
    before: int
    after: int
    kind: ClassVar[str] = "set-vgpu-type"

    @property
    def topic(self) -> Topic:
        """Identify the vGPU by address and type."""
        return (self.kind, self.subject, frozenset({self.before, self.after}))

    def describe(self) -> str:
        """Describe the step in one line."""
        if not self.after:
            return f"{self.device.address}: remove its vGPU of type {self.before}"
        return f"{self.device.address}: create a vGPU of type {self.after}"

    def commands(self) -> tuple[str, ...]:
        """Return the equivalent shell commands."""
        target = pci_device(self.device.address) / "nvidia/current_vgpu_type"
        return (echo(str(self.after), target),)


@reports_undo(SetVgpuType)
def removed_vgpu(host: HostSnapshot, step: SetVgpuType) -> UndoEffects:
    """The vGPU that the step created, if it exists."""
    vgpu = host.vgpus.named(str(step.device.address)) if step.after else None
    return UndoEffects(removed=() if vgpu is None else (vgpu,))
