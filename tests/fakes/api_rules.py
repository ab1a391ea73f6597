"""What the API server of the tests accepts, selects and answers; see `api_server`."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_SELECTABLE = {
    "resourceslices": {"metadata.name", "spec.driver", "spec.nodeName"},
    "nodes": {"metadata.name"},
}
"""Other kinds have `metadata.name` and `metadata.namespace`."""
_REASONS = {
    400: "BadRequest",
    401: "Unauthorized",
    404: "NotFound",
    409: "Conflict",
    410: "Expired",
    422: "Invalid",
}
_GATED = {
    "DRAPartitionableDevices": ("sharedCounters", "consumesCounters"),
    "DRADeviceTaints": ("taints",),
    "DRADeviceCompatibilityGroups": ("compatibilityGroups",),
}
"""Fields of slices and their devices, by feature gate (registry/resource/resourceslice)."""
ALPHA = frozenset({"DRADeviceCompatibilityGroups"})
"""The gates that are off by default, or unknown to the server (kube_features.go of 1.37)."""
_FIXED = ("driver", "nodeName")
"""Fields of a ResourceSlice that do not change; the name of its pool is another."""
_NEXT = {"": "k", "k": "M", "M": "G", "Ki": "Mi", "Mi": "Gi", "Gi": "Ti"}
"""The suffix of a thousand (or 1024) of the same."""


@dataclass
class Refused(Exception):  # noqa: N818 - it ends a request of the test
    """A request that is answered with a Status."""

    code: int
    message: str
    retry_after: int = 0


def key_of(document: dict[str, Any]) -> str:
    """NAMESPACE/NAME of an object, or its name."""
    metadata = document["metadata"]
    namespace = metadata.get("namespace")
    return f"{namespace}/{metadata.get('name', '')}" if namespace else metadata.get("name", "")


def status_of(refused: Refused) -> dict[str, Any]:
    """The body of a refusal."""
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": refused.message,
        "reason": _REASONS.get(refused.code, "InternalError"),
        "code": refused.code,
    }


def selector(kind: str, query: dict[str, str]) -> Callable[[dict[str, Any]], bool]:
    """A predicate for the objects of a `fieldSelector`."""
    wanted = dict(part.split("=", 1) for part in query.get("fieldSelector", "").split(",") if part)
    known = _SELECTABLE.get(kind, {"metadata.name", "metadata.namespace"})
    if unknown := wanted.keys() - known:
        raise Refused(400, f"field label not supported: {min(unknown)}")

    def select(document: dict[str, Any]) -> bool:
        for field_name, value in wanted.items():
            part, _, name = field_name.partition(".")
            if document.get(part, {}).get(name, "") != value:
                return False
        return True

    return select


def gates_of(kind: str, document: dict[str, Any]) -> set[str]:
    """The feature gates whose fields a slice has; updates of it keep these fields."""
    if kind != "resourceslices":
        return set()
    spec = document["spec"]
    parts = _parts(spec)
    return {gate for gate, names in _GATED.items() if any(p.get(n) for p in parts for n in names)}


def _parts(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """A slice, its devices, and what these consume."""
    devices = spec.get("devices") or []
    uses = [use for device in devices for use in device.get("consumesCounters") or ()]
    return [spec, *devices, *uses]


def stored(kind: str, document: dict[str, Any], gates_off: Iterable[str] = ()) -> dict[str, Any]:
    """An object as the server stores it: checked, with its defaults, and without dropped fields."""
    if kind != "resourceslices":
        return document
    spec = document["spec"]
    for name in (name for gate in gates_off for name in _GATED[gate]):
        for part in _parts(spec):
            part.pop(name, None)
    _require_valid(spec)
    for device in spec.get("devices") or ():
        for taint in device.get("taints") or ():
            now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            taint.setdefault("timeAdded", now)
        for entry in device.get("capacity", {}).values():
            entry["value"] = _canonical(entry["value"])
    document["spec"] = {name: value for name, value in spec.items() if value not in ([], None)}
    return document


def _canonical(quantity: str) -> str:
    """The shortest form of a quantity that is a whole number."""
    parts = re.fullmatch(r"(\d+)([A-Za-z]*)", quantity)
    if parts is None:
        return quantity
    number, suffix = int(parts[1]), parts[2]
    factor = 1024 if suffix.endswith("i") else 1000
    while number and number % factor == 0 and suffix in _NEXT:
        number, suffix = number // factor, _NEXT[suffix]
    return f"{number}{suffix}"


def _require_valid(spec: dict[str, Any]) -> None:
    """Refuse a slice as pkg/apis/resource/validation does."""
    pool, devices, sets = spec["pool"], spec.get("devices") or [], spec.get("sharedCounters") or []
    names = [device["name"] for device in devices]
    groups = [each.get("compatibilityGroups") or () for each in _parts(spec)]
    is_special = any(device.get("taints") or device.get("consumesCounters") for device in devices)
    limit = 64 if is_special else 128
    for is_wrong, problem in (
        (pool.get("generation", 0) < 0, "spec.pool.generation: must be greater than or equal to 0"),
        (pool["resourceSliceCount"] < 1, "spec.pool.resourceSliceCount: must be greater than zero"),
        (bool(devices and sets), "spec: only one of devices and sharedCounters is required"),
        (len(devices) > limit, f"spec.devices: Too many: must have at most {limit} items"),
        (len(sets) > 8, "spec.sharedCounters: Too many: must have at most 8 items"),
        (len(set(names)) < len(names), "spec.devices: Duplicate value"),
        (any(len(each) > 2 for each in groups), "compatibilityGroups: Too many: at most 2 items"),
        (any(len({*each}) < len(each) for each in groups), "compatibilityGroups: Duplicate value"),
        (not all(map(_LABEL.fullmatch, names)), "spec.devices.name: must be a DNS label"),
    ):
        if is_wrong:
            raise Refused(422, f"ResourceSlice is invalid: {problem}")


def require_fixed(old: dict[str, Any], new: dict[str, Any]) -> None:
    """Refuse a change of a field that does not change."""
    changed = [f"spec.{name}" for name in _FIXED if old.get(name) != new.get(name)]
    if old["pool"]["name"] != new["pool"]["name"]:
        changed.append("spec.pool.name")
    if changed:
        raise Refused(422, f"ResourceSlice is invalid: {changed[0]}: field is immutable")
