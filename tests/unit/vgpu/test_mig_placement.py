"""Where GPU instances go, beside those that are there."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from tests.unit.partitions import A100, instance, partition
from vfiomgr.vgpu.instances import lay_out, more_of

if TYPE_CHECKING:
    from vfiomgr.vgpu.instance_model import GpuPartition

NUMBERS = {profile.name: profile.id for profile in A100}


def laid(text: str, *fixed: int, there: GpuPartition | None = None) -> list[str] | None:
    """Of `3g.20gb 1g.5gb 1g.5gb` where each begins; `fixed` are numbers of instances."""
    known = there or partition()
    names = text.split()
    wanted = {NUMBERS[name]: names.count(name) for name in names}
    staying = [one for one in known.instances if one.id in fixed]
    found = lay_out(known, wanted, staying)
    return None if found is None else [str(place) for place in found]


@pytest.mark.parametrize(
    ("text", "places"),
    [
        ("1g.5gb", ["1g.5gb at 6"]),
        ("3g.20gb", ["3g.20gb at 4"]),
        ("3g.20gb 1g.5gb", ["1g.5gb at 3", "3g.20gb at 4"]),
        ("4g.20gb 2g.10gb 1g.5gb", ["4g.20gb at 0", "2g.10gb at 4", "1g.5gb at 6"]),
        ("3g.20gb 3g.20gb", ["3g.20gb at 0", "3g.20gb at 4"]),
        ("7g.40gb", ["7g.40gb at 0"]),
        (
            "2g.10gb 2g.10gb 2g.10gb 1g.5gb",
            ["2g.10gb at 0", "2g.10gb at 2", "2g.10gb at 4", "1g.5gb at 6"],
        ),
        ("2g.10gb 2g.10gb 2g.10gb 1g.5gb 1g.5gb", None),
        ("3g.20gb 3g.20gb 1g.5gb", None),
        ("1g.5gb+me 1g.5gb+me", None),
        ("4g.20gb 4g.20gb", None),
    ],
)
def test_what_fits_together(text: str, places: list[str] | None) -> None:
    assert laid(text) == places


def test_engines_are_shared_out_too() -> None:
    """Memory would do for both; the one JPEG engine would not."""
    other = replace(A100[1], id=21, name="1g.5gb+me.all")
    more = replace(partition(), profiles=(*A100, other))
    assert lay_out(more, {20: 1}) is not None
    assert lay_out(more, {21: 1}) is not None
    assert lay_out(more, {20: 1, 21: 1}) is None


def test_no_more_of_a_profile_than_an_undivided_gpu_holds() -> None:
    """Also where nvidia-smi tells no engines, as in tables that are cut off."""
    silent = replace(partition(), profiles=tuple(replace(p, engines=()) for p in A100))
    assert laid("1g.5gb+me", there=silent) is not None
    assert laid("1g.5gb+me 1g.5gb+me", there=silent) is None
    divided = replace(silent, instances=(instance("1g.5gb+me", 0),))
    assert laid("1g.5gb+me", there=divided) is not None
    assert laid("1g.5gb+me", 1, there=divided) is None, "one is there already"


def test_what_is_there_stays_where_it_is() -> None:
    there = partition(instance("1g.5gb", 2), instance("2g.10gb", 4, 2))
    assert laid("1g.5gb 2g.10gb", there=there) == ["1g.5gb at 2", "2g.10gb at 4"]
    assert laid("1g.5gb 3g.20gb", there=there) == ["1g.5gb at 2", "3g.20gb at 4"]
    assert laid("3g.20gb", 1, there=there) == ["3g.20gb at 4"]
    assert laid("3g.20gb", 1, 2, there=there) is None
    assert laid("1g.5gb 1g.5gb", 1, there=there) == ["1g.5gb at 5", "1g.5gb at 6"]


def test_without_places_told_nothing_can_be_placed() -> None:
    blind = replace(
        partition(), profiles=tuple(replace(known, starts=(), size=0) for known in A100)
    )
    assert lay_out(blind, {19: 1}) is None
    assert more_of(blind, blind.profiles[0]) == 0


def test_how_many_more_never_exceeds_what_the_driver_says() -> None:
    there = partition(instance("3g.20gb", 0))
    small = there.profiles[0]
    assert more_of(there, small) == 3
    assert more_of(there, replace(small, free=2)) == 2
    assert more_of(there, replace(small, free=7)) == 3
    assert more_of(there, there.profiles[4]) == 0


def test_every_layout_is_free_of_overlaps_and_complete() -> None:
    sizes = {profile.id: profile.size for profile in A100}
    for counts in itertools.product(range(8), range(2), range(4), range(3), range(2), range(2)):
        wanted = {profile.id: n for profile, n in zip(A100, counts, strict=True) if n}
        found = lay_out(partition(), wanted)
        if found is None:
            continue
        slices = [s for p in found for s in range(p.start, p.start + sizes[p.profile])]
        assert len(slices) == len(set(slices))
        assert {n: [p.profile for p in found].count(n) for n in wanted} == wanted
