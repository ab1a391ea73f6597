"""Requests to create and remove vGPUs, their steps, and those that need NVIDIA's programs.

sriov-manage unbinds the GPU from its driver, binds it again, and turns persistence mode on. A GPU
in that mode has a use count that no open file shows, and its driver never releases it.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from msgspec.structs import replace

from vfiomgr import paths
from vfiomgr.diagnostic import Override
from vfiomgr.documents.text import printable
from vfiomgr.engine.plan import (
    UDEV_DEADLINE,
    Checkpoint,
    Exchange,
    Request,
    Step,
    UndoEffects,
)
from vfiomgr.engine.registry import reports_undo
from vfiomgr.paths import SRIOV_MANAGE, echo
from vfiomgr.pci.model import DeviceIdentity, pci_device
from vfiomgr.value import Value
from vfiomgr.vgpu.instance_model import InstancePlace, counted_places
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
        if self.before == self.after:
            return f"{self.vgpu}: save {self.attribute} ({self.after!r})"
        return f"{self.vgpu}: set {self.attribute} to {self.after!r}"

    def commands(self) -> tuple[str, ...]:
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
        return f"{self.parent}: create vGPU {self.uuid} of type {self.type_id}"

    def commands(self) -> tuple[str, ...]:
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
        return f"{self.parent}: remove vGPU {self.uuid} of type {self.type_id}"

    def commands(self) -> tuple[str, ...]:
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
        if not self.after:
            return f"{self.device.address}: remove its vGPU of type {self.before}"
        return f"{self.device.address}: create a vGPU of type {self.after}"

    def commands(self) -> tuple[str, ...]:
        target = pci_device(self.device.address) / "nvidia/current_vgpu_type"
        return (echo(str(self.after), target),)


class AdoptVgpu(Exchange, Value):
    """Record who has a vGPU on a virtual function; the states are whether it is vfiomgr."""

    device: DeviceIdentity
    type: int
    before: bool
    after: bool
    kind: ClassVar[str] = "adopt-vgpu"

    def describe(self) -> str:
        whose = "vfiomgr's own" if self.after else "not created by vfiomgr"
        return f"{self.device.address}: record its vGPU of type {self.type} as {whose}"

    def commands(self) -> tuple[str, ...]:
        """Return nothing: the record is vfiomgr's own."""
        return ()


@reports_undo(SetVgpuType)
def removed_vgpu(host: HostSnapshot, step: SetVgpuType) -> UndoEffects:
    """The vGPU that the step created, if it exists."""
    vgpu = host.vgpus.named(str(step.device.address)) if step.after else None
    return UndoEffects(removed=() if vgpu is None else (vgpu,))


PROGRAM_DEADLINE = 300.0
"""Seconds to create all virtual functions of a GPU, including an unbind and bind of the GPU."""


class FunctionsStep(Exchange, Value):
    """A step that creates or removes virtual functions; the states are their numbers."""

    device: DeviceIdentity
    before: int
    after: int

    affects: ClassVar[str] = "functions"

    def describe(self) -> str:
        return f"{self.device.address}: {self.before} -> {self.after} virtual functions"


@reports_undo(FunctionsStep)
def removed_functions(host: HostSnapshot, step: FunctionsStep) -> UndoEffects:
    """The virtual functions that the step created, and where it removed others."""
    removed = tuple(host.virtual_functions(step.device)) if step.after else ()
    below = step.device.bridge_path if step.before > 0 else None
    return UndoEffects(leaving=removed, removed=removed, recreated_below=below)


class RunSriovManage(FunctionsStep):
    """Create all virtual functions of a GPU, or remove them; `before` or `after` is 0."""

    kind: ClassVar[str] = "run-sriov-manage"

    deadline: ClassVar[float | None] = PROGRAM_DEADLINE

    def commands(self) -> tuple[str, ...]:
        return (shlex.join(sriov_manage_command(self.device, is_on=bool(self.after))),)


class ModeStep(Exchange, Value):
    """A step that sets a mode of a GPU with an option of nvidia-smi."""

    device: DeviceIdentity
    before: bool
    after: bool

    option: ClassVar[tuple[str, ...]]

    def command(self) -> tuple[str, ...]:
        """The command that performs the step."""
        value, address = str(int(self.after)), str(self.device.address)
        return ("nvidia-smi", *self.option, value, "-i", address)

    def commands(self) -> tuple[str, ...]:
        return (shlex.join(self.command()),)


