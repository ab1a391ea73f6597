"""Steps that only NVIDIA's own programs carry out: virtual functions and modes of a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from vfiomgr.engine.step import Step
from vfiomgr.paths import SRIOV_MANAGE
from vfiomgr.pci.model import DeviceIdentity
from vfiomgr.value import Value
from vfiomgr.vgpu.mig.model import InstancePlace, counted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot


PROGRAM_DEADLINE = 300.0
"""Seconds to make all virtual functions of a GPU: it leaves its driver and comes back, and each
of them is set up."""


class RunSriovManage(Step, Value):
    """Have all virtual functions of a GPU, on their driver, or none; one of the numbers is 0."""

    device: DeviceIdentity
    before: int
    after: int
    kind: ClassVar[str] = "run-sriov-manage"

    deadline: ClassVar[float | None] = PROGRAM_DEADLINE
    affects: ClassVar[str] = "functions"

    @property
    def recreates_below(self) -> str | None:
        """The bridge of the physical function, if there were virtual ones before."""
        return self.device.bridge_path if self.before > 0 else None

    def functions_removed_by_undo(self, host: HostSnapshot) -> list[PciDevice]:
        """The virtual functions that it made."""
        return host.virtual_functions(self.device) if self.after else []

    def describe(self) -> str:
        """Describe the step in one line."""
        return f"{self.device.address}: {self.before} -> {self.after} virtual functions"

    def commands(self) -> tuple[str, ...]:
        """Return the equivalent shell commands."""
        return (" ".join(sriov_manage_command(self.device, is_on=bool(self.after))),)

    def inverse(self) -> RunSriovManage:
        """As many as before."""
        return RunSriovManage(self.device, before=self.after, after=self.before)


class SetHeterogeneous(Step, Value):
    """Let vGPUs of different sizes be on one GPU, or not; only while it has none."""

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
        """What carries it out."""
        number = str(int(self.after))
        return ("nvidia-smi", "vgpu", "-shm", number, "-i", str(self.device.address))

    def commands(self) -> tuple[str, ...]:
        """Return the equivalent shell commands."""
        return (" ".join(self.command()),)

    def inverse(self) -> SetHeterogeneous:
        """As it was."""
        return SetHeterogeneous(self.device, before=self.after, after=self.before)


class SetMig(Step, Value):
    """Divide a GPU into instances of its own hardware (MIG), or not; no virtual function is there.

    The mode outlasts a reboot of the host.
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
        """What carries it out."""
        return ("nvidia-smi", "-mig", str(int(self.after)), "-i", str(self.device.address))

    def commands(self) -> tuple[str, ...]:
        """Return the equivalent shell commands."""
        return (" ".join(self.command()),)

    def inverse(self) -> SetMig:
        """As it was."""
        return SetMig(self.device, before=self.after, after=self.before)


class SetGpuInstances(Step, Value):
    """Divide a GPU in MIG mode into other GPU instances; those of both states are not touched.

    Places are of the memory, so that whatever is destroyed can be made again where it was. What is
    in neither state is somebody else's, and stays.
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
        """What is destroyed."""
        return tuple(place for place in self.before if place not in self.after)

    @property
    def made(self) -> tuple[InstancePlace, ...]:
        """What is made."""
        return tuple(place for place in self.after if place not in self.before)

    def describe(self) -> str:
        """Describe the step in one line."""
        parts = [f"make {', '.join(map(str, self.made))}"] if self.made else []
        parts += [f"destroy {', '.join(map(str, self.gone))}"] if self.gone else []
        kept = [place for place in self.before if place in self.after]
        text = f"{self.device.address}: GPU instances: {'; '.join(reversed(parts))}"
        return f"{text}; keep {counted(tuple(kept))}" if kept else text

    def commands(self) -> tuple[str, ...]:
        """What a person could type instead; the numbers of instances are in the list."""
        lines: list[str] = []
        if self.gone:
            where = ", ".join(str(place) for place in self.gone)
            listing = " ".join(instance_command(self.device, "-lgi"))
            lines.append(f"{listing}    # ID: the instance of {where}")
            lines += [
                " ".join(instance_command(self.device, word, "-gi", "ID"))
                for word in (["-dci"] * any(p.has_compute for p in self.gone) + ["-dgi"])
            ]
        return (*lines, *map(" ".join, self.creations()))

    def creations(self, among: tuple[InstancePlace, ...] | None = None) -> list[tuple[str, ...]]:
        """The calls that make instances: all of them, or those that are missing."""
        places = self.made if among is None else among
        calls: list[tuple[str, ...]] = []
        for has_compute in (True, False):
            some = [place.specifier for place in places if place.has_compute is has_compute]
            if some:
                words = ("-cgi", ",".join(some), *(["-C"] * has_compute))
                calls.append(instance_command(self.device, *words))
        return calls

    def inverse(self) -> SetGpuInstances:
        """As it was divided."""
        return SetGpuInstances(self.device, before=self.after, after=self.before)


class SetPersistence(Step, Value):
    """Keep a GPU's driver initialised while nobody uses it, or not: then it lets the GPU go."""

    device: DeviceIdentity
    before: bool
    after: bool
    kind: ClassVar[str] = "set-persistence"

    def describe(self) -> str:
        """Describe the step in one line."""
        return f"{self.device.address}: persistence mode {'on' if self.after else 'off'}"

    def command(self) -> tuple[str, ...]:
        """What carries it out."""
        return ("nvidia-smi", "-pm", str(int(self.after)), "-i", str(self.device.address))

    def commands(self) -> tuple[str, ...]:
        """Return the equivalent shell commands."""
        return (" ".join(self.command()),)

    def inverse(self) -> SetPersistence:
        """As it was."""
        return SetPersistence(self.device, before=self.after, after=self.before)


ModeStep = SetHeterogeneous | SetMig | SetPersistence


def instance_command(device: DeviceIdentity, *words: str) -> tuple[str, ...]:
    """A call about the GPU instances of a GPU."""
    return ("nvidia-smi", "mig", *words, "-i", str(device.address))


def sriov_manage_command(device: DeviceIdentity, *, is_on: bool) -> tuple[str, ...]:
    """The call that makes all virtual functions of a GPU, or removes them."""
    return (SRIOV_MANAGE, "-e" if is_on else "-d", str(device.address))
