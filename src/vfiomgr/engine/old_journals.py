"""Journals of earlier versions: translates names that have changed or moved.

They had an `intent` instead of the request, which also contained the fields of its checkpoint.
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
"""For each kind of request, the fields that are now in the checkpoint, with their names there."""


def current(record: dict[str, Any]) -> dict[str, Any]:
    """A record of a journal, or a saved plan, with the names of this version."""
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
    """A step or request, including nested ones, with the present names and without a checkpoint."""
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
    """The checkpoint contained in an old request; None if requests of its kind have none."""
    names = _CHECKPOINTS.get(str(request.get("kind")), {})
    return {names[name]: request[name] for name in names if name in request} if names else None
