from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from tests.unit.devices import host_of, with_facts
from tests.unit.vgpus import A40_TYPES, MEMORY, a40_type, add_divided_gpu, vgpu_host
from vfiomgr.vgpu.capacity import Capacity, gpus, room, rooms, totals
from vfiomgr.vgpu.instance_model import GpuInstance, GpuPartition
from vfiomgr.vgpu.instances import lacking, seats
from vfiomgr.vgpu.model import GpuMode, Vgpu, VgpuParent, VgpuType, describe_type

if TYPE_CHECKING:
    from vfiomgr.snapshot.model import HostSnapshot

MBOCHS = tuple(
    describe_type(f"mbochs-{name}", name, f"virtual display, {size} MB video memory", "vfio-pci")
    for name, size in (("small", 4), ("medium", 16), ("large", 64))
)


def found(host: HostSnapshot, kind: VgpuType) -> Capacity:
    (gpu,) = gpus(host)
    return room(gpu, kind)


def test_an_empty_gpu_has_room_for_its_maximum_not_for_one_on_each_function() -> None:
    host = vgpu_host(())
    more = {kind.name: found(host, kind).more for kind in A40_TYPES}
    assert more == {
        "NVIDIA A40-1Q": 32,  # virtual functions
        "NVIDIA A40-2Q": 24,
        "NVIDIA A40-3Q": 16,
        "NVIDIA A40-4Q": 12,
        "NVIDIA A40-6Q": 8,
        "NVIDIA A40-8Q": 6,
        "NVIDIA A40-12Q": 4,
        "NVIDIA A40-16Q": 3,
        "NVIDIA A40-24Q": 2,
        "NVIDIA A40-48Q": 1,
    }
    assert all(found(host, kind).is_certain for kind in A40_TYPES)


def test_what_a_size_would_strand() -> None:
    assert found(vgpu_host(()), a40_type(1)).stranded == MEMORY - 32 * 1024
    assert found(vgpu_host(()), a40_type(2)).stranded == 0
    assert found(vgpu_host((a40_type(2),)), a40_type(4)).stranded is None


def test_one_vgpu_locks_the_size() -> None:
    host = vgpu_host((a40_type(2), a40_type(2), a40_type(2)))
    assert found(host, a40_type(2)).more == 21
    locked = found(host, a40_type(4))
    assert locked.more == 0
    assert (
        locked.why_not
        == "size lock: its 3 vGPUs have 2048 MiB, and all vGPUs of a GPU must have the same size"
    )


def test_vgpus_have_one_size_unless_a_mode_mixes_them() -> None:
    host = vgpu_host(())
    (gpu,) = gpus(host)
    assert (gpu.has_one_size, gpu.lock) == (True, None)
    for facts in ({"heterogeneous": True, "mig": False}, {"heterogeneous": False, "mig": True}):
        mode = GpuMode("0000:01:00.0", framebuffer=MEMORY, **facts)
        (gpu,) = gpus(with_facts(host, gpu_modes=(mode,)))
        assert not gpu.has_one_size


def test_the_lock_holds_even_where_the_driver_still_offers_other_sizes() -> None:
    host = vgpu_host((a40_type(2),))
    parents = tuple(
        replace(p, available=(1,) * len(p.types)) if p.name != host.vgpus.active[0].parent else p
        for p in host.vgpus.parents
    )
    assert found(with_facts(host, vgpu_parents=parents), a40_type(4)).more == 0


