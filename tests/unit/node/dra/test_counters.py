"""What vGPUs share: no scheduler that only adds up counters can sell a GPU twice."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.fakes.vgpu_hosts import GPUS, l40s_host
from tests.unit.devices import host_of, with_facts
from tests.unit.node.dra.scheduling import NODE, Allocated, candidates, filled, found, mdev, names
from tests.unit.node.made import unit
from tests.unit.vgpus import A40_TYPES, MEMORY, a40_type, add_divided_gpu, instance, vgpu_host
from vfiomgr.library import Host
from vfiomgr.node.dra.plan import pools
from vfiomgr.node.dra.slices import slices
from vfiomgr.node.dra.vgpus import Vgpus
from vfiomgr.node.messages import Order
from vfiomgr.paths import PCI_DEVICES
from vfiomgr.pci.model import PciAddress
from vfiomgr.snapshot.scan import scan
from vfiomgr.units import GIB
from vfiomgr.vgpu.model import GpuMode, VgpuParent, VgpuType, describe_type

if TYPE_CHECKING:
    from pathlib import Path

    from vfiomgr.node.dra.model import DraDevice, Pool
    from vfiomgr.snapshot.model import HostSnapshot

GPU = "0000:01:00.0"
POOL = f"{NODE}/gpu-0000-01-00-0"
PREFIX = "gpu-0000-01-00-0-a40"
MIXED = GpuMode(GPU, heterogeneous=True, mig=False, framebuffer=MEMORY)
EVERYTHING = {"functions": 32, "memory": 48 * GIB}


def mixed(host: HostSnapshot) -> HostSnapshot:
    """The host with its GPU in heterogeneous mode."""
    return with_facts(host, gpu_modes=(MIXED,))


def claimed(*devices: str) -> Allocated:
    return frozenset((POOL, f"{PREFIX}-{device}") for device in devices)


def only(made: tuple[Pool, ...]) -> Pool:
    (pool,) = made
    return pool


def taken(device: DraDevice) -> dict[str, int]:
    (use,) = device.consumes
    assert use.counter_set == "gpu"
    return use.counters


def total(pool: Pool) -> dict[str, int]:
    (counters,) = pool.counter_sets
    return counters.counters


def test_an_empty_gpu_offers_one_device_of_each_type_for_all_of_it() -> None:
    pool = only(pools(vgpu_host(()), found(), NODE))
    assert [device.name for device in pool.devices] == [
        f"{PREFIX}-{size}q-0" for size in (1, 2, 3, 4, 6, 8, 12, 16, 24, 48)
    ]
    assert total(pool) == EVERYTHING
    assert all(taken(device) == EVERYTHING for device in pool.devices)
    first = pool.devices[0]
    assert (first.target.unit, first.target.parent, first.target.type) == ("", GPU, "nvidia-5013")


def test_a_claim_decides_the_size() -> None:
    pool = only(pools(vgpu_host(()), found(), NODE, allocated=claimed("24q-0")))
    assert [device.name for device in pool.devices] == [f"{PREFIX}-24q-0", f"{PREFIX}-24q-1"]
    assert taken(pool.devices[0]) == {"functions": 1, "memory": 24 * GIB}
    assert total(pool) == EVERYTHING


def test_types_of_the_same_size_share_a_gpu() -> None:
    types = (a40_type(24), a40_type(24, "C"), a40_type(12))
    host = add_divided_gpu(host_of(), 1, (types[0],), types=types)
    (vgpu,) = host.vgpus.active
    own = {vgpu.name: (POOL, f"{PREFIX}-24q-0")}
    pool = only(pools(host, found(), NODE, allocated=claimed("24q-0"), created=own))
    assert {device.name for device in pool.devices} == {
        *(f"{PREFIX}-24q-0", f"{PREFIX}-24q-1", f"{PREFIX}-24c-0", f"{PREFIX}-24c-1"),
    }
    assert len(filled([pool], claimed("24q-0"))) == 2


def test_a_vgpu_of_somebody_else_decides_the_size_and_takes_room() -> None:
    host = vgpu_host((a40_type(16),))
    (vgpu,) = host.vgpus.active
    pool = only(pools(host, found(mdev(vgpu.name)), NODE))
    assert [device.name for device in pool.devices] == [
        f"vgpu-{vgpu.name}",
        f"{PREFIX}-16q-0",
        f"{PREFIX}-16q-1",
    ]
    assert total(pool) == {"functions": 31, "memory": 32 * GIB}
    assert pool.devices[0].consumes == ()


def test_a_full_gpu_whose_driver_tells_no_names_keeps_its_devices(tmp_path: Path) -> None:
    kernel = l40s_host(tmp_path, total_vfs=4)
    pool, prefix = f"{NODE}/gpu-0000-21-00-0", "gpu-0000-21-00-0-l40s"
    types = {t.short_name: t.id for p in Host(kernel).scan().vgpus.parents for t in p.types}
    allocated: set[tuple[str, str]] = set()
    created: dict[str, tuple[str, str]] = {}
    for name in ("24Q", "24A"):
        device = pool, f"{prefix}-{name.lower()}-0"
        allocated.add(device)
        made = Vgpus(Host(kernel)).perform(Order("create", name, GPUS[0], types[f"L40S-{name}"]))
        assert made.unit is not None
        created[made.unit.id] = device
    host = Host(kernel).scan()
    assert not any(parent.types for parent in host.vgpus.parents)
    whole = pools(host, found(), NODE, allocated=frozenset(allocated), created=created)
    assert names(whole) == {pool: sorted(name for _, name in allocated)[::-1]}


def test_a_created_vgpu_is_neither_published_nor_counted_twice() -> None:
    host = vgpu_host((a40_type(16),))
    (vgpu,) = host.vgpus.active
    own = {vgpu.name: (POOL, f"{PREFIX}-16q-1")}
    before = only(pools(vgpu_host(()), found(), NODE, allocated=claimed("16q-1")))
    after = only(pools(host, found(mdev(vgpu.name)), NODE, allocated=claimed("16q-1"), created=own))
    assert after == before
    assert total(after) == EVERYTHING


def test_a_created_vgpu_that_outlives_its_claim_takes_room() -> None:
    host = vgpu_host((a40_type(16),))
    (vgpu,) = host.vgpus.active
    own = {vgpu.name: (POOL, f"{PREFIX}-16q-1")}
    pool = only(pools(host, found(mdev(vgpu.name)), NODE, created=own))
    assert [device.name for device in pool.devices] == [f"{PREFIX}-16q-0", f"{PREFIX}-16q-1"]
    assert total(pool) == {"functions": 31, "memory": 32 * GIB}


def test_a_vgpu_of_another_type_than_its_device_takes_room() -> None:
    host = mixed(vgpu_host((a40_type(24),)))
    (vgpu,) = host.vgpus.active
    own = {vgpu.name: (POOL, f"{PREFIX}-16q-1")}
    pool = only(pools(host, found(), NODE, allocated=claimed("16q-1"), created=own))
    assert total(pool) == {"functions": 31, "memory": 24 * GIB}


def test_claims_of_two_sizes_stop_further_ones() -> None:
    """As after a race; both are published as long as the scheduler counts them."""
    pool = only(pools(vgpu_host(()), found(), NODE, allocated=claimed("8q-0", "24q-1")))
    assert [device.name for device in pool.devices] == [f"{PREFIX}-8q-0", f"{PREFIX}-24q-1"]
    assert candidates([pool], claimed("8q-0", "24q-1")) == []


def test_in_heterogeneous_mode_sizes_are_added_up() -> None:
    pool = only(pools(mixed(vgpu_host(())), found(), NODE))
    assert all(taken(device)["functions"] == 1 for device in pool.devices)
    counts = Counter(taken(device)["memory"] // GIB for device in pool.devices)
    assert counts == {1: 32, 2: 24, 3: 16, 4: 12, 6: 8, 8: 6, 12: 4, 16: 3, 24: 2, 48: 1}


def test_functions_that_lost_their_driver_are_not_counted() -> None:
    host = vgpu_host((), functions=4)
    gone = host.vgpus.parents[0].name
    devices = tuple(replace(d, driver=None) if str(d.address) == gone else d for d in host.devices)
    pool = only(pools(with_facts(host, devices=devices), found(), NODE))
    assert total(pool)["functions"] == 3


def test_the_function_of_a_created_vgpu_is_counted_even_if_it_lost_its_driver() -> None:
    host = vgpu_host((a40_type(16),), functions=4)
    (vgpu,) = host.vgpus.active
    devices = tuple(
        replace(d, driver=None) if str(d.address) == vgpu.parent else d for d in host.devices
    )
    host = with_facts(host, devices=devices)
    own = {vgpu.name: (POOL, f"{PREFIX}-16q-0")}
    assert total(only(pools(host, found(), NODE)))["functions"] == 3
    pool = only(pools(host, found(), NODE, allocated=claimed("16q-0"), created=own))
    assert total(pool)["functions"] == 4


def test_a_second_vgpu_of_the_same_device_takes_room() -> None:
    host = vgpu_host((a40_type(16), a40_type(16)))
    own = {vgpu.name: (POOL, f"{PREFIX}-16q-0") for vgpu in host.vgpus.active}
    pool = only(pools(host, found(), NODE, allocated=claimed("16q-0"), created=own))
    assert total(pool) == {"functions": 31, "memory": 32 * GIB}


def test_a_gpu_without_free_functions_offers_nothing() -> None:
    host = vgpu_host((), functions=1)
    devices = tuple(
        replace(d, driver=None) if d.physical_function is not None else d for d in host.devices
    )
    assert pools(with_facts(host, devices=devices), found(), NODE) == ()


def test_types_for_gpu_instances_are_not_offered_without_mig() -> None:
    kind = describe_type("nvidia-474", "GRID A100-1-5C", "framebuffer=4096M, max_instance=7")
    host = add_divided_gpu(host_of(), 1, types=(kind, a40_type(4)))
    assert names(pools(host, found(), NODE)) == {POOL: [f"{PREFIX}-4q-0"]}
    unknown = with_facts(host, gpu_modes=(replace(MIXED, mig=True, heterogeneous=None),))
    assert pools(unknown, found(), NODE) == (), "its GPU instances are not known"
    active = with_facts(host, vgpus=(instance(host.vgpus.parents[0].name, kind, 1),))
    assert pools(active, found(), NODE) == (), "it is in MIG mode"


def test_without_a_maximum_one_more_is_offered_at_a_time(tmp_path: Path) -> None:
    kernel = l40s_host(tmp_path, has_programs=False)
    pool = only(pools(scan(kernel, kernel), found(), NODE))
    name = "gpu-0000-21-00-0-l40s-24q-0"
    assert pool.device(name) is not None
    assert len(filled([pool])) == 1
    claim = frozenset({(pool.name, name)})
    pool = only(pools(scan(kernel, kernel), found(), NODE, allocated=claim))
    assert filled([pool], claim) == claim
    kernel.write(PCI_DEVICES / "0000:21:00.4/nvidia/current_vgpu_type", "1155")
    own = {"0000:21:00.4": (pool.name, name)}
    pool = only(pools(scan(kernel, kernel), found(), NODE, allocated=claim, created=own))
    assert pool.device(name.replace("24q-0", "24q-1")) is not None
    assert len(filled([pool], claim)) == 2


MBOCHS = tuple(
    describe_type(f"mbochs-{name}", name, f"virtual display, {size} MB video memory", "vfio-pci")
    for name, size in (("small", 4), ("medium", 16), ("large", 64))
)
MTTY = (
    describe_type("mtty-1", "Single port serial", None, "vfio-pci"),
    describe_type("mtty-2", "Dual port serial", None, "vfio-pci"),
)


def undivided(name: str, kinds: tuple[VgpuType, ...], available: tuple[int, ...]) -> HostSnapshot:
    parent = VgpuParent(name, f"/sys/{name}", "mdev", name, name, kinds, available)
    return with_facts(host_of(), vgpu_parents=(parent,))


def test_a_driver_that_divides_memory_mixes_its_types() -> None:
    pool = only(pools(undivided("mbochs", MBOCHS, (64, 16, 4)), found(), NODE))
    assert total(pool) == {"functions": 64, "memory": 256 << 20}
    assert len(pool.devices) == 64 + 16 + 4
    assert pool.devices[-1].name == "gpu-mbochs-small-63"


def test_types_without_a_size_do_not_mix() -> None:
    host = undivided("mtty", MTTY, (24, 12))
    first = only(pools(host, found(), NODE))
    assert names([first]) == {
        f"{NODE}/gpu-mtty": ["gpu-mtty-single-port-serial-0", "gpu-mtty-dual-port-serial-0"]
    }
    assert len(filled([first])) == 1
    claim = frozenset({(first.name, "gpu-mtty-dual-port-serial-0")})
    then = only(pools(host, found(), NODE, allocated=claim))
    assert len(filled([then], claim)) == 12


def test_types_of_the_same_name_have_their_numbers_in_the_names() -> None:
    twin = replace(a40_type(24), id="nvidia-999")
    host = add_divided_gpu(host_of(), 1, types=(a40_type(24), twin))
    numbers = {f"{PREFIX}-24q-999-0", f"{PREFIX}-24q-5243-0"}
    assert {*names(pools(host, found(), NODE))[POOL]} == numbers


def test_long_names_are_cut_to_dns_labels() -> None:
    kind = replace(a40_type(24), name="Extraordinary " * 8)
    other = replace(kind, id="nvidia-2", name="Extraordinary " * 9)
    host = add_divided_gpu(host_of(), 1, types=(kind, other))
    found_names = names(pools(host, found(), NODE))[POOL]
    assert len(set(found_names)) == 2
    assert all(re.fullmatch(r"[a-z0-9][a-z0-9-]{,61}[a-z0-9]", name) for name in found_names)


class Machine:
    """A GPU, its claims, and the vGPUs that exist."""

    def __init__(self, *, is_mixed: bool, foreign: list[VgpuType]) -> None:
        self.is_mixed = is_mixed
        self.foreign = foreign
        self.claims: dict[tuple[str, str], bool] = {}
        """Whether the vGPU of each was created."""
        self.published: tuple[Pool, ...] = ()
        self.publish()

    @property
    def allocated(self) -> Allocated:
        """The devices of all claims."""
        return frozenset(self.claims)

    def publish(self) -> None:
        """Publish the pools of the GPU as it is now."""
        made = [claim for claim, is_made in self.claims.items() if is_made]
        types = (*self.foreign, *(self.type(claim) for claim in made))
        host = add_divided_gpu(host_of(), 1, types, functions=20)
        host = mixed(host) if self.is_mixed else host
        own = {
            vgpu.name: claim
            for vgpu, claim in zip(host.vgpus.active[len(self.foreign) :], made, strict=True)
        }
        entire = replace(unit(GPU), addresses=(PciAddress.parse(GPU),))
        units = found(entire, *(mdev(vgpu.name) for vgpu in host.vgpus.active))
        self.published = pools(host, units, NODE, allocated=self.allocated, created=own)

    @staticmethod
    def type(claim: tuple[str, str]) -> VgpuType:
        """The type of a vGPU that is created for a claim."""
        label = claim[1].removeprefix(f"{PREFIX}-").partition("-")[0].upper()
        return next(kind for kind in A40_TYPES if kind.short_name == f"A40-{label}")

    def check(self) -> None:
        """What the driver would refuse."""
        passed = [claim for claim in self.claims if claim[1] == "pci-0000-01-00-0"]
        existing = [claim for claim in self.claims if claim[1].startswith("vgpu-")]
        vgpus = [c for c in self.claims if c not in passed and c not in existing]
        kinds = [*map(self.type, vgpus), *self.foreign]
        assert not passed or not kinds, "passthrough beside a vGPU"
        sizes = [kind.framebuffer or 0 for kind in kinds]
        assert sum(sizes) <= MEMORY
        assert len(sizes) <= 20, "virtual functions"
        assert self.is_mixed or len(set(sizes)) <= 1
        for kind in kinds:
            assert kinds.count(kind) <= (kind.max_instances or 0)


@given(data=st.data(), is_mixed=st.booleans(), size=st.sampled_from(A40_TYPES))
def test_what_is_scheduled_always_fits(
    data: st.DataObject,
    *,
    is_mixed: bool,
    size: VgpuType,
) -> None:
    """Claims come and go; the driver publishes late, but at once after a claim ended."""
    number = data.draw(st.integers(0, min(3, size.max_instances or 0)))
    machine = Machine(is_mixed=is_mixed, foreign=[size] * number)
    for _ in range(data.draw(st.integers(1, 25))):
        free = candidates(machine.published, machine.allocated)
        unmade = [claim for claim, is_made in machine.claims.items() if not is_made]
        unmade = [claim for claim in unmade if claim[1].startswith(PREFIX)]
        step = data.draw(st.sampled_from(["allocate", "allocate", "create", "publish", "end"]))
        if step == "allocate" and free:
            machine.claims[data.draw(st.sampled_from(free))] = False
        elif step == "create" and unmade:
            machine.claims[data.draw(st.sampled_from(unmade))] = True
            machine.publish()
        elif step == "end" and machine.claims:
            del machine.claims[data.draw(st.sampled_from(sorted(machine.claims)))]
            machine.publish()
        else:
            machine.publish()
        machine.check()


@pytest.mark.parametrize("is_mixed", [False, True])
@pytest.mark.parametrize("kind", A40_TYPES)
def test_all_that_fits_can_be_scheduled(kind: VgpuType, *, is_mixed: bool) -> None:
    machine = Machine(is_mixed=is_mixed, foreign=[])
    label = (kind.short_name or "").lower().removeprefix("a40")
    while True:
        free = [
            name
            for name in candidates(machine.published, machine.allocated)
            if f"{label}-" in name[1].removeprefix(PREFIX)
        ]
        if not free:
            break
        machine.claims[free[0]] = True
        machine.publish()
    assert len(machine.claims) == min(20, kind.max_instances or 0)


# ---- compatibility groups


def groups_of(device: DraDevice) -> tuple[str, ...]:
    (use,) = device.consumes
    return use.groups


def test_with_groups_all_sizes_are_published_whatever_claims_have() -> None:
    host = vgpu_host(())
    first = only(pools(host, found(), NODE, has_groups=True))
    assert len(first.devices) == sum(first_of_size(first).values())
    assert {groups_of(device) for device in first.devices} == {
        (f"size-{kind.framebuffer}",) for kind in A40_TYPES
    }
    for name in ("4q-0", "24q-1"):
        again = only(pools(host, found(), NODE, allocated=claimed(name), has_groups=True))
        assert again == first
    (vgpu,) = (made := vgpu_host((a40_type(4),))).vgpus.active
    own = {vgpu.name: (POOL, f"{PREFIX}-4q-0")}
    active = pools(made, found(), NODE, allocated=claimed("4q-0"), created=own, has_groups=True)
    assert only(active) == first


def first_of_size(pool: Pool) -> Counter[tuple[str, ...]]:
    return Counter(groups_of(device) for device in pool.devices)


def test_with_groups_a_gpu_has_vgpus_of_one_size_and_as_many_as_fit() -> None:
    pool = only(pools(vgpu_host(()), found(), NODE, has_groups=True))
    for size in (kind.framebuffer or 0 for kind in A40_TYPES):
        start = next(d.name for d in pool.devices if taken(d)["memory"] == size << 20)
        taken_by = filled([pool], frozenset({(POOL, start)}))
        sizes = {
            taken(device)["memory"] for device in pool.devices if (POOL, device.name) in taken_by
        }
        assert sizes == {size << 20}
        assert len(taken_by) == min(48 // (size // 1024), 32)


def test_with_groups_vgpus_of_others_decide_the_size() -> None:
    host = vgpu_host((a40_type(16),))
    (vgpu,) = host.vgpus.active
    pool = only(pools(host, found(mdev(vgpu.name)), NODE, has_groups=True))
    assert {groups_of(device) for device in pool.devices if device.consumes} == {
        (f"size-{a40_type(16).framebuffer}",)
    }


def test_a_gpu_as_a_whole_has_a_group_of_its_own() -> None:
    host = vgpu_host(())
    entire = replace(unit(GPU), addresses=(PciAddress.parse(GPU),))
    pool = only(pools(host, found(entire), NODE, has_groups=True))
    whole = next(device for device in pool.devices if device.target.unit == GPU)
    assert groups_of(whole) == ("passthrough",)


def test_groups_are_only_where_sums_do_not_suffice() -> None:
    mixing = only(pools(mixed(vgpu_host(())), found(), NODE, has_groups=True))
    assert mixing == only(pools(mixed(vgpu_host(())), found(), NODE))
    assert {groups_of(device) for device in mixing.devices} == {()}


def eight_gpus() -> HostSnapshot:
    """Eight A40 with twelve types of vGPUs each."""
    types = tuple(a40_type(size) for size in (1, 2, 3, 4, 6, 8, 12, 16, 24, 48))
    more = tuple(replace(a40_type(n), id=f"nvidia-9{n}", name=f"NVIDIA A40-{n}A") for n in (1, 2))
    host = host_of()
    for bus in range(1, 9):
        host = add_divided_gpu(host, bus, types=(*types, *more))
    return host


@pytest.mark.parametrize(("has_groups", "rewritten"), [(True, 0), (False, 1)])
def test_what_an_allocation_on_one_of_eight_gpus_rewrites(
    *, has_groups: bool, rewritten: int
) -> None:
    host = eight_gpus()
    before = pools(host, found(), NODE, has_groups=has_groups)
    assert len(before) == 8
    after = pools(host, found(), NODE, allocated=claimed("4q-0"), has_groups=has_groups)
    assert sum(one != other for one, other in zip(before, after, strict=True)) == rewritten
    specs = [spec for pool in before for spec in slices(pool, NODE, 1)]
    devices = [device for spec in specs for device in spec.get("devices") or ()]
    assert len(devices) == 8 * (sum_of_all() if has_groups else 12)
    assert len(specs) == 8 * (1 + -(-len(devices) // 8 // 64))


def sum_of_all() -> int:
    """How many vGPUs of all twelve types fit, each type by itself."""
    return sum(min(48 // size, 32) for size in (1, 2, 3, 4, 6, 8, 12, 16, 24, 48, 1, 2))
