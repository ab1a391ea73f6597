"""Which devices are preferred: by hand, against all possibilities, and in time."""

from __future__ import annotations

from functools import partial
from itertools import combinations
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.node.made import resource_of, unit
from tests.work import calls
from vfiomgr.errors import UsageError
from vfiomgr.node.answers import preferred
from vfiomgr.pci.model import PciAddress

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable, Sequence

    from vfiomgr.node.model import NodeResource, NodeUnit


def gpus(names: str, path: str = "", node: int | None = 0) -> list[NodeUnit]:
    """One unit for each letter; each below a port of its own."""
    return [unit(name, f"{path}/port-{name}" if path else "", node) for name in names]


def choose(
    units: Iterable[NodeUnit], size: int, *, free: str | None = None, required: str = ""
) -> str:
    """The letters of the preferred devices."""
    resource = resource_of(*units)
    available = list(free) if free is not None else [one.id for one in resource.units]
    return "".join(preferred(resource, available, list(required), size))


SWITCHES = [*gpus("abcd", "pci0/rp0/sw0"), *gpus("efgh", "pci0/rp1/sw1")]
SOCKETS = [*SWITCHES, *gpus("ijkl", "pci1/rp2/sw2", 1)]


@pytest.mark.parametrize(
    ("size", "free", "required", "expected"),
    [
        (0, "abcd", "", ""),
        (1, "abcdefgh", "", "a"),
        (1, "abcdefgh", "f", "f"),
        (2, "abefgh", "", "ab"),
        (2, "adefgh", "", "ad"),
        (2, "aefgh", "", "ef"),
        (4, "abcdefgh", "", "abcd"),
        (4, "abcefgh", "", "efgh"),
        (2, "abcdefgh", "f", "ef"),
        (2, "abcdefgh", "af", "af"),
        (3, "abcdefgh", "af", "abf"),
        (5, "abcdefgh", "", "abcde"),
        (5, "abcefgh", "", "aefgh"),
        (8, "abcdefgh", "", "abcdefgh"),
    ],
)
def test_devices_below_one_switch_are_closest(
    size: int, free: str, required: str, expected: str
) -> None:
    assert choose(SWITCHES, size, free=free, required=required) == expected


def test_a_switch_that_is_in_use_is_used_up_before_another_one() -> None:
    assert choose(SWITCHES, 1, free="abcdfgh") == "f"
    assert choose(SWITCHES, 2, free="abcdgh") == "gh"
    assert choose(SWITCHES, 3, free="abcdfgh") == "fgh"


def test_one_numa_node_is_better_than_one_switch_of_each() -> None:
    assert choose(SOCKETS, 4, free="abefijk") == "abef"
    assert choose(SOCKETS, 3, free="abefijk") == "ijk"
    assert choose(SOCKETS, 5, free="abeijkl") == "eijkl"


def test_a_device_alone_is_taken_before_a_switch_is_broken_up() -> None:
    units = [*SWITCHES, unit("z", "pci0/rp9")]
    assert choose(units, 1) == "z"
    assert choose(units, 5) == "abcdz"


def test_devices_without_a_numa_node_are_a_node_of_their_own() -> None:
    units = [*gpus("ab", node=None), *gpus("cd", node=1)]
    assert choose(units, 2, free="bcd") == "cd"
    assert choose(units, 2, free="abd") == "ab"


def test_a_gpu_with_vgpus_is_used_up_before_another_one() -> None:
    parents = {letter: PciAddress(0, bus, 0, 0) for bus, letter in enumerate("xyz", start=1)}
    units = [
        unit(f"{letter}{number}", "pci0/rp0", parent=parents[letter])
        for letter in "xyz"
        for number in range(4)
    ]
    resource = resource_of(*units)
    free = [u.id for u in units]
    assert preferred(resource, free, [], 1) == ("x0",)
    assert preferred(resource, [name for name in free if name != "y3"], [], 1) == ("y0",)
    assert preferred(resource, free, [], 4) == ("x0", "x1", "x2", "x3")
    assert preferred(resource, free, ["z1"], 2) == ("z0", "z1")


@pytest.mark.parametrize(
    ("size", "free", "required"),
    [(3, "ab", ""), (1, "ab", "c"), (1, "abc", "ab"), (1, "abX", ""), (-1, "ab", "")],
)
def test_a_request_that_cannot_be_met_is_refused(size: int, free: str, required: str) -> None:
    with pytest.raises(UsageError, match=f"cannot choose {size} devices of vfiomgr.io/GPU"):
        choose(SWITCHES, size, free=free, required=required)


_PLACES = st.tuples(
    st.sampled_from([None, 0, 1]),
    st.sampled_from(["", "pci0/rp0", "pci0/rp0/sw0", "pci0/rp0/sw0/sw1", "pci0/rp1", "pci1/rp2"]),
    st.sampled_from([None, 1, 2]),
)


