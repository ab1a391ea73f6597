"""Where a request fits, also compared with all ways to choose GPUs."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.unit.fleet.hosts import A40, L4, a_gpu, a_host
from vfiomgr.fleet.model import Capacity, Node
from vfiomgr.fleet.placing import Request, Reserved, Wanted, after, choose, ordered, place
from vfiomgr.units import GIB

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vfiomgr.fleet.model import Gpu

TWO = Request((Wanted("gpu", 2, "A40"),))
HALF = Capacity("A40-8Q", 2)


def least(gpus: Sequence[Gpu], wanted: Sequence[Wanted], reserved: frozenset[str]) -> int | None:
    """The least number of unneeded GPUs, by trying all ways."""
    found = []
    units = {gpu.unit for gpu in gpus}
    for taken in product((True, False), repeat=len(units)):
        entire = {unit for unit, is_taken in zip(units, taken, strict=True) if is_taken}
        mine = [gpu for gpu in gpus if gpu.unit in entire]
        if any(gpu.state != "free" or gpu.address in reserved for gpu in mine):
            continue
        for uses in product((None, *range(len(wanted))), repeat=len(gpus)):
            served = [0] * len(wanted)
            for gpu, use in zip(gpus, uses, strict=True):
                if use is None:
                    continue
                one = wanted[use]
                if one.kind == "gpu" and gpu in mine:
                    served[use] += one.is_served_by(gpu)
                elif one.kind != "gpu" and gpu not in mine and gpu.address not in reserved:
                    served[use] += one.room(gpu)
            if all(s >= one.count for s, one in zip(served, wanted, strict=True)):
                needed = sum(one.count for one in wanted if one.kind == "gpu")
                found.append(len(mine) - needed)
    return min(found, default=None)


GPUS = st.lists(
    st.tuples(
        st.sampled_from([("NVIDIA A40", A40), ("NVIDIA L4", L4)]),
        st.integers(0, 2),
        st.sampled_from(["free", "free", "free", "used", "unknown", "unavailable"]),
        st.sampled_from([(), (HALF,), (Capacity("A40-8Q", 1),), (Capacity("A40-8Q", 3, False),)]),  # noqa: FBT003
    ),
    min_size=1,
    max_size=4,
)
WANTED = st.lists(
    st.sampled_from(
        [
            *(Wanted("gpu", n, name) for n in (1, 2, 3) for name in ("A40", L4, "NVIDIA")),
            *(Wanted("vgpu", n, "a40-8q") for n in (1, 2, 3)),
        ]
    ),
    min_size=1,
    max_size=2,
)


@given(GPUS, WANTED, st.sets(st.integers(0, 3), max_size=1))
def test_the_choice_is_the_best_of_all(
    drawn: list[tuple[tuple[str, str], int, str, tuple[Capacity, ...]]],
    wanted: list[Wanted],
    reserved: set[int],
) -> None:
    gpus = [
        a_gpu(number, name=name, ids=ids, unit=unit, state=state, types=types)
        for number, ((name, ids), unit, state, types) in enumerate(drawn)
    ]
    kept = frozenset(a_gpu(number).address for number in reserved)
    found = choose(gpus, wanted, kept)
    assert (None if found is None else found[0]) == least(gpus, wanted, kept)
    if found is not None:
        taken = [gpu for gpu in gpus if gpu.address in found[1]]
        assert least(taken, wanted, kept) == found[0]


@pytest.mark.parametrize(
    ("name", "is_served"),
    [
        *(("a100", True), ("NVIDIA A100", True), ("A100-SXM4", True), ("10DE:20b0", True)),
        *(("A10", False), ("A100 40GB", False), ("100", False), ("/", False)),
    ],
)
def test_a_model_is_named_by_words(name: str, is_served: bool) -> None:  # noqa: FBT001
    gpu = a_gpu(0, name="NVIDIA A100 SXM4 40GB", ids="10de:20b0")
    assert Wanted("gpu", 1, name).is_served_by(gpu) is is_served


def test_a_host_fits_with_the_gpus_it_needs() -> None:
    host = a_host(a_gpu(0, state="used"), a_gpu(1), a_gpu(2, numa_node=1), a_gpu(3))
    found = place(host, TWO)
    assert found.fits
    assert found.gpus == ("0000:02:00.0", "0000:03:00.0")
    assert (found.numa_nodes, found.left, found.unused) == ((0, 1), 1, 0)
    near = place(host, replace(TWO, is_on_one_node=True))
    assert (near.gpus, near.numa_nodes) == (("0000:02:00.0", "0000:04:00.0"), (0,))


def test_a_group_is_taken_entirely_or_not_at_all() -> None:
    pair = (a_gpu(0, unit=0), a_gpu(1, unit=0))
    one = Request((Wanted("gpu", 1, "A40"),))
    found = place(a_host(*pair), one)
    assert (found.gpus, found.unused) == (("0000:01:00.0", "0000:02:00.0"), 1)
    assert place(a_host(*pair, a_gpu(2)), one).gpus == ("0000:03:00.0",)
    assert place(a_host(*pair), one, Reserved(frozenset({"0000:01:00.0"}))).reason == (
        "GPUs cannot be combined"
    )
    across = (a_gpu(0, unit=0), a_gpu(1, unit=0, numa_node=1))
    apart = place(a_host(*across), replace(one, is_on_one_node=True))
    assert apart.reason == "not on one NUMA node"


def test_a_gpu_serves_one_part() -> None:
    both = Request((Wanted("gpu", 1, "A40"), Wanted("vgpu", 1, "A40-8Q")))
    only = a_gpu(0, types=(HALF,))
    assert place(a_host(only), both).reason == "GPUs cannot be combined"
    assert place(a_host(only, a_gpu(1)), both).fits


@pytest.mark.parametrize(
    ("gpus", "request_", "reason", "why"),
    [
        ((), TWO, "no GPU of this model", "no GPU A40"),
        (
            (a_gpu(0), a_gpu(1, state="used"), a_gpu(2, state="unavailable")),
            TWO,
            "too few are free",
            "2 x A40: 1 of 3 free (1 used, 1 unavailable)",
        ),
        (
            (a_gpu(0), a_gpu(1, state="unknown")),
            TWO,
            "users or capacity unknown",
            "2 x A40: 1 of 2 free (1 unknown)",
        ),
        (
            (a_gpu(0), a_gpu(1, numa_node=1)),
            replace(TWO, is_on_one_node=True),
            "not on one NUMA node",
            "node 0: 1 x A40; node 1: 1 x A40",
        ),
        (
            (a_gpu(0, types=(HALF,)),),
            Request((Wanted("vgpu", 3, "A40-8Q"),)),
            "too few are free",
            "3 x A40-8Q: capacity for 2 on 1 GPU",
        ),
        (
            (a_gpu(0, types=(Capacity("A40-8Q", 9, is_certain=False),)),),
            Request((Wanted("vgpu", 1, "A40-8Q"),)),
            "users or capacity unknown",
            "1 x A40-8Q: capacity for 0 on 1 GPU",
        ),
        ((a_gpu(0),), Request((Wanted("mig", 1, "1g.5gb"),)), "no GPU instance of this type", ""),
        (
            (a_gpu(0),),
            Request((), memory_bytes=257 * GIB),
            "too little memory",
            "256 GiB free, 257 GiB needed",
        ),
        (
            (a_gpu(0),),
            Request((), memory_bytes=GIB, page_bytes=GIB),
            "too little memory",
            "0 GiB in free huge pages of 1 GiB, 1 GiB needed",
        ),
        ((a_gpu(0),), Request((), cpus=65), "too few CPUs", "64 CPUs, 65 needed"),
        (
            (a_gpu(0),),
            Request((Wanted("gpu", 1, "A40"),), cpus=33, is_on_one_node=True),
            "not on one NUMA node",
            "32 CPUs on NUMA node 0, 33 needed",
        ),
    ],
)
def test_the_reason_is_named(
    gpus: tuple[Gpu, ...], request_: Request, reason: str, why: str
) -> None:
    found = place(a_host(*gpus), request_)
    assert not found.fits
    assert found.reason == reason
    assert why in found.why


def test_unknown_memory_is_not_free() -> None:
    host = a_host(a_gpu(0), nodes=(Node(0, 8, None, 0, {}),))
    assert place(host, Request((), memory_bytes=1)).reason == "memory or CPUs unknown"
    assert place(replace(host, nodes=()), Request((), cpus=1)).reason == "memory or CPUs unknown"


def test_a_host_with_one_node_has_all_on_it() -> None:
    host = a_host(a_gpu(0, numa_node=None), a_gpu(1, numa_node=None))
    near = replace(TWO, is_on_one_node=True)
    assert not place(host, near).fits
    assert place(replace(host, nodes=host.nodes[:1]), near).fits


def test_what_is_reserved_is_not_free() -> None:
    host = a_host(a_gpu(0), a_gpu(1), a_gpu(2))
    assert place(host, TWO, Reserved(frozenset({"0000:01:00.0"}))).gpus == (
        "0000:02:00.0",
        "0000:03:00.0",
    )
    both = Reserved(frozenset({"0000:01:00.0", "0000:02:00.0"}))
    assert place(host, TWO, both).why == "2 x A40: 1 of 3 free (2 reserved)"
    assert place(host, TWO, Reserved(is_entire=True)).reason == "reserved"
    memory = Request((), memory_bytes=200 * GIB)
    assert place(host, memory).fits
    assert not place(host, memory, Reserved(memory_bytes=57 * GIB)).fits


def test_hosts_are_packed_or_spread() -> None:
    full, empty = a_host(a_gpu(0), a_gpu(1), name="full"), a_host(*map(a_gpu, range(4)), name="em")
    none = a_host(name="none")
    found = [place(host, TWO) for host in (none, empty, full)]
    assert [one.host for one in ordered(found, "pack")] == ["full", "em", "none"]
    assert [one.host for one in ordered(found, "spread")] == ["em", "full", "none"]


def test_a_placed_guest_has_its_gpus() -> None:
    request = Request((Wanted("gpu", 1, "A40"), Wanted("vgpu", 1, "A40-8Q")))
    other = Capacity("A40-4Q", 9)
    host = a_host(a_gpu(0), a_gpu(1, state="unavailable", types=(HALF, other)))
    left = after(host, request, place(host, request))
    assert [gpu.state for gpu in left.gpus] == ["used", "used"]
    assert left.gpus[1].types == (Capacity("A40-8Q", 1),)
    assert not place(left, Request(request.wanted[:1])).fits
    assert place(left, Request(request.wanted[1:])).fits
