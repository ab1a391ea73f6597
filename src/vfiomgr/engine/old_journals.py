"""Journals of earlier versions: what has another name by now, and where it is.

They had an `intent` in place of the request, which held the fields of its checkpoint too.
"""

from __future__ import annotations

from typing import Any

_KINDS = {
    "divide-gpu": "set-mig-instances",
    "forget-origin": "drop-original-state",
    "remember-origin": "save-original-state",
}
_FIELDS = {"install-layout": {"wish": "apply"}, "write-cdi": {"wish": "offer"}}
_CHECKPOINTS = {
    "apply-layout": {"begun": "begun", "before": "functions"},
    "change-quotas": {"priority_after": "priority"},
    "create-vgpu": {"places": "places"},
    "reset": {"methods_after": "methods"},
    "restore-vgpus": {"begun": "missing"},
    "set-gpu-mode": {"functions_after": "functions"},
    "set-virtual-functions": {
        "autoprobe_after": "autoprobe",
        "heterogeneous_after": "heterogeneous",
        "instances_after": "instances",
        "priority_after": "priority",
    },
    "start-vgpu": {"begun": "missing"},
    "switch-gpu": {
        "vgpus": "vgpus",
        "autoprobe_after": "autoprobe",
        "instances_after": "instances",
    },
}
"""By the kind of a request its fields that are in the checkpoint now, and their names there."""


def current(record: dict[str, Any]) -> dict[str, Any]:
    """A record of a journal, or a plan that was saved, with the names of this version."""
    record = dict(record)
    if isinstance(request := record.pop("intent", None), dict):
        record["request"] = _renamed(request)
        record["checkpoint"] = _checkpoint(request)
    elif isinstance(request := record.get("request"), dict):
        names = _FIELDS.get(str(request.get("kind")), {})
        record["request"] = {names.get(name, name): value for name, value in request.items()}
    if isinstance(steps := record.get("steps"), list):
        record["steps"] = [_renamed(step) for step in steps]
    return record


def _renamed(value: Any) -> Any:  # noqa: ANN401 - any JSON
    """A step or a request, and those within, by the present names and without a checkpoint."""
    if isinstance(value, list):
        return [_renamed(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get("kind")
    if not isinstance(kind, str):
        return {name: _renamed(item) for name, item in value.items()}
    names, moved = _FIELDS.get(kind, {}), _CHECKPOINTS.get(kind, {})
    renamed = {names.get(n, n): _renamed(item) for n, item in value.items() if n not in moved}
    return {**renamed, "kind": _KINDS.get(kind, kind)}


def _checkpoint(request: dict[str, Any]) -> dict[str, Any] | None:
    """What an old request held of a checkpoint; None where requests of its kind have none."""
    names = _CHECKPOINTS.get(str(request.get("kind")), {})
    return {names[name]: request[name] for name in names if name in request} if names else None
