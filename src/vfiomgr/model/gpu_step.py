"""Steps that only NVIDIA's own programs carry out: virtual functions and modes of a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vfiomgr.model.path import SRIOV_MANAGE
from vfiomgr.model.pci import DeviceIdentity


@dataclass(frozen=True, slots=True)
class RunSriovManage:
    """Have all virtual functions of a GPU, on their driver, or none; one of the numbers is 0."""

    device: DeviceIdentity
    before: int
    after: int
    kind: Literal["run-sriov-manage"] = "run-sriov-manage"

    def describe(self) -> str:
        """One line for people."""
        return f"{self.device.address}: {self.before} -> {self.after} virtual functions"

    def commands(self) -> tuple[str, ...]:
        """What a person could type instead."""
        return (" ".join(sriov_manage_command(self.device, is_on=bool(self.after))),)

    def inverse(self) -> RunSriovManage:
        """As many as before."""
        return RunSriovManage(self.device, before=self.after, after=self.before)


@dataclass(frozen=True, slots=True)
class SetHeterogeneous:
    """Let vGPUs of different sizes be on one GPU, or not; only while it has none."""

    device: DeviceIdentity
    before: bool
    after: bool
    kind: Literal["set-heterogeneous"] = "set-heterogeneous"

    def describe(self) -> str:
        """One line for people."""
        word = "of different sizes" if self.after else "of one size only"
        return f"{self.device.address}: vGPUs {word}"

    def command(self) -> tuple[str, ...]:
        """What carries it out."""
        number = str(int(self.after))
        return ("nvidia-smi", "vgpu", "-shm", number, "-i", str(self.device.address))

    def commands(self) -> tuple[str, ...]:
        """What a person could type instead."""
        return (" ".join(self.command()),)

    def inverse(self) -> SetHeterogeneous:
        """As it was."""
        return SetHeterogeneous(self.device, before=self.after, after=self.before)


@dataclass(frozen=True, slots=True)
class SetMig:
    """Divide a GPU into instances of its own hardware (MIG), or not; no virtual function is there.

    The mode outlasts a reboot of the host.
    """

    device: DeviceIdentity
    before: bool
    after: bool
    kind: Literal["set-mig"] = "set-mig"

    def describe(self) -> str:
        """One line for people."""
        return f"{self.device.address}: MIG {'on' if self.after else 'off'}"

    def command(self) -> tuple[str, ...]:
        """What carries it out."""
        return ("nvidia-smi", "-mig", str(int(self.after)), "-i", str(self.device.address))

    def commands(self) -> tuple[str, ...]:
        """What a person could type instead."""
        return (" ".join(self.command()),)

    def inverse(self) -> SetMig:
        """As it was."""
        return SetMig(self.device, before=self.after, after=self.before)


@dataclass(frozen=True, slots=True)
class SetPersistence:
    """Keep a GPU's driver initialised while nobody uses it, or not: then it lets the GPU go."""

    device: DeviceIdentity
    before: bool
    after: bool
    kind: Literal["set-persistence"] = "set-persistence"

    def describe(self) -> str:
        """One line for people."""
        return f"{self.device.address}: persistence mode {'on' if self.after else 'off'}"

    def command(self) -> tuple[str, ...]:
        """What carries it out."""
        return ("nvidia-smi", "-pm", str(int(self.after)), "-i", str(self.device.address))

    def commands(self) -> tuple[str, ...]:
        """What a person could type instead."""
        return (" ".join(self.command()),)

    def inverse(self) -> SetPersistence:
        """As it was."""
        return SetPersistence(self.device, before=self.after, after=self.before)


ModeStep = SetHeterogeneous | SetMig | SetPersistence


def sriov_manage_command(device: DeviceIdentity, *, is_on: bool) -> tuple[str, ...]:
    """The call that makes all virtual functions of a GPU, or removes them."""
    return (SRIOV_MANAGE, "-e" if is_on else "-d", str(device.address))
