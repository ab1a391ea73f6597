"""A pool as ResourceSlices (resource.k8s.io/v1), and their comparison with what is stored.

Source of the limits: ResourceSliceSpec in api/resource/v1/types.go of k8s.io/api.

The API server writes quantities in its own form, leaves out empty fields, and adds the time at
which a taint was added.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from vfiomgr.node.dra.model import (
    BIND_FAILED,
    BOUND,
    DRIVER,
    MOST_COUNTER_SETS,
    MOST_DEVICES,
    STANDARD,
)
from vfiomgr.units import parse_quantity
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.node.api_server import Object
    from vfiomgr.node.dra.model import AttributeValue, DraDevice, Pool, Taint

GROUPS = "compatibilityGroups"
"""Of an entry of consumesCounters, from Kubernetes 1.37 on (alpha)."""
CONDITIONS = "bindingConditions"
_AWAITED = {
    "bindsToNode": True,
    CONDITIONS: [BOUND],
    "bindingFailureConditions": [BIND_FAILED],
}
_TRIAL = "trial"
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
    found: dict[str, Any] = {
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
    found |= _AWAITED if device.is_awaited else {}
    return {"name": device.name, **{name: value for name, value in found.items() if value}}


def _attribute(value: AttributeValue) -> dict[str, Any]:
    if isinstance(value, tuple):
        return {"ints": list(value)}
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


class Kept(Value):
    """The newer fields that an API server stores; it drops others, or refuses their slice."""

    groups: bool = False
    """Compatibility groups (1.37, alpha)."""
    conditions: bool = False
    """Conditions that the scheduler awaits before it places a pod (1.36; alpha in 1.34)."""
    hints: bool = False
    """Taints without an effect (1.35)."""
    lists: bool = False
    """Attributes with several values (1.36, alpha)."""


def needs_kept(pool: Pool, *, awaits: bool) -> bool:
    """Whether the slices of a pool depend on what the server stores."""
    return bool(pool.counter_sets) or any(
        (awaits and device.target.on_demand)
        or any(isinstance(value, tuple) for value in device.attributes.values())
        or any(taint.effect == "None" for taint in device.taints)
        for device in pool.devices
    )


def as_kept(pool: Pool, kept: Kept, *, awaits: bool) -> Pool:
    """A pool without the values that the server does not store; groups are the planner's.

    `awaits`: pods wait for devices that claims bind.
    """
    return replace(pool, devices=tuple(_as_kept(d, kept, awaits=awaits) for d in pool.devices))


def _as_kept(device: DraDevice, kept: Kept, *, awaits: bool) -> DraDevice:
    attributes = {
        name: value[0] if isinstance(value, tuple) and not kept.lists else value
        for name, value in device.attributes.items()
    }
    taints = tuple(taint for taint in device.taints if kept.hints or taint.effect != "None")
    is_awaited = awaits and kept.conditions and device.target.on_demand is not None
    return replace(device, attributes=attributes, taints=taints, is_awaited=is_awaited)


def trial(node: str, *, lists: bool) -> Object:
    """A slice with all newer fields, for a dry run; lists are not dropped alone, but refused."""
    use = {"counterSet": _TRIAL, "counters": {_TRIAL: {"value": "1"}}, GROUPS: [_TRIAL]}
    device = {
        "name": _TRIAL,
        "attributes": {f"{STANDARD}/numaNode": {"ints": [0]}} if lists else {},
        "consumesCounters": [use],
        "taints": [{"key": f"{DRIVER}/{_TRIAL}", "effect": "None"}],
        **_AWAITED,
    }
    pool = {"name": f"{node}/{_TRIAL}", "generation": 1, "resourceSliceCount": 2}
    return {"driver": DRIVER, "nodeName": node, "pool": pool, "devices": [device]}


def kept_of(stored: Object) -> Kept:
    """What the server has stored of the trial."""
    (device,) = stored["devices"]
    lists = any(each.get("ints") for each in (device.get("attributes") or {}).values())
    return Kept(
        groups=has_groups(stored),
        conditions=bool(device.get(CONDITIONS)),
        hints=bool(device.get("taints")),
        lists=lists,
    )


def has_groups(spec: Object) -> bool:
    """Whether a device of a slice has compatibility groups."""
    uses = (use for d in spec.get("devices") or () for use in d.get("consumesCounters") or ())
    return any(use.get(GROUPS) for use in uses)


def _amount(entry: object) -> object:
    """An entry with its quantity as a number; as it is if that is malformed."""
    if not isinstance(entry, dict) or "value" not in entry:
        return entry
    number = parse_quantity(str(entry["value"]))
    return entry if number is None else {**entry, "value": number}
