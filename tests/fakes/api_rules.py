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
    "pods": {"metadata.name", "metadata.namespace", "spec.nodeName", "status.nominatedNodeName"},
}
"""Other kinds have `metadata.name` and `metadata.namespace` (pkg/apis/core/v1/conversion.go)."""
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
    "DRADeviceBindingConditions": (
        "bindsToNode",
        "bindingConditions",
        "bindingFailureConditions",
    ),
    "DRAListTypeAttributes": ("ints", "strings", "bools", "versions"),
}
"""Fields of slices and their devices, by feature gate (registry/resource/resourceslice)."""
ALPHA = frozenset({"DRADeviceCompatibilityGroups", "DRAListTypeAttributes"})
"""The gates that are off by default, or unknown to the server (kube_features.go of 1.37)."""
EFFECTS = frozenset({"None", "NoSchedule", "NoExecute"})
"""Of taints, from 1.35 on (validDeviceTaintEffects in pkg/apis/resource/validation)."""
MERGE = "application/merge-patch+json"
"""The only form of patches that the fake knows (PatchResource in apiserver's handlers/patch.go)."""
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
    """A slice, its devices, their attributes, and what these consume."""
    devices = spec.get("devices") or []
    uses = [use for device in devices for use in device.get("consumesCounters") or ()]
    values = [value for device in devices for value in (device.get("attributes") or {}).values()]
    return [spec, *devices, *uses, *values]


def stored(
    kind: str,
    document: dict[str, Any],
    gates_off: Iterable[str] = (),
    effects: frozenset[str] = EFFECTS,
) -> dict[str, Any]:
    """An object as the server stores it: checked, with its defaults, and without dropped fields."""
    if kind != "resourceslices":
        return document
    spec = document["spec"]
    for name in (name for gate in gates_off for name in _GATED[gate]):
        for part in _parts(spec):
            part.pop(name, None)
    _require_valid(spec, effects)
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


def _require_valid(spec: dict[str, Any], effects: frozenset[str]) -> None:
    """Refuse a slice as pkg/apis/resource/validation does."""
    pool, devices, sets = spec["pool"], spec.get("devices") or [], spec.get("sharedCounters") or []
    names = [device["name"] for device in devices]
    taints = [taint for device in devices for taint in device.get("taints") or ()]
    values = [value for device in devices for value in (device.get("attributes") or {}).values()]
    groups = [each.get("compatibilityGroups") or () for each in _parts(spec)]
    is_special = any(device.get("taints") or device.get("consumesCounters") for device in devices)
    is_special = is_special or any(isinstance(e, list) for v in values for e in v.values())
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
        (
            not {taint["effect"] for taint in taints} <= effects,
            "spec.devices.taints.effect: Unsupported value",
        ),
        (
            any(len(value) != 1 for value in values),
            "spec.devices.attributes: exactly one value must be specified",
        ),
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


def merged(old: Any, change: Any) -> Any:
    """A JSON merge patch (RFC 7386)."""
    if not isinstance(change, dict):
        return change
    result = dict(old) if isinstance(old, dict) else {}
    for name, value in change.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merged(result.get(name), value)
    return result


def _devices(claim: dict[str, Any], part: str) -> dict[tuple[str, ...], dict[str, Any]]:
    """The devices in the status of a claim, or its allocated ones."""
    status = claim.get("status") or {}
    found = status.get("devices") or () if part == "devices" else ()
    if part == "allocation":
        found = ((status.get("allocation") or {}).get("devices") or {}).get("results") or ()
    return {(each["driver"], each["pool"], each["device"]): each for each in found}


def drop_deallocated(old: dict[str, Any], new: dict[str, Any]) -> None:
    """Drop the status of devices that are not allocated any more, and refuse that of others.

    Sources: dropDeallocatedStatusDevices in pkg/registry/resource/resourceclaim/strategy.go, and
    validateDeviceStatus in pkg/apis/resource/validation.
    """
    allocated = _devices(new, "allocation")
    gone = _devices(old, "allocation").keys() - allocated.keys()
    kept = [each for key, each in _devices(new, "devices").items() if key not in gone]
    if any((each["driver"], each["pool"], each["device"]) not in allocated for each in kept):
        message = "status.devices: Invalid value: must be an allocated device in the claim"
        raise Refused(422, f"ResourceClaim is invalid: {message}")
    if "devices" in (new.get("status") or {}):
        new["status"] = {**new["status"], "devices": kept}


def require_rights(
    old: dict[str, Any], new: dict[str, Any], rights: frozenset[tuple[str, str]] | None
) -> None:
    """Refuse a status that the agent may not write, as pkg/registry/resource/utils.go does.

    Its token names its node. The fake has one agent, whose rights are for its own driver.
    """
    names = ("allocation", "reservedFor")
    before, after = old.get("status") or {}, new.get("status") or {}
    if any(before.get(name) != after.get(name) for name in names):
        raise Refused(422, "changing status.allocation or status.reservedFor requires a permission")
    was, now = _devices(old, "devices"), _devices(new, "devices")
    changed = {key[0] for key in {*was, *now} if was.get(key) != now.get(key)}
    selector = (before.get("allocation") or {}).get("nodeSelector")
    is_allowed = rights is None or ("resourceclaims/driver", "associated-node:patch") in rights
    if changed and not (is_allowed and changed == {"vfiomgr.io"} and selector):
        raise Refused(422, f"changing status.devices requires a permission: {min(changed)}")