@st.composite
def requests(draw: st.DrawFn) -> tuple[NodeResource, list[str], list[str], int]:
    """A small resource, and a question of the kubelet about it."""
    places = draw(st.lists(_PLACES, min_size=1, max_size=8))
    units = []
    for name, (node, path, parent) in zip("abcdefgh", places, strict=False):
        gpu = None if parent is None else PciAddress(node or 0, parent, 0, 0)
        units.append(unit(name, path, node, gpu))
    names = [one.id for one in units]
    free = draw(st.lists(st.sampled_from(names), unique=True, min_size=1))
    required = draw(st.lists(st.sampled_from(free), unique=True))
    size = draw(st.integers(len(required), len(free)))
    return resource_of(*units), free, required, size


def places_of(units: Sequence[NodeUnit]) -> list[tuple[object, ...]]:
    """The path of each unit from its NUMA node down."""
    return [
        (one.numa_nodes, *one.pcie_path, *([one.parent] if one.parent else []), one.id)
        for one in units
    ]


def numa_nodes(units: Sequence[NodeUnit]) -> int:
    """How many NUMA nodes a choice has."""
    return len({one.numa_nodes for one in units})


def closeness(units: Sequence[NodeUnit]) -> int:
    """What units share: 0 a GPU, 1 a bridge, 2 a root complex, 3 a NUMA node, 4 the host."""
    if len(units) == 1:
        return -1
    common = 0
    for parts in zip(*places_of(units), strict=False):
        if len(set(parts)) > 1:
            break
        common += 1
    parent = {one.parent for one in units}
    if common and len(parent) == 1 and None not in parent:
        depth = 1 + len(units[0].pcie_path)
        if common > depth:
            return 0
    return {0: 4, 1: 3, 2: 2}.get(common, 1)


@settings(max_examples=400)
@given(question=requests())
def test_no_other_choice_is_better(
    question: tuple[NodeResource, list[str], list[str], int],
) -> None:
    resource, free, required, size = question
    chosen = preferred(resource, free, required, size)
    assert len(chosen) == size == len(set(chosen))
    assert set(required) <= set(chosen) <= set(free)
    assert preferred(resource_of(*reversed(resource.units)), free[::-1], required, size) == chosen
    known = {one.id: one for one in resource.units}
    every = [
        [known[name] for name in names]
        for names in combinations(free, size)
        if set(required) <= set(names)
    ]
    units = [known[name] for name in chosen]
    assert numa_nodes(units) == min(map(numa_nodes, every))
    if size:
        assert closeness(units) == min(map(closeness, every))


@settings(max_examples=200)
@given(sizes=st.lists(st.sampled_from([1, 2, 4]), max_size=16), order=st.randoms())
def test_requests_of_powers_of_two_always_find_room_together(
    sizes: list[int], order: random.Random
) -> None:
    free = [one.id for one in SOCKETS]
    resource = resource_of(*SOCKETS)
    for size in sizes:
        if size > len(free):
            break
        order.shuffle(free)
        chosen = preferred(resource, free, [], size)
        rooms = [len({*free} & {*switch}) for switch in ("abcd", "efgh", "ijkl")]
        if max(rooms) >= size:
            assert any({*chosen} <= {*switch} for switch in ("abcd", "efgh", "ijkl"))
        free = [name for name in free if name not in chosen]


@settings(max_examples=200)
@given(question=requests())
def test_whole_gpus_stay_free_for_single_requests(
    question: tuple[NodeResource, list[str], list[str], int],
) -> None:
    """A vGPU comes from a GPU that is in use, if there is one at no greater cost."""
    resource, free, _, _ = question
    (chosen,) = preferred(resource, free, [], 1)
    by_gpu: dict[object, set[str]] = {}
    for one in resource.units:
        by_gpu.setdefault((one.numa_nodes, one.pcie_path, one.parent), set()).add(one.id)
    mine = next(ids for ids in by_gpu.values() if chosen in ids)
    is_whole = len(mine) > 1 and mine <= set(free)
    broken = [ids for ids in by_gpu.values() if len(ids) > 1 and ids & {*free} and ids - {*free}]
    named = [one for one in resource.units if one.parent is not None]
    if is_whole and len(named) == len(resource.units):
        assert not broken


@pytest.mark.parametrize("size", [1, 2, 8, 16, 300, 1000])
def test_the_work_grows_with_the_number_of_devices_and_no_faster(size: int) -> None:
    def work(count: int) -> int:
        units = [
            unit(f"{n:04}", f"pci{n // 250}/rp{n // 50}/sw{n // 10}/p{n}", n // 500)
            for n in range(count)
        ]
        resource = resource_of(*units)
        free = [one.id for one in units]
        assert len(preferred(resource, free, free[:1], min(size, count))) == min(size, count)
        return calls(partial(preferred, resource, free, free[:1], min(size, count)))

    assert work(2000) < 3 * work(1000)
