"""The modes of NVIDIA's GPUs: heterogeneous sizes, MIG and the GPU instances that it cuts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tests.fakes.nvidia.rules import GpuInstance, Modes

if TYPE_CHECKING:
    from tests.fakes.nvidia.cards import InstanceProfile
    from tests.fakes.nvidia.gpus import Gpu, NvidiaGpus


class NvmlError(Exception):
    """What NVML answers: nvidia-smi ends with its number, and says its words."""

    def __init__(self, number: int, words: str) -> None:
        super().__init__(words)
        self.number = number


INVALID_ARGUMENT = (2, "Invalid Argument")
NOT_SUPPORTED = (3, "Not Supported")
NOT_FOUND = (6, "Not Found")
IN_USE = (19, "In use by another client")
INSUFFICIENT_RESOURCES = (23, "Insufficient Resources")


class GpuModes:
    """What can be done to them."""

    def __init__(self, gpus: NvidiaGpus) -> None:
        self._gpus = gpus

    def modes(self, gpu: Gpu) -> Modes:
        """What a GPU is set to."""
        return self._gpus.memory.modes(gpu.address)

    def set_mode(self, gpu: Gpu, *, is_on: bool) -> None:
        """Switch MIG; refused while there are virtual functions."""
        modes = self.modes(gpu)
        if not gpu.card.profiles:
            raise NvmlError(*NOT_SUPPORTED)
        if modes.is_mig == is_on:
            return
        if self._gpus.virtual(gpu) or modes.instances:
            raise NvmlError(*IN_USE)
        self._set(gpu, Modes(is_mig=is_on))

    def create(self, gpu: Gpu, wanted: str, *, has_compute: bool) -> GpuInstance:
        """A GPU instance at the first free place of its profile, or at the one after `:`."""
        name, _, place = wanted.partition(":")
        profile = gpu.card.profile(name)
        known = [] if profile is None else [p for p in profile.places if place in ("", str(p[0]))]
        if profile is None or not known:
            raise NvmlError(*INVALID_ARGUMENT)
        modes = self.modes(gpu)
        for start, number in known:
            if not any(self._overlap(gpu, profile, start, other) for other in modes.instances):
                made = GpuInstance(number, profile.number, start, has_compute=has_compute)
                modes.instances = sorted([*modes.instances, made], key=lambda i: i.id)
                self._set(gpu, modes)
                return made
        raise NvmlError(*INSUFFICIENT_RESOURCES)

    def _overlap(self, gpu: Gpu, profile: InstanceProfile, start: int, other: GpuInstance) -> bool:
        size = self.profile(gpu, other).size
        return start < other.start + size and other.start < start + profile.size

    def free_places(self, gpu: Gpu, profile: InstanceProfile) -> int:
        """How many more of a profile there can be."""
        there = self.modes(gpu).instances
        return sum(
            not any(self._overlap(gpu, profile, start, other) for other in there)
            for start, _ in profile.places
        )

    def profile(self, gpu: Gpu, instance: GpuInstance) -> InstanceProfile:
        """The profile that an instance was made by."""
        return next(p for p in gpu.card.profiles if p.number == instance.profile)

    def create_compute(self, gpu: Gpu, instance: GpuInstance) -> None:
        """Give a GPU instance the compute instance that takes all of it."""
        if instance.has_compute:
            raise NvmlError(*INSUFFICIENT_RESOURCES)
        modes = self.modes(gpu)
        modes.instances = [
            replace(i, has_compute=True) if i.id == instance.id else i for i in modes.instances
        ]
        self._set(gpu, modes)

    def destroy_compute(self, gpu: Gpu, instance: GpuInstance) -> None:
        """Take the compute instances of a GPU instance away, unless a vGPU is on it."""
        self._refuse_used(gpu, instance)
        modes = self.modes(gpu)
        modes.instances = [
            replace(i, has_compute=False) if i.id == instance.id else i for i in modes.instances
        ]
        self._set(gpu, modes)

    def destroy(self, gpu: Gpu, instance: GpuInstance) -> None:
        """Take a GPU instance away: its compute instances go before, and its vGPUs."""
        self._refuse_used(gpu, instance)
        if instance.has_compute:
            raise NvmlError(*IN_USE)
        modes = self.modes(gpu)
        modes.instances = [i for i in modes.instances if i.id != instance.id]
        self._set(gpu, modes)

    def _refuse_used(self, gpu: Gpu, instance: GpuInstance) -> None:
        if any(seat.instance == instance.id for seat in self._gpus.vgpus(gpu).values()):
            raise NvmlError(*IN_USE)

    def set_heterogeneous(self, gpu: Gpu, *, is_on: bool) -> None:
        """Let vGPUs of several sizes be on a GPU; refused while there is any."""
        modes = self.modes(gpu)
        if not gpu.card.mixes_sizes or modes.is_mig:
            raise NvmlError(*NOT_SUPPORTED)
        if self._gpus.vgpus(gpu):
            raise NvmlError(*IN_USE)
        modes.is_heterogeneous = is_on
        self._set(gpu, modes)

    def _set(self, gpu: Gpu, modes: Modes) -> None:
        self._gpus.memory.set_modes(gpu.address, modes)
        self._gpus.changed(gpu)