class SetHeterogeneous(ModeStep):
    """Allow or forbid vGPUs of different sizes on a GPU; possible only without vGPUs."""

    kind: ClassVar[str] = "set-heterogeneous"

    is_setting: ClassVar[bool] = True
    option: ClassVar[tuple[str, ...]] = ("vgpu", "-shm")

    def describe(self) -> str:
        word = "of different sizes" if self.after else "of one size only"
        return f"{self.device.address}: vGPUs {word}"


class SetMig(ModeStep):
    """Turn MIG mode of a GPU on or off; possible only without virtual functions.

    The mode survives a reboot of the host.
    """

    kind: ClassVar[str] = "set-mig"

    outlasts_reboot: ClassVar[bool] = True
    option: ClassVar[tuple[str, ...]] = ("-mig",)

    def describe(self) -> str:
        return f"{self.device.address}: MIG {'on' if self.after else 'off'}"


class SetPersistence(ModeStep):
    """Turn persistence mode on or off; while it is on, the driver never releases the GPU."""

    kind: ClassVar[str] = "set-persistence"

    option: ClassVar[tuple[str, ...]] = ("-pm",)

    def describe(self) -> str:
        return f"{self.device.address}: persistence mode {'on' if self.after else 'off'}"


class SetGpuInstances(Exchange, Value):
    """Replace GPU instances of a GPU in MIG mode; instances in both states are not touched.

    Placements are in memory slices, so that a destroyed instance can be recreated in place.
    Instances in neither state belong to someone else and are kept.
    """

    device: DeviceIdentity
    before: tuple[InstancePlace, ...]
    after: tuple[InstancePlace, ...]
    kind: ClassVar[str] = "set-gpu-instances"

    deadline: ClassVar[float | None] = PROGRAM_DEADLINE

    @classmethod
    def is_restored_later(cls, own: Mapping[str, Any], later: Sequence[Mapping[str, Any]]) -> bool:
        """Whether instances were removed only for a run of sriov-manage, which destroys them."""
        alike = (other for other in later if other["kind"] == own["kind"])
        return any(other["after"] and other["device"] == own["device"] for other in alike)

    @property
    def gone(self) -> tuple[InstancePlace, ...]:
        """The instances to destroy."""
        return tuple(place for place in self.before if place not in self.after)

    @property
    def made(self) -> tuple[InstancePlace, ...]:
        """The instances to create."""
        return tuple(place for place in self.after if place not in self.before)

    def describe(self) -> str:
        return self._in_words("create", "destroy", "keep")

    def report(self) -> str:
        return self._in_words("created", "destroyed", "kept")

    def _in_words(self, create: str, destroy: str, keep: str) -> str:
        parts = [f"{create} {', '.join(map(str, self.made))}"] if self.made else []
        parts += [f"{destroy} {', '.join(map(str, self.gone))}"] if self.gone else []
        kept = [place for place in self.before if place in self.after]
        text = f"{self.device.address}: GPU instances: {'; '.join(reversed(parts))}"
        return f"{text}; {keep} {counted_places(tuple(kept))}" if kept else text

    def commands(self) -> tuple[str, ...]:
        """Return the equivalent shell commands; the list shows the numbers of instances."""
        lines: list[str] = []
        if self.gone:
            where = printable(", ".join(str(place) for place in self.gone))
            has_compute = any(place.has_compute for place in self.gone)
            listing = shlex.join(instance_command(self.device, "-lgi"))
            lines.append(f"{listing}    # ID: the instance of {where}")
            lines += [
                shlex.join(instance_command(self.device, word, "-gi", "ID"))
                for word in (["-dci", "-dgi"] if has_compute else ["-dgi"])
            ]
        return (*lines, *map(shlex.join, self.creations()))

    def creations(self, among: tuple[InstancePlace, ...] | None = None) -> list[tuple[str, ...]]:
        """The commands that create instances: all, or only the missing ones."""
        places = self.made if among is None else among
        calls: list[tuple[str, ...]] = []
        for has_compute in (True, False):
            some = [place.specifier for place in places if place.has_compute is has_compute]
            if some:
                words = ["-cgi", ",".join(some)]
                words += ["-C"] if has_compute else []
                calls.append(instance_command(self.device, *words))
        return calls


def instance_command(device: DeviceIdentity, *words: str) -> tuple[str, ...]:
    """The nvidia-smi command for GPU instances of a GPU."""
    return ("nvidia-smi", "mig", *words, "-i", str(device.address))


def sriov_manage_command(device: DeviceIdentity, *, is_on: bool) -> tuple[str, ...]:
    """The command that creates or removes all virtual functions of a GPU."""
    return (SRIOV_MANAGE, "-e" if is_on else "-d", str(device.address))


DRIVER = "nvidia"
"""Drivers whose virtual functions a vendor program creates and initializes."""
