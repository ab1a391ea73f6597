"""Steps that need NVIDIA's programs: virtual functions and modes of a GPU."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any, ClassVar

from vfiomgr.documents.printable import printable
from vfiomgr.engine.plan import Step
from vfiomgr.paths import SRIOV_MANAGE
from vfiomgr.pci.model import DeviceIdentity
from vfiomgr.value import Value
from vfiomgr.vgpu.mig.model import InstancePlace, counted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot


PROGRAM_DEADLINE = 300.0
"""Seconds to create all virtual functions of a GPU, including an unbind and bind of the GPU."""


class RunSriovManage(Step, Value):
    """Create all virtual functions of a GPU, or remove them; `before` or `after` is 0."""

    device: DeviceIdentity
    before: int
    after: int
    kind: ClassVar[str] = "run-sriov-manage"

    deadline: ClassVar[float | None] = PROGRAM_DEADLINE
    affects: ClassVar[str] = "functions"

    @property
    def recreates_below(self) -> str | None:
        """The bridge of the physical function, if it had virtual functions before."""
        return self.device.bridge_path if self.before > 0 else None

    def functions_removed_by_undo(self, host: HostSnapshot) -> list[PciDevice]:
        """The virtual functions that the step created."""
        return host.virtual_functions(self.device) if self.after else []

    def describe(self) -> str:
        """Describe the step in one line."""
        return f"{self.device.address}: {self.before} -> {self.after} virtual functions"

    def commands(self) -> tuple[str, ...]:
        """Return the equivalent shell commands."""
        return (shlex.join(sriov_manage_command(self.device, is_on=bool(self.after))),)

    def inverse(self) -> RunSriovManage:
        """Return the step that restores the former number."""
        return RunSriovManage(self.device, before=self.after, after=self.before)


class SetHeterogeneous(Step, Value):
    """Allow or forbid vGPUs of different sizes on a GPU; possible only without vGPUs."""

    device: DeviceIdentity
    before: bool
    after: bool
    kind: ClassVar[str] = "set-heterogeneous"

    is_setting: ClassVar[bool] = True

    def describe(self) -> str:
        """Describe the step in one line."""
        word = "of different sizes" if self.after else "of one size only"
        return f"{self.device.address}: vGPUs {word}"

    def command(self) -> tuple[str, ...]:
        """The command that performs the step."""
        number = str(int(self.after))
        return ("nvidia-smi", "vgpu", "-shm", number, "-i", str(self.device.address))

    def commands(self) -> tuple[str, ...]:
        """Return the equivalent shell commands."""
        return (shlex.join(self.command()),)

    def inverse(self) -> SetHeterogeneous:
        """Return the step that restores the former state."""
        return SetHeterogeneous(self.device, before=self.after, after=self.before)


class SetMig(Step, Value):
    """Turn MIG mode of a GPU on or off; possible only without virtual functions.

    The mode survives a reboot of the host.
    """

    device: DeviceIdentity
    before: bool
    after: bool
    kind: ClassVar[str] = "set-mig"

    outlasts_reboot: ClassVar[bool] = True

    def describe(self) -> str:
        """Describe the step in one line."""
        return f"{self.device.address}: MIG {'on' if self.after else 'off'}"

    def command(self) -> tuple[str, ...]:
        """The command that performs the step."""
        return ("nvidia-smi", "-mig", str(int(self.after)), "-i", str(self.device.address))

    def commands(self) -> tuple[str, ...]:
        """Return the equivalent shell commands."""
        return (shlex.join(self.command()),)

    def inverse(self) -> SetMig:
        """Return the step that restores the former state."""
        return SetMig(self.device, before=self.after, after=self.before)


class SetGpuInstances(Step, Value):
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
        """Describe the step in one line."""
        parts = [f"create {', '.join(map(str, self.made))}"] if self.made else []
        parts += [f"destroy {', '.join(map(str, self.gone))}"] if self.gone else []
        kept = [place for place in self.before if place in self.after]
        text = f"{self.device.address}: GPU instances: {'; '.join(reversed(parts))}"
        return f"{text}; keep {counted(tuple(kept))}" if kept else text

    def commands(self) -> tuple[str, ...]:
        """Return the equivalent shell commands; the list shows the numbers of instances."""
        lines: list[str] = []
        if self.gone:
            where = printable(", ".join(str(place) for place in self.gone))
            listing = shlex.join(instance_command(self.device, "-lgi"))
            lines.append(f"{listing}    # ID: the instance of {where}")
            lines += [
                shlex.join(instance_command(self.device, word, "-gi", "ID"))
                for word in (["-dci"] * any(p.has_compute for p in self.gone) + ["-dgi"])
            ]
        return (*lines, *map(shlex.join, self.creations()))

    def creations(self, among: tuple[InstancePlace, ...] | None = None) -> list[tuple[str, ...]]:
        """The commands that create instances: all, or only the missing ones."""
        places = self.made if among is None else among
        calls: list[tuple[str, ...]] = []
        for has_compute in (True, False):
            some = [place.specifier for place in places if place.has_compute is has_compute]
            if some:
                words = ("-cgi", ",".join(some), *(["-C"] * has_compute))
                calls.append(instance_command(self.device, *words))
        return calls

    def inverse(self) -> SetGpuInstances:
        """Return the step that restores the former instances."""
        return SetGpuInstances(self.device, before=self.after, after=self.before)


class SetPersistence(Step, Value):
    """Turn persistence mode on or off; while it is on, the driver never releases the GPU."""

    device: DeviceIdentity
    before: bool
    after: bool
    kind: ClassVar[str] = "set-persistence"

    def describe(self) -> str:
        """Describe the step in one line."""
        return f"{self.device.address}: persistence mode {'on' if self.after else 'off'}"

    def command(self) -> tuple[str, ...]:
        """The command that performs the step."""
        return ("nvidia-smi", "-pm", str(int(self.after)), "-i", str(self.device.address))

    def commands(self) -> tuple[str, ...]:
        """Return the equivalent shell commands."""
        return (shlex.join(self.command()),)

    def inverse(self) -> SetPersistence:
        """Return the step that restores the former state."""
        return SetPersistence(self.device, before=self.after, after=self.before)


ModeStep = SetHeterogeneous | SetMig | SetPersistence


def instance_command(device: DeviceIdentity, *words: str) -> tuple[str, ...]:
    """The nvidia-smi command for GPU instances of a GPU."""
    return ("nvidia-smi", "mig", *words, "-i", str(device.address))


def sriov_manage_command(device: DeviceIdentity, *, is_on: bool) -> tuple[str, ...]:
    """The command that creates or removes all virtual functions of a GPU."""
    return (SRIOV_MANAGE, "-e" if is_on else "-d", str(device.address))
