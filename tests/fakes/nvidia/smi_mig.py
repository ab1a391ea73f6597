"""nvidia-smi mig: the GPU instances of GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.fakes.nvidia import smi_text as text
from tests.fakes.nvidia.modes import NOT_FOUND, GpuModes, NvmlError
from tests.fakes.programs import Said

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tests.fakes.nvidia.gpus import Gpu
    from tests.fakes.nvidia.rules import GpuInstance

_Found = list[tuple["Gpu", "GpuInstance"]]
_USAGE = Said(2, "Invalid combination of input arguments.\n")


class SmiMig:
    """`index` tells the number of a GPU."""

    def __init__(self, modes: GpuModes, index: Callable[[Gpu], int]) -> None:
        self._modes = modes
        self._index = index

    def run(self, gpus: list[Gpu], options: dict[str, str]) -> Said:
        """Do what the options say to the GPUs that have MIG on."""
        able = [gpu for gpu in gpus if self._modes.modes(gpu).is_mig]
        if not able:
            return Said(NOT_FOUND[0], "No MIG-enabled devices found.\n")
        if "-cgi" in options:
            return self._create(able, options["-cgi"].split(","), has_compute="-C" in options)
        if "-lgip" in options:
            return Said(0, text.lines(row for gpu in able for row in self._profiles(gpu)))
        if "-lgipp" in options:
            return Said(0, text.lines(row for gpu in able for row in self._places(gpu)))
        return self._act(self._found(able, options.get("-gi")), options)

    def _act(self, found: _Found, options: dict[str, str]) -> Said:
        if not found:
            return Said(NOT_FOUND[0], f"No GPU instances found: {NOT_FOUND[1]}\n")
        acts: dict[str, Callable[[_Found], Said]] = {
            "-lgi": self._list,
            "-lci": self._list_compute,
            "-cci": self._create_compute,
            "-dci": self._destroy_compute,
            "-dgi": lambda those: self._destroy(those, "GPU instances", self._modes.destroy),
        }
        return next((act(found) for word, act in acts.items() if word in options), _USAGE)

    def _list(self, found: _Found) -> Said:
        return Said(0, text.lines([*text.instances_head(), *self._instances(found)]))

    def _destroy_compute(self, found: _Found) -> Said:
        there = [(gpu, instance) for gpu, instance in found if instance.has_compute]
        if not there:
            return Said(NOT_FOUND[0], f"No compute instances found: {NOT_FOUND[1]}\n")
        return self._destroy(there, "compute instances", self._modes.destroy_compute)

    def _found(self, gpus: list[Gpu], wanted: str | None) -> _Found:
        return [
            (gpu, instance)
            for gpu in gpus
            for instance in self._modes.modes(gpu).instances
            if wanted is None or str(instance.id) in wanted.split(",")
        ]

    def _profiles(self, gpu: Gpu) -> Iterable[str]:
        for profile in gpu.card.profiles:
            free = self._modes.free_places(gpu, profile)
            yield from text.profile_of(self._index(gpu), profile, free)

    def _places(self, gpu: Gpu) -> Iterable[str]:
        for profile in gpu.card.profiles:
            yield text.places_of(self._index(gpu), profile)

    def _list_compute(self, found: _Found) -> Said:
        there = [(gpu, instance) for gpu, instance in found if instance.has_compute]
        if not there:
            return Said(NOT_FOUND[0], f"No compute instances found: {NOT_FOUND[1]}\n")
        rows = list(text.compute_head())
        for gpu, instance in there:
            profile = self._modes.profile(gpu, instance)
            rows += text.compute_of(self._index(gpu), instance, profile)
        return Said(0, text.lines(rows))

    def _create_compute(self, found: _Found) -> Said:
        rows: list[str] = []
        for gpu, instance in found:
            where = f"GPU {self._index(gpu):>2} GPU instance ID {instance.id:>2}"
            try:
                self._modes.create_compute(gpu, instance)
            except NvmlError as error:
                rows.append(f"Unable to create a compute instance on {where}: {error}")
                rows.append(f"Failed to create compute instances: {error}")
                return Said(error.number, text.lines(rows))
            rows.append(f"Successfully created compute instance ID  0 on {where}")
        return Said(0, text.lines(rows))

    def _instances(self, found: _Found) -> Iterable[str]:
        for gpu, instance in found:
            profile = self._modes.profile(gpu, instance)
            yield from text.instance_of(self._index(gpu), instance, profile)

    def _create(self, gpus: list[Gpu], wanted: list[str], *, has_compute: bool) -> Said:
        rows: list[str] = []
        for gpu, name in ((gpu, name) for gpu in gpus for name in wanted):
            place = f"GPU {self._index(gpu):>2}"
            try:
                made = self._modes.create(gpu, name, has_compute=has_compute)
            except NvmlError as error:
                rows.append(f"Unable to create a GPU instance on {place} using {name}: {error}")
                rows.append(f"Failed to create GPU instances: {error}")
                return Said(error.number, text.lines(rows))
            rows += self._created(gpu, made, place)
        return Said(0, text.lines(rows))

    def _created(self, gpu: Gpu, made: GpuInstance, place: str) -> Iterable[str]:
        profile = self._modes.profile(gpu, made)
        using = f"using profile MIG {profile.name} (ID {profile.number:>2})"
        yield f"Successfully created GPU instance ID {made.id:>2} on {place} {using}"
        if made.has_compute:
            where = f"{place} GPU instance ID {made.id:>2}"
            yield f"Successfully created compute instance ID  0 on {where}"

    def _destroy(self, found: _Found, what: str, act: Callable[[Gpu, GpuInstance], None]) -> Said:
        rows: list[str] = []
        for gpu, instance in found:
            which = f"{what[:-1]} ID {instance.id:>2} from GPU {self._index(gpu):>2}"
            try:
                act(gpu, instance)
            except NvmlError as error:
                rows.append(f"Unable to destroy {which}: {error}")
                rows.append(f"Failed to destroy {what}: {error}")
                return Said(error.number, text.lines(rows))
            rows.append(f"Successfully destroyed {which}")
        return Said(0, text.lines(rows))