def test_in_heterogeneous_mode_memory_is_the_limit() -> None:
    host = vgpu_host((a40_type(24), a40_type(2)))
    every = tuple(replace(p, available=(1,) * len(p.types)) for p in host.vgpus.parents)
    mode = GpuMode("0000:01:00.0", heterogeneous=True, mig=False, framebuffer=MEMORY)
    shown = with_facts(host, vgpu_parents=every)  # by the vGPUs; nvidia-smi does not report it
    host = with_facts(shown, gpu_modes=(mode,))
    small = found(host, a40_type(2))
    assert small == found(shown, a40_type(2))
    assert (small.more, small.stranded) == ((MEMORY - 26 * 1024) // 2048, 0)
    assert found(shown, a40_type(24)).why_not == "not enough memory: 26624 of 49152 MiB used"
    assert found(host, a40_type(12)).more == 1  # of 22 GiB
    assert found(host, a40_type(2)).more == 11
    assert found(host, a40_type(48)).more == 0


def test_used_memory_is_not_compared_with_the_number_of_virtual_functions() -> None:
    """26 of 48 GiB are used, on 2 of 16 virtual functions."""
    host = vgpu_host((a40_type(24), a40_type(2)), functions=16)
    every = tuple(replace(p, available=(1,) * len(p.types)) for p in host.vgpus.parents)
    mode = GpuMode("0000:01:00.0", heterogeneous=True, mig=False, framebuffer=MEMORY)
    host = with_facts(host, vgpu_parents=every, gpu_modes=(mode,))
    assert found(host, a40_type(1)).more == 32 - 26
    assert found(host, a40_type(2)).more == 24 - 13
    empty = vgpu_host((), functions=16)
    assert found(empty, a40_type(1)).more == 16


def test_a_full_gpu_says_its_maximum() -> None:
    host = vgpu_host((a40_type(24),) * 2)
    assert found(host, a40_type(24)).why_not == "maximum reached: 2 of 2"


def test_without_a_free_virtual_function_memory_does_not_help() -> None:
    host = vgpu_host((a40_type(2),) * 4, functions=4)
    assert found(host, a40_type(2)).why_not == "no free virtual function: 4 of 4 are vGPUs"


@pytest.mark.parametrize("change", [{"driver": None}, {"stuck": "x"}, {"is_responsive": False}])
def test_a_function_that_nothing_can_be_made_of_does_not_count(change: dict[str, object]) -> None:
    host = vgpu_host((), functions=2)
    broken = replace(host.devices[1], **change)
    devices = tuple(broken if d.address == broken.address else d for d in host.devices)
    assert found(with_facts(host, devices=devices), a40_type(1)).more == 1


def test_all_gpus_together_have_what_each_has() -> None:
    host = vgpu_host((), (a40_type(24),), (a40_type(2),))
    found = totals(room for gpu in gpus(host) for room in rooms(gpu))
    assert {one.type.short_name: one.more for one in found if one.more} == {
        "A40-1Q": 32,
        "A40-2Q": 24 + 23,
        "A40-3Q": 16,
        "A40-4Q": 12,
        "A40-6Q": 8,
        "A40-8Q": 6,
        "A40-12Q": 4,
        "A40-16Q": 3,
        "A40-24Q": 2 + 1,
        "A40-48Q": 1,
    }
    assert totals(rooms(gpus(vgpu_host(()))[0])) == ()


def undivided(available: tuple[int | None, ...], *made: VgpuType) -> HostSnapshot:
    path = "/sys/devices/virtual/mbochs/mbochs"
    parent = VgpuParent("mbochs", path, "mdev", "mbochs", "mbochs", MBOCHS, available)
    vgpus = tuple(
        Vgpu(f"u{n}", "mdev", "mbochs", kind.id, kind.name, None, None, None, None)
        for n, kind in enumerate(made)
    )
    return with_facts(host_of(), vgpu_parents=(parent,), vgpus=vgpus)


def test_one_parent_for_all_says_itself_how_many() -> None:
    host = undivided((62, 15, 3), MBOCHS[0], MBOCHS[0])
    (gpu,) = gpus(host)
    assert [found.more for found in rooms(gpu)] == [3, 15, 62]
    assert gpu.framebuffer == 256
    assert gpu.lock is None
    assert room(gpu, MBOCHS[2]).stranded == 256 - 8 - 3 * 64


def test_a_parent_that_says_nothing_has_room_for_one_at_most() -> None:
    unknown = found(undivided((None, None, None)), MBOCHS[0])
    assert (unknown.more, unknown.is_certain) == (1, False)


def test_a_full_parent_says_that_its_memory_is_taken() -> None:
    host = undivided((0, 0, 0), *[MBOCHS[2]] * 4)
    assert found(host, MBOCHS[0]).why_not == "not enough memory: 256 of 256 MiB used"


def test_a_recording_that_leaves_out_what_is_offered_is_told_as_the_most() -> None:
    host = vgpu_host((a40_type(2),), functions=4)
    bare = tuple(
        replace(p, types=p.types if n == 0 else (), available=p.available if n == 0 else ())
        for n, p in enumerate(host.vgpus.parents)
    )
    most = found(with_facts(host, vgpu_parents=bare), a40_type(2))
    assert (most.more, most.is_certain) == (3, False)


def test_gpus_come_in_the_order_of_their_addresses() -> None:
    host = add_divided_gpu(vgpu_host((), ()), 9, functions=2)
    assert [gpu.name for gpu in gpus(host)] == ["0000:01:00.0", "0000:02:00.0", "0000:09:00.0"]


def vendor(names: tuple[str, ...], made: int = 0) -> HostSnapshot:
    """A GPU of the vendor's own interface, whose names alone tell of its types."""
    host = vgpu_host((), functions=4)
    kinds = tuple(
        describe_type(str(1000 + n), name, None, "vfio-pci") for n, name in enumerate(names)
    )
    parents = tuple(
        replace(
            p,
            family="vendor-vfio",
            types=kinds if n >= made else (),
            available=(1,) * len(kinds) if n >= made else (),
        )
        for n, p in enumerate(host.vgpus.parents)
    )
    vgpus = tuple(
        Vgpu(None, "vendor-vfio", parents[n].name, kinds[0].id, None, "nvidia", 1, None, None)
        for n in range(made)
    )
    return with_facts(host, vgpu_parents=parents, vgpus=vgpus)


def test_the_vendors_own_interface_tells_what_but_not_how_many() -> None:
    host = vendor(("NVIDIA L40S-2Q", "NVIDIA L40S-48Q"))
    (gpu,) = gpus(host)
    small, whole = rooms(gpu)
    assert (small.more, small.is_certain) == (4, False)
    assert (whole.more, whole.is_certain) == (4, False)


def test_a_function_that_left_the_vendors_driver_makes_no_vgpu() -> None:
    host = vendor(("NVIDIA L40S-2Q",))
    gpu, first, *others = host.devices
    moved = replace(host, devices=(gpu, replace(first, driver="vfio-pci"), *others))
    assert [found(each, host.vgpus.parents[0].types[0]).more for each in (host, moved)] == [4, 3]


def test_with_its_memory_known_the_number_is_certain() -> None:
    host = vendor(("NVIDIA L40S-24Q",), made=1)
    mode = GpuMode("0000:01:00.0", heterogeneous=False, mig=False, framebuffer=49152)
    (gpu,) = gpus(with_facts(host, gpu_modes=(mode,)))
    (only,) = rooms(gpu)
    assert (only.more, only.is_certain) == (1, True)


def test_with_mig_the_driver_alone_knows() -> None:
    host = vendor(("NVIDIA A100-1-5C",))
    mode = GpuMode("0000:01:00.0", heterogeneous=False, mig=True, framebuffer=40960)
    (gpu,) = gpus(with_facts(host, gpu_modes=(mode,)))
    assert rooms(gpu)[0].is_certain is False


def test_gpu_instances_have_several_sizes_without_heterogeneous_mode() -> None:
    host = vgpu_host((a40_type(24), a40_type(2)))
    divided = GpuMode("0000:01:00.0", heterogeneous=False, mig=True, framebuffer=MEMORY)
    (gpu,) = gpus(with_facts(host, gpu_modes=(divided,)))
    assert (gpu.has_several_sizes, gpu.is_heterogeneous, gpu.lock) == (True, False, None)
    parents = tuple(
        replace(p, types=tuple(replace(k, name=f"{k.name} A100-1-{k.id[-1]}C") for k in p.types))
        for p in host.vgpus.parents
    )
    (gpu,) = gpus(with_facts(host, vgpu_parents=parents))
    assert (gpu.has_several_sizes, gpu.is_heterogeneous) == (True, False), "by the names of types"


def test_the_vgpus_of_a_gpu_instance_have_one_size() -> None:
    """Up to `Max Instances Per GI` (nvidia-smi vgpu -s -v) of one size share an instance."""
    small, large = (
        replace(a40_type(size), instance_profile=47, per_instance=count)
        for size, count in ((2, 4), (4, 2))
    )
    (plain,) = gpus(vgpu_host((small, large)))
    instance = GpuInstance(id=1, profile=47, name="1g.24gb", start=0, size=1)
    empty = replace(plain, partition=GpuPartition(plain.name, (), (instance,)))
    assert (seats(empty, small), seats(empty, large)) == (4, 2)
    vgpu = Vgpu(None, "vendor-vfio", "0000:01:00.4", small.id, None, None, None, None, None, 1)
    used = replace(empty, instances=(vgpu,))
    assert (seats(used, small), seats(used, large)) == (3, 0)
    assert (lacking(used, [small]), lacking(used, [large])) == ({}, {47: 1})
