"""GPUs in MIG mode as values."""

from __future__ import annotations

from msgspec.structs import replace

from vfiomgr.vgpu.instance_model import GpuInstance, GpuPartition, InstanceProfile

A100 = (
    InstanceProfile(19, "1g.5gb", 4864, 7, 7, tuple(range(7)), 1, (14, 0, 0, 0, 0)),
    InstanceProfile(20, "1g.5gb+me", 4864, 1, 1, tuple(range(7)), 1, (14, 1, 0, 1, 1)),
    InstanceProfile(14, "2g.10gb", 9984, 3, 3, (0, 2, 4), 2, (28, 1, 0, 0, 0)),
    InstanceProfile(9, "3g.20gb", 20096, 2, 2, (0, 4), 4, (42, 2, 0, 0, 0)),
    InstanceProfile(5, "4g.20gb", 20096, 1, 1, (0,), 4, (56, 2, 0, 0, 0)),
    InstanceProfile(0, "7g.40gb", 40448, 1, 1, (0,), 8, (98, 5, 0, 1, 1)),
)
"""Those of an A100 with 40 GB, as nvidia-smi lists them."""


def partition(*instances: GpuInstance, gpu: str = "0000:41:00.0") -> GpuPartition:
    """An A100 with some instances; of each profile so many are free as places are."""
    taken = {n for one in instances for n in range(one.start, one.start + one.size)}
    profiles = tuple(
        replace(
            profile,
            free=min(
                profile.total,
                sum(taken.isdisjoint(range(s, s + profile.size)) for s in profile.starts),
            ),
        )
        for profile in A100
    )
    return GpuPartition(gpu, profiles, instances)


def instance(name: str, start: int, number: int = 1, **facts: object) -> GpuInstance:
    """A GPU instance with its default compute instance."""
    profile = next(known for known in A100 if known.name == name)
    known = {"compute_instances": (name,)} | facts
    return GpuInstance(number, profile.id, name, start, profile.size, **known)  # type: ignore[arg-type]
