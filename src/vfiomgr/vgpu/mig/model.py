"""GPU instances: the parts of its own hardware that MIG divides a GPU into, as nvidia-smi tells.

A profile says how large an instance is and where one can be; places are counted in slices of the
GPU's memory, and no two instances share one (NVML: nvmlGpuInstancePlacement_t).
"""

from __future__ import annotations

from vfiomgr.value import Value


class InstanceProfile(Value):
    """A kind of GPU instance that a GPU can be divided into."""

    id: int
    name: str
    """`1g.5gb`, `1g.5gb+me` (with media engines), `1g.24gb+gfx`, `1g.24gb-me`."""
    memory: int | None
    """MiB of one instance."""
    free: int
    """How many more of it alone the driver would make beside what is there."""
    total: int
    """How many of it alone a GPU without instances holds."""
    starts: tuple[int, ...] = ()
    size: int = 0
    """Slices of memory."""
    engines: tuple[int, ...] = ()
    """What of the GPU it takes: multiprocessors, decoders, encoders, JPEG, optical flow."""

    def __str__(self) -> str:
        """`1g.5gb (19)`."""
        return f"{self.name} ({self.id})"


class InstancePlace(Value):
    """A GPU instance that is to be, or was: what makes one again, but for its number."""

    profile: int
    name: str
    start: int
    has_compute: bool = True
    """Whether it has the one compute instance that `nvidia-smi mig -cgi … -C` gives it."""

    @property
    def specifier(self) -> str:
        """What `nvidia-smi mig -cgi` takes: the profile, and where to begin."""
        return f"{self.profile}:{self.start}"

    def __str__(self) -> str:
        """`1g.5gb at 6`."""
        return f"{self.name} at {self.start}"


class GpuInstance(Value):
    """One GPU instance; its number is good until it is destroyed."""

    id: int
    profile: int
    name: str
    start: int
    size: int
    compute_instances: tuple[str, ...] = ()
    """The profiles of its compute instances: its own name, or parts of it like `1c.3g.20gb`."""
    processes: tuple[str, ...] = ()
    """What computes on it: `python (PID 4711)`."""

    @property
    def place(self) -> InstancePlace:
        """Where it is, as what."""
        return InstancePlace(self.profile, self.name, self.start, bool(self.compute_instances))

    @property
    def is_whole(self) -> bool:
        """Whether it has no compute instances, or the default one, so that it can be made again."""
        return self.compute_instances in ((), (self.name,))

    def __str__(self) -> str:
        """`GPU instance 7 (1g.5gb)`."""
        return f"GPU instance {self.id} ({self.name})"


class GpuPartition(Value):
    """How a GPU in MIG mode is divided, and can be."""

    gpu: str
    profiles: tuple[InstanceProfile, ...]
    instances: tuple[GpuInstance, ...]

    def profile(self, number: int | None) -> InstanceProfile | None:
        """The profile of a number."""
        return next((known for known in self.profiles if known.id == number), None)

    def called(self, text: str) -> InstanceProfile | None:
        """The profile of a name, with or without `MIG `, or of a number as text."""
        wanted = text.strip().casefold().removeprefix("mig ")
        return next((p for p in self.profiles if wanted in (str(p.id), p.name.casefold())), None)

    @property
    def places(self) -> tuple[InstancePlace, ...]:
        """Where its instances are, in the order of the memory."""
        return tuple(instance.place for instance in by_start(self.instances))


def by_start(instances: tuple[GpuInstance, ...]) -> tuple[GpuInstance, ...]:
    """In the order of the memory that they have."""
    return tuple(sorted(instances, key=lambda instance: instance.start))


def counted(places: tuple[InstancePlace, ...]) -> str:
    """`2 x 1g.5gb, 3g.20gb`; `none`."""
    names = [place.name for place in places]
    texts = [f"{n} x {name}" if (n := names.count(name)) > 1 else name for name in names]
    return ", ".join(dict.fromkeys(texts)) or "none"
