"""A pool as ResourceSlices (resource.k8s.io/v1), and their comparison with what is stored.

Source of the limits: ResourceSliceSpec in api/resource/v1/types.go of k8s.io/api.

The API server writes quantities in its own form, leaves out empty fields, and adds the time at
which a taint was added.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

from vfiomgr.node.dra.model import DRIVER, MOST_COUNTER_SETS, MOST_DEVICES
from vfiomgr.units import parse_quantity

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from vfiomgr.node.api_server import Object
    from vfiomgr.node.dra.model import AttributeValue, DraDevice, Pool, Taint

GROUPS = "compatibilityGroups"
"""Of an entry of consumesCounters, from Kubernetes 1.37 on (alpha)."""
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
            {
                "sharedCounters": [
                    {"name": each.name, "counters": _quantities(each.counters)}
                    for each in pool.counter_sets[start : start + MOST_COUNTER_SETS]
                ]
            }
            for start in range(0, len(pool.counter_sets), MOST_COUNTER_SETS)
        ),
        *(
            {"devices": [_device(each) for each in some]}
            for some in _portions(pool.devices, before)
        ),
    ]
    described = {"name": pool.name, "generation": generation, "resourceSliceCount": len(parts)}
    return [{"driver": DRIVER, "nodeName": node, "pool": described, **part} for part in parts]


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


def _device(device: DraDevice) -> dict[str, Any]:
    found = {
        "attributes": {name: _attribute(value) for name, value in device.attributes.items()},
        "capacity": _quantities(device.capacity),
        "consumesCounters": [
            {
                "counterSet": each.counter_set,
                "counters": _quantities(each.counters),
                **({GROUPS: list(each.groups)} if each.groups else {}),
            }
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


_QUANTITIES = frozenset({"capacity", "counters"})
"""Fields of which each entry has a quantity as its `value`."""
_ADDED = "timeAdded"


def comparable(value: object, *, is_quantities: bool = False) -> object:
    """The same without empty fields and times, and with quantities as numbers."""
    if isinstance(value, list):
        return [comparable(each) for each in value]
    if not isinstance(value, dict):
        return value
    if is_quantities:
        return {name: _amount(entry) for name, entry in value.items()}
    return {
        name: comparable(each, is_quantities=name in _QUANTITIES)
        for name, each in value.items()
        if name != _ADDED and each not in (None, [], {})
    }


def dropped(sent: object, stored: object, place: str = "spec") -> Iterator[str]:
    """The fields, e.g. `spec.devices.taints`, that were sent and are not stored; both comparable.

    The server drops fields of feature gates that are off, and reports no error.
    """
    if isinstance(sent, list) and isinstance(stored, list):
        for one, other in zip(sent, stored, strict=False):
            yield from dropped(one, other, place)
    elif isinstance(sent, dict) and isinstance(stored, dict):
        for name, value in sent.items():
            inside = f"{place}.{name}"
            if name in stored:
                yield from dropped(value, stored[name], inside)
            else:
                yield inside


def with_times(spec: Object, held: Iterable[Object]) -> Object:
    """The spec with the times of the taints that its devices have already.

    The server would set them to the present, and toleration would begin again.
    """
    times = {
        (device["name"], *_identity(taint)): {_ADDED: taint[_ADDED]}
        for each in held
        for device in each["spec"].get("devices") or ()
        for taint in device.get("taints") or ()
        if _ADDED in taint
    }
    if not times or not spec.get("devices"):
        return spec
    devices = []
    for device in spec["devices"]:
        name, taints = device["name"], device.get("taints")
        if taints:
            timed = [{**taint, **times.get((name, *_identity(taint)), {})} for taint in taints]
            device = {**device, "taints": timed}  # noqa: PLW2901 - the same with times
        devices.append(device)
    return {**spec, "devices": devices}


def _identity(taint: Mapping[str, Any]) -> tuple[object, ...]:
    return taint.get("key"), taint.get("value"), taint.get("effect")


def _amount(entry: object) -> object:
    """An entry with its quantity as a number; as it is if that is malformed."""
    if not isinstance(entry, dict) or "value" not in entry:
        return entry
    number = parse_quantity(str(entry["value"]))
    return entry if number is None else {**entry, "value": number}
