"""A pool as ResourceSlices (resource.k8s.io/v1), within the limits of the API.

Source of the limits: ResourceSliceSpec in api/resource/v1/types.go of k8s.io/api.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

from vfiomgr.node.dra.model import DRIVER, MOST_COUNTER_SETS, MOST_DEVICES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from vfiomgr.node.dra.model import AttributeValue, CounterSet, DraDevice, Pool, Taint

_BINARY = ("Ki", "Mi", "Gi", "Ti", "Pi")
_DECIMAL = ("k", "M", "G", "T", "P")


def slices(
    pool: Pool, node: str, generation: int, before: Iterable[Sequence[str]] = ()
) -> list[dict[str, Any]]:
    """The `spec` of each slice of a pool: counter sets first, then devices.

    `before` has the names of the devices in each slice that exists. Devices stay in their slices,
    so that a change of one device changes one slice; new ones fill up slices.
    """
    parts = [
        *(
            {"sharedCounters": [_counter_set(each) for each in sets]}
            for sets in _chunks(pool.counter_sets, MOST_COUNTER_SETS)
        ),
        *(
            {"devices": [_device(each) for each in some]}
            for some in _portions(pool.devices, before)
        ),
    ]
    described = {"name": pool.name, "generation": generation, "resourceSliceCount": len(parts)}
    return [{"driver": DRIVER, "nodeName": node, "pool": described, **part} for part in parts]


def _chunks(sets: Sequence[CounterSet], most: int) -> Iterator[Sequence[CounterSet]]:
    return (sets[start : start + most] for start in range(0, len(sets), most))


def _portions(
    devices: Iterable[DraDevice], before: Iterable[Sequence[str]]
) -> Iterator[list[DraDevice]]:
    """The devices of each slice, at most the maximum with taints, so a taint moves no device."""
    left = {device.name: device for device in devices}
    kept = [[left.pop(name) for name in names[:MOST_DEVICES] if name in left] for names in before]
    rest = iter(left.values())
    for portion in kept:
        portion.extend(islice(rest, MOST_DEVICES - len(portion)))
        if portion:
            yield portion
    while portion := [*islice(rest, MOST_DEVICES)]:
        yield portion


def _counter_set(counters: CounterSet) -> dict[str, Any]:
    return {"name": counters.name, "counters": _quantities(counters.counters)}


def _device(device: DraDevice) -> dict[str, Any]:
    found = {
        "attributes": {name: _attribute(value) for name, value in device.attributes.items()},
        "capacity": _quantities(device.capacity),
        "consumesCounters": [
            {"counterSet": each.counter_set, "counters": _quantities(each.counters)}
            for each in device.consumes
        ],
        "taints": [_taint(taint) for taint in device.taints],
    }
    return {"name": device.name, **{name: value for name, value in found.items() if value}}


def _attribute(value: AttributeValue) -> dict[str, AttributeValue]:
    if isinstance(value, bool):
        return {"bool": value}
    return {"int": value} if isinstance(value, int) else {"string": value}


def _taint(taint: Taint) -> dict[str, str]:
    value = {"value": taint.value} if taint.value else {}
    return {"key": taint.key, **value, "effect": taint.effect}


def _quantities(numbers: Mapping[str, int]) -> dict[str, dict[str, str]]:
    return {name: {"value": _quantity(number)} for name, number in numbers.items()}


def _quantity(number: int) -> str:
    """`48Gi`, `1536Mi`, `32`: the canonical form, in which the API server returns it."""
    for base, suffixes in ((1024, _BINARY), (1000, _DECIMAL)):
        for power in range(len(suffixes), 0, -1):
            if number and number % base**power == 0:
                return f"{number // base**power}{suffixes[power - 1]}"
    return str(number)
