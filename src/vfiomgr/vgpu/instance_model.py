"""GPU instances: the hardware partitions of a GPU in MIG mode, as reported by nvidia-smi.

A profile defines the size of an instance and its possible placements, in memory slices; two
instances never share a slice (NVML: nvmlGpuInstancePlacement_t).
"""

from __future__ import annotations

from vfiomgr.value import Value


class InstanceProfile(Value):
    """A kind of GPU instance of a GPU."""

    id: int
    name: str
    """`1g.5gb`, `1g.5gb+me` (with media engines), `1g.24gb+gfx`, `1g.24gb-me`."""
    memory: int | None
    """MiB of one instance."""
    free: int
    """How many more instances of this profile the driver would create now."""
    total: int
    """How many instances of this profile fit on an empty GPU."""
    starts: tuple[int, ...] = ()
    size: int = 0
    """The size in memory slices."""
    engines: tuple[int, ...] = ()
    """The engines it uses: multiprocessors, decoders, encoders, JPEG, optical flow."""

    def __str__(self) -> str:
        """`1g.5gb (19)`."""
        return f"{self.name} ({self.id})"


class InstancePlace(Value):
    """The placement of a GPU instance, without its number, which changes when it is recreated."""

    profile: int
    name: str
    start: int
    has_compute: bool = True
    """Whether it has the compute instance that `nvidia-smi mig -cgi … -C` creates."""

    @property
    def specifier(self) -> str:
        """The argument of `nvidia-smi mig -cgi`: profile and first slice."""
        return f"{self.profile}:{self.start}"

    def __str__(self) -> str:
        """`1g.5gb at 6`."""
        return f"{self.name} at {self.start}"


class GpuInstance(Value):
    """One GPU instance; its number is valid until it is destroyed."""

    id: int
    profile: int
    name: str
    start: int
    size: int
    compute_instances: tuple[str, ...] = ()
    """The profiles of its compute instances: its own name, or parts such as `1c.3g.20gb`."""
    processes: tuple[str, ...] = ()
    """Its processes: `python (PID 4711)`."""

    @property
    def place(self) -> InstancePlace:
        """Its placement."""
        return InstancePlace(self.profile, self.name, self.start, bool(self.compute_instances))

    @property
    def is_whole(self) -> bool:
        """Whether it has no or the default compute instance, so that it can be recreated."""
        return self.compute_instances in ((), (self.name,))

    def __str__(self) -> str:
        """`GPU instance 7 (1g.5gb)`."""
        return f"GPU instance {self.id} ({self.name})"


class GpuPartition(Value):
    """The GPU instances of a GPU in MIG mode, and its profiles."""

    gpu: str
    profiles: tuple[InstanceProfile, ...]
    instances: tuple[GpuInstance, ...]

    def profile(self, number: int | None) -> InstanceProfile | None:
        """The profile with this number."""
        return next((known for known in self.profiles if known.id == number), None)

    def called(self, text: str) -> InstanceProfile | None:
        """The profile with this name, with or without `MIG `, or this number as text."""
        wanted = text.strip().casefold().removeprefix("mig ")
        return next((p for p in self.profiles if wanted in (str(p.id), p.name.casefold())), None)

    @property
    def places(self) -> tuple[InstancePlace, ...]:
        """The placements of its instances, in memory order."""
        return tuple(instance.place for instance in by_start(self.instances))


def by_start(instances: tuple[GpuInstance, ...]) -> tuple[GpuInstance, ...]:
    """The GPU instances in memory order."""
    return tuple(sorted(instances, key=lambda instance: instance.start))


def counted_places(places: tuple[InstancePlace, ...]) -> str:
    """`2 x 1g.5gb, 3g.20gb`; `none`."""
    names = [place.name for place in places]
    texts = [f"{n} x {name}" if (n := names.count(name)) > 1 else name for name in names]
    return ", ".join(dict.fromkeys(texts)) or "none"
