"""vGPUs in GPU instances (MIG): memory slices by placement."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.fakes.nvidia.cards import RTX_PRO_6000
from tests.fakes.vgpu_hosts import mig_host
from tests.unit.devices import host_of, with_facts
from tests.unit.node.dra.scheduling import NODE, Allocated, candidates, filled, found
from tests.unit.partitions import A100, instance, partition
from tests.unit.vgpus import add_divided_gpu
from tests.unit.vgpus import instance as vgpu_on
from vfiomgr.node.dra.plan import pools
from vfiomgr.snapshot.scan import scan
from vfiomgr.vgpu.instances import lay_out
from vfiomgr.vgpu.model import GpuMode, VgpuType, describe_type

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from vfiomgr.node.dra.model import DraDevice, Pool
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.vgpu.instance_model import GpuPartition

GPU = "0000:01:00.0"
POOL = f"{NODE}/gpu-0000-01-00-0"
PREFIX = "gpu-0000-01-00-0-a100"
MODE = GpuMode(GPU, heterogeneous=False, mig=True, framebuffer=40960)


def backed(number: int, name: str, profile: str, size: int) -> VgpuType:
    """A type of an A100, one of which runs in a GPU instance of a profile."""
    kind = describe_type(f"nvidia-{number}", f"GRID A100-{name}", f"framebuffer={size}M")
    number = next(known.id for known in A100 if known.name == profile)
    return replace(kind, instance_profile=number, per_instance=1)


TYPES = (
    backed(474, "1-5C", "1g.5gb", 4864),
    backed(480, "1-5CME", "1g.5gb+me", 4864),
    backed(475, "2-10C", "2g.10gb", 9984),
    backed(476, "3-20C", "3g.20gb", 20096),
    backed(477, "4-20C", "4g.20gb", 20096),
    backed(478, "7-40C", "7g.40gb", 40448),
)
PROFILE = {profile.id: profile for profile in A100}


def a100(there: GpuPartition | None = None, made: Mapping[int, int] | None = None) -> HostSnapshot:
    """A divided A100 with vGPUs in GPU instances: type by the number of its instance."""
    host = add_divided_gpu(host_of(), 1, types=TYPES, functions=16)
    known = replace(there or partition(), gpu=GPU)
    profiles = {one.id: one.profile for one in known.instances}
    vgpus = tuple(
        replace(
            vgpu_on(host.vgpus.parents[place].name, kind_of(profiles[number]), place),
            gpu_instance=number,
        )
        for place, number in enumerate(made or {})
    )
    return with_facts(host, gpu_modes=(MODE,), gpu_partitions=(known,), vgpus=vgpus)


def kind_of(profile: int) -> VgpuType:
    return next(kind for kind in TYPES if kind.instance_profile == profile)


def published(
    host: HostSnapshot,
    allocated: Iterable[str] = (),
    created: Mapping[str, str] | None = None,
) -> Pool:
    """The pool of the GPU; claims have devices of these names."""
    claims = frozenset((POOL, f"{PREFIX}-{name}") for name in allocated)
    own = {vgpu: (POOL, f"{PREFIX}-{name}") for vgpu, name in (created or {}).items()}
    (pool,) = pools(host, found(), NODE, allocated=claims, created=own)
    return pool


def numbers(pool: Pool, label: str) -> list[int]:
    """The numbers of the devices of a type."""
    prefix = f"{PREFIX}-{label}-"
    return [int(d.name.removeprefix(prefix)) for d in pool.devices if d.name.startswith(prefix)]


def slices_of(device: DraDevice) -> set[int]:
    return {
        int(name.removeprefix("memory-slice-"))
        for use in device.consumes
        for name in use.counters
        if name.startswith("memory-slice-")
    }


def free_slices(pool: Pool) -> set[int]:
    (counters,) = pool.counter_sets
    prefix = "memory-slice-"
    found_slices = {n: c for n, c in counters.counters.items() if n.startswith(prefix)}
    return {int(n.removeprefix(prefix)) for n, count in found_slices.items() if count}


def test_each_placement_is_a_device_with_its_slices() -> None:
    pool = published(a100())
    assert numbers(pool, "1-5c") == [6, 5, 4, 3, 2, 1, 0]
    assert numbers(pool, "2-10c") == [4, 2, 0]
    assert numbers(pool, "7-40c") == [0]
    assert free_slices(pool) == set(range(8))
    by_name = {device.name: slices_of(device) for device in pool.devices}
    assert by_name[f"{PREFIX}-2-10c-4"] == {4, 5}
    assert by_name[f"{PREFIX}-3-20c-4"] == {4, 5, 6, 7}


def test_engines_limit_what_slices_allow() -> None:
    pool = published(a100())
    assert len([n for _, n in filled([pool]) if "1-5cme" in n]) <= 1
    claim = frozenset({(POOL, f"{PREFIX}-1-5cme-6")})
    left = {name for _, name in candidates([pool], claim)}
    assert not any("1-5cme" in name for name in left)
    assert f"{PREFIX}-1-5c-5" in left


def test_without_engines_the_number_of_a_profile_is_the_limit() -> None:
    silent = replace(partition(), profiles=tuple(replace(p, engines=()) for p in A100))
    pool = published(a100(silent))
    assert len([n for _, n in filled([pool]) if "1-5cme" in n]) <= 1
    claim = frozenset({(POOL, f"{PREFIX}-1-5cme-6"), (POOL, f"{PREFIX}-1-5c-5")})
    left = {name for _, name in candidates([pool], claim)}
    assert not any("1-5cme" in name for name in left)
    assert f"{PREFIX}-1-5c-4" in left


def test_a_claim_reserves_its_slices() -> None:
    pool = published(a100(), ["3-20c-4"])
    assert free_slices(pool) == {0, 1, 2, 3}
    assert numbers(pool, "3-20c") == [4, 0]
    assert numbers(pool, "1-5c") == [3, 2, 1, 0]
    assert numbers(pool, "7-40c") == []


def test_an_instance_that_exists_is_for_types_of_its_profile() -> None:
    pool = published(a100(partition(instance("3g.20gb", 4))))
    assert numbers(pool, "3-20c") == [4, 0]
    assert numbers(pool, "1-5c") == [3, 2, 1, 0]
    assert numbers(pool, "2-10c") == [2, 0]


def test_an_instance_of_a_process_of_the_host_is_not_offered() -> None:
    busy = instance("3g.20gb", 4, processes=("python (PID 4711)",))
    assert numbers(published(a100(partition(busy))), "3-20c") == [0]


def test_the_slices_of_a_created_vgpu_are_those_of_its_instance() -> None:
    there = partition(instance("1g.5gb", 2, 9))
    host = a100(there, {9: 19})
    (vgpu,) = host.vgpus.active
    pool = published(host, ["1-5c-6"], {vgpu.name: "1-5c-6"})
    assert free_slices(pool) == set(range(8)) - {2}
    assert numbers(pool, "1-5c") == [6, 5, 4, 3, 1, 0]


def test_a_created_vgpu_whose_instance_is_not_reported_has_one_of_its_profile() -> None:
    there = partition(instance("1g.5gb", 2, 9))
    host = a100(there, {9: 19})
    vgpu = replace(host.vgpus.active[0], gpu_instance=None)
    pool = published(with_facts(host, vgpus=(vgpu,)), ["1-5c-6"], {vgpu.name: "1-5c-6"})
    assert free_slices(pool) == set(range(8)) - {2}


def test_a_vgpu_of_somebody_else_takes_its_slices_and_a_function() -> None:
    pool = published(a100(partition(instance("3g.20gb", 4, 9)), {9: 9}))
    assert free_slices(pool) == {0, 1, 2, 3}
    assert numbers(pool, "3-20c") == [0]
    assert pool.counter_sets[0].counters["functions"] == 15


def test_nothing_is_offered_where_a_vgpu_cannot_be_placed() -> None:
    host = a100(partition(instance("3g.20gb", 4, 9)), {9: 9})
    vgpu = replace(host.vgpus.active[0], gpu_instance=5)
    assert pools(with_facts(host, vgpus=(vgpu,)), found(), NODE) == ()
    known = published(with_facts(host, vgpus=(vgpu,)), ["1-5c-0"])
    assert [device.name for device in known.devices] == [f"{PREFIX}-1-5c-0"]


def test_a_claim_whose_placement_somebody_else_took_will_be_elsewhere() -> None:
    """Until its vGPU is created, any other placement may be the one that it gets."""
    pool = published(a100(partition(instance("1g.5gb", 6, 9)), {9: 19}), ["1-5c-6"])
    assert [device.name for device in pool.devices] == [f"{PREFIX}-1-5c-6"]


def test_vgpus_of_one_type_share_an_instance(tmp_path: Path) -> None:
    kernel = mig_host(tmp_path, card=RTX_PRO_6000, total_vfs=12)
    address = "0000:21:00.0"
    kernel.call("nvidia-smi", "-mig", "1", "-i", address)
    kernel.call("/usr/lib/nvidia/sriov-manage", "-e", address)
    host = scan(kernel, kernel, with_gpu_modes=True)
    (empty,) = pools(host, found(), NODE)
    prefix = f"{empty.name.removeprefix(NODE + '/')}-dc-1-3q-"
    assert [d.name.removeprefix(prefix) for d in empty.devices if d.name.startswith(prefix)] == [
        *("72", "48", "24", "0")
    ]
    assert len([n for _, n in filled([empty]) if n.startswith(prefix)]) <= 4
    claim = frozenset({(empty.name, f"{prefix}27")})
    (pool,) = pools(host, found(), NODE, allocated=claim)
    in_use = [d for d in pool.devices if d.name.startswith(prefix) and not slices_of(d)]
    assert {d.name.removeprefix(prefix) for d in in_use} == {str(n) for n in range(24, 32)}
    assert not any(slices_of(device) & {3, 4, 5} for device in pool.devices)


@given(data=st.data())
def test_what_is_scheduled_has_room_as_the_driver_places_it(data: st.DataObject) -> None:
    """The driver chooses the placement of each new instance itself."""
    there, made = partition(), dict[str, int]()
    for number in range(1, 9):
        host = a100(there, dict.fromkeys(made.values(), 0))
        own = dict(zip((vgpu.name for vgpu in host.vgpus.active), made, strict=True))
        claims: Allocated = frozenset((POOL, name) for name in made)
        created = {vgpu: (POOL, name) for vgpu, name in own.items()}
        (pool,) = pools(host, found(), NODE, allocated=claims, created=created)
        free = candidates([pool], claims)
        if not free:
            break
        _, name = data.draw(st.sampled_from(sorted(free)))
        kind = next(d for d in pool.devices if d.name == name).target.type
        profile = next(k.instance_profile for k in TYPES if k.id == kind)
        assert profile is not None
        places = lay_out(there, {profile: 1}, there.instances)
        assert places is not None, f"no room for {name} beside {there.instances}"
        (place,) = places
        new = instance(place.name, place.start, number)
        there, made[name] = partition(*there.instances, new), number


@given(data=st.data())
def test_claims_that_are_not_prepared_yet_fit_together(data: st.DataObject) -> None:
    (pool,) = pools(a100(), found(), NODE)
    claims: Allocated = frozenset()
    while free := candidates([pool], claims):
        claims |= {data.draw(st.sampled_from(sorted(free)))}
        (pool,) = pools(a100(), found(), NODE, allocated=claims)
        wanted: dict[int, int] = {}
        for device in pool.devices:
            if (POOL, device.name) in claims:
                kind = next(k for k in TYPES if k.id == device.target.type)
                profile = kind.instance_profile or 0
                wanted[profile] = wanted.get(profile, 0) + 1
        assert lay_out(partition(), wanted) is not None


def test_gpu_instances_have_no_compatibility_groups() -> None:
    made = pools(a100(), found(), NODE, has_groups=True)
    assert made == pools(a100(), found(), NODE)
    assert {use.groups for pool in made for d in pool.devices for use in d.consumes} == {()}
