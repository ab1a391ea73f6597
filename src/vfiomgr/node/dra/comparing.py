"""Comparing the spec of a ResourceSlice with what the API server stores of it.

The server writes quantities in its own form, leaves out empty fields, and adds the time at which a
taint was added.
"""

from __future__ import annotations

from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from vfiomgr.node.dra.api import Object

_QUANTITIES = frozenset({"capacity", "counters"})
"""Fields of which each entry has a quantity as its `value`."""
_ADDED = "timeAdded"
_FACTORS = {
    **{f"{letter}i": Decimal(1024) ** power for power, letter in enumerate("KMGTPE", 1)},
    **{letter: Decimal(1000) ** power for power, letter in enumerate("kMGTPE", 1)},
    **{letter: Decimal(1000) ** -power for power, letter in enumerate("mun", 1)},
}
"""Suffixes of quantities (apimachinery/pkg/api/resource/suffix.go)."""


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
        (device["name"], *_identity(taint)): taint[_ADDED]
        for each in held
        for device in each["spec"].get("devices") or ()
        for taint in device.get("taints") or ()
        if _ADDED in taint
    }
    if not times:
        return spec
    devices = [
        {
            **device,
            "taints": [
                {**taint, **({_ADDED: added} if added else {})}
                for taint in device["taints"]
                for added in [times.get((device["name"], *_identity(taint)))]
            ],
        }
        if device.get("taints")
        else device
        for device in spec.get("devices", ())
    ]
    return {**spec, "devices": devices} if devices else spec


def _identity(taint: Mapping[str, Any]) -> tuple[object, ...]:
    return taint.get("key"), taint.get("value"), taint.get("effect")


def _amount(entry: object) -> object:
    """An entry with its quantity as a number; as it is if that is malformed."""
    if not isinstance(entry, dict) or "value" not in entry:
        return entry
    text = str(entry["value"])
    suffix = next((each for each in _FACTORS if text.endswith(each)), "")
    try:
        number = Decimal(text.removesuffix(suffix)) * _FACTORS.get(suffix, Decimal(1))
    except InvalidOperation:
        return entry
    return {**entry, "value": number}
