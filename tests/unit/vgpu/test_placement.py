from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.unit.devices import with_facts
from tests.unit.vgpus import A40_TYPES, MEMORY, a40_type, add_divided_gpu, vgpu_host
from vfiomgr.errors import Refusal, UnknownDevice
from vfiomgr.vgpu.capacity import gpus
from vfiomgr.vgpu.model import describe_type
from vfiomgr.vgpu.placement import Placement, choose
from vfiomgr.vgpu.steps import CreateVgpu, Strategy

if TYPE_CHECKING:
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.vgpu.model import VgpuType

UUIDS = tuple(f"00000000-0000-4000-9000-{n:012d}" for n in range(200))
SIZES = [kind.framebuffer // 1024 for kind in A40_TYPES if kind.framebuffer]


def asked(count: int = 1, **wanted: object) -> CreateVgpu:
    return CreateVgpu(UUIDS[:count], **wanted)  # type: ignore[arg-type]


def where(host: HostSnapshot, intent: CreateVgpu) -> list[str]:
    """The bus of each GPU that is chosen."""
    return [place.gpu.name[5:7] for place in choose(host, intent).places]


def test_by_need_the_smallest_that_serves() -> None:
    (place,) = choose(vgpu_host(()), asked(framebuffer=5000, series="Q", heads=2)).places
    assert place.type.name == "NVIDIA A40-6Q"


def test_a_larger_one_where_the_smallest_has_no_room() -> None:
    host = vgpu_host((a40_type(12), a40_type(12)))
    (place,) = choose(host, asked(framebuffer=5000)).places
    assert place.type.name == "NVIDIA A40-12Q"


def test_pack_goes_where_the_size_is_already() -> None:
    host = vgpu_host((), (a40_type(2),), (a40_type(4),))
    assert where(host, asked(type="A40-2Q")) == ["02"]


def test_pack_fills_a_gpu_and_keeps_whole_ones_free() -> None:
    host = vgpu_host((), (a40_type(24),), ())
    assert where(host, asked(2, type="A40-24Q")) == ["01", "02"]
    assert where(host, asked(1, type="A40-24Q")) == ["02"]


def test_spread_gives_each_the_same_number() -> None:
    host = vgpu_host((), (), ())
    assert (
        where(host, asked(6, type="A40-2Q", strategy="spread"))
        == ["01"] * 2 + ["02"] * 2 + ["03"] * 2
    )


def test_pack_prefers_the_gpu_that_loses_the_least_memory() -> None:
    host = vgpu_host((), functions=8)
    host = add_divided_gpu(host, 2, functions=24)
    assert where(host, asked(type="A40-2Q")) == ["02"]  # 8 functions would strand 32 GiB


def test_the_node_is_respected() -> None:
    host = add_divided_gpu(vgpu_host(()), 2, numa_node=1)
    assert where(host, asked(type="A40-2Q", numa_node=1)) == ["02"]
    with pytest.raises(Refusal, match=r"0000:01:00\.0: on NUMA node 0, not 7"):
        choose(host, asked(type="A40-2Q", numa_node=7))


def test_all_or_nothing_and_each_gpu_explained() -> None:
    host = vgpu_host((a40_type(24),), (a40_type(2),))
    with pytest.raises(Refusal) as caught:
        choose(host, asked(2, type="A40-24Q"))
    message = caught.value.message
    assert "no capacity for 2 vGPUs A40-24Q (1 would fit)" in message
    assert "0000:01:00.0: capacity for 1 of" in message
    assert "0000:02:00.0: no capacity for another" in message
    assert "size lock: its vGPU has 2048 MiB" in message


def test_a_virtual_function_by_name_is_the_one_that_is_taken() -> None:
    (place,) = choose(vgpu_host(()), asked(type="A40-2Q", parent="0000:01:03.5")).places
    assert place.parent.name == "0000:01:03.5"


def test_what_no_gpu_has_names_what_there_is() -> None:
    with pytest.raises(UnknownDevice, match="type A40-5Q; available: nvidia-") as no:
        choose(vgpu_host((), ()), asked(type="A40-5Q"))
    assert "did you mean" in no.value.hint
    with pytest.raises(UnknownDevice, match="of 99999 MiB or more"):
        choose(vgpu_host(()), asked(framebuffer=99999))
    with pytest.raises(UnknownDevice, match="with 5 heads or more"):
        choose(vgpu_host(()), asked(heads=5))


def test_a_short_name_means_the_type_of_each_card() -> None:
    """The shipped configurations say DC-16Q for cards that carry 6 and 2 of them."""
    large, small = (
        describe_type(
            number,
            f"NVIDIA RTX Pro {model} Blackwell DC-16Q",
            f"framebuffer=16384M, max_instance={most}",
        )
        for number, model, most in (("1530", "6000", 6), ("1630", "4500", 2))
    )
    host = add_divided_gpu(vgpu_host(), 1, types=(large,))
    host = add_divided_gpu(host, 2, types=(small,))
    places = choose(host, asked(8, type="DC-16Q")).places
    assert [place.type for place in places] == [large] * 6 + [small] * 2
    with pytest.raises(Refusal, match="8 would fit"):
        choose(host, asked(9, type="DC-16Q"))


def test_without_any_gpu() -> None:
    with pytest.raises(UnknownDevice, match="no device of this host supports vGPUs"):
        choose(vgpu_host(), asked(type="A40-2Q"))


def test_every_gpu_that_was_passed_over_is_told_with_its_reason() -> None:
    host = vgpu_host((a40_type(2),), (a40_type(4),), ())
    notes = "\n".join(choose(host, asked(type="A40-2Q")).notes)
    assert "0000:01:00.0: 1 x nvidia-" in notes
    assert "0000:03:00.0: has capacity, but pack prefers another" in notes
    assert "0000:02:00.0: no capacity for another nvidia-5023 (NVIDIA A40-2Q): size lock" in notes


# -- properties ---------------------------------------------------------------


@st.composite
def hosts(draw: st.DrawFn) -> HostSnapshot:
    """Hosts of one to four GPUs, each empty or with instances of one size."""
    host = vgpu_host()
    for bus in range(1, draw(st.integers(1, 4)) + 1):
        size = draw(st.sampled_from(SIZES))
        functions = draw(st.sampled_from([1, 4, 16, 32]))
        most = min(functions, MEMORY // 1024 // size)
        made = draw(st.integers(0, most))
        host = add_divided_gpu(host, bus, (a40_type(size),) * made, functions=functions)
    return host


requests = st.one_of(
    st.sampled_from(SIZES).map(lambda size: {"type": f"A40-{size}Q"}),
    st.integers(1, MEMORY).map(lambda need: {"framebuffer": need}),
)
strategies: st.SearchStrategy[Strategy] = st.sampled_from(["pack", "spread"])


def is_possible(made: list[VgpuType], functions: int) -> bool:
    """The truth about one GPU: one size for all, memory and functions for each."""
    sizes = {kind.framebuffer for kind in made}
    memory = sum(kind.framebuffer or 0 for kind in made)
    return len(sizes) <= 1 and memory <= MEMORY and len(made) <= functions


def made_on(host: HostSnapshot, gpu: str) -> list[VgpuType]:
    found = next(g for g in gpus(host) if g.name == gpu)
    return [kind for vgpu in found.instances if (kind := found.type_of(vgpu))]


def chosen(host: HostSnapshot, intent: CreateVgpu) -> tuple[Placement, ...] | None:
    try:
        return choose(host, intent).places
    except Refusal:
        return None


@settings(max_examples=150)
@given(hosts(), requests, st.integers(1, 40), strategies)
def test_capacity_is_never_exceeded(
    host: HostSnapshot, request: dict[str, object], count: int, strategy: Strategy
) -> None:
    places = chosen(host, asked(count, strategy=strategy, **request))
    if places is None:
        return
    assert len(places) == count
    assert len({place.parent.name for place in places}) == count
    for gpu in gpus(host):
        new = [place.type for place in places if place.gpu.name == gpu.name]
        assert is_possible([*made_on(host, gpu.name), *new], len(gpu.parents))
        assert not {p.parent.name for p in places} & {v.parent for v in gpu.instances}


@settings(max_examples=150)
@given(hosts(), st.sampled_from(SIZES), st.integers(1, 40), strategies)
def test_a_refusal_is_true_by_brute_force(
    host: HostSnapshot, size: int, count: int, strategy: Strategy
) -> None:
    """As many as can be made one by one, by the truth about each GPU, is what is made."""
    kind = a40_type(size)
    possible = 0
    for gpu in gpus(host):
        made = made_on(host, gpu.name)
        while is_possible([*made, kind], len(gpu.parents)):
            made.append(kind)
            possible += 1
    places = chosen(host, asked(count, type=f"A40-{size}Q", strategy=strategy))
    assert (places is not None) == (count <= possible)


def stranded(host: HostSnapshot, places: tuple[Placement, ...]) -> int:
    """MiB that no vGPU can ever use beside those that are there then."""
    lost = 0
    for gpu in gpus(host):
        made = [
            *made_on(host, gpu.name),
            *(place.type for place in places if place.gpu.name == gpu.name),
        ]
        if made:
            size = made[0].framebuffer or 0
            lost += MEMORY - min(MEMORY // size, len(gpu.parents)) * size
    return lost


@settings(max_examples=150)
@given(hosts(), st.sampled_from(SIZES), st.integers(1, 40))
def test_pack_never_strands_more_than_spread(host: HostSnapshot, size: int, count: int) -> None:
    by_name = {"type": f"A40-{size}Q"}
    packed = chosen(host, asked(count, strategy="pack", **by_name))
    spread = chosen(host, asked(count, strategy="spread", **by_name))
    assert (packed is None) == (spread is None)
    if packed is not None and spread is not None:
        assert stranded(host, packed) <= stranded(host, spread)
        empty = {gpu.name for gpu in gpus(host) if not gpu.instances}
        opened = [{p.gpu.name for p in places} & empty for places in (packed, spread)]
        assert len(opened[0]) <= len(opened[1]) or count > 1


@settings(max_examples=100)
@given(hosts(), st.integers(1, MEMORY))
def test_by_need_no_smaller_type_would_have_served(host: HostSnapshot, need: int) -> None:
    places = chosen(host, asked(framebuffer=need))
    possible = [
        kind.framebuffer
        for gpu, kind in itertools.product(gpus(host), A40_TYPES)
        if (kind.framebuffer or 0) >= need
        and is_possible([*made_on(host, gpu.name), kind], len(gpu.parents))
    ]
    assert (places is None) == (not possible)
    if places is not None:
        assert places[0].type.framebuffer == min(filter(None, possible))


def test_the_gpus_of_a_vendors_interface_are_chosen_alike() -> None:
    host = vgpu_host((), functions=4)
    parents = tuple(replace(p, family="vendor-vfio") for p in host.vgpus.parents)
    places = choose(with_facts(host, vgpu_parents=parents), asked(4, type="A40-2Q")).places
    assert [place.parent.name for place in places] == [f"0000:01:01.{n}" for n in range(4)]
