"""The JSON schema of layout files, for editors; its descriptions are docstrings of the model."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from vfiomgr.diagnostic import OVERRIDES
from vfiomgr.layout import model
from vfiomgr.layout.model import UNKNOWABLE, LayoutFile

if TYPE_CHECKING:
    from pydantic import BaseModel

ID = "urn:vfiomgr:layout:v1"
_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_NULL = {"type": "null"}
_OF_VGPU_REQUESTS = {
    "allOf": [
        {
            "oneOf": [
                {"required": ["type"]},
                {"anyOf": [{"required": [key]} for key in ("framebuffer", "series", "heads")]},
            ]
        },
        {"oneOf": [{"required": ["count"]}, {"required": ["per_gpu"]}]},
        {
            "if": {"properties": {"uuids": {"minItems": 1}}, "required": ["uuids"]},
            "then": {"required": ["count"]},
        },
    ]
}
_OF_SRIOV_RULES = {
    "if": {"anyOf": [{"required": [key]} for key in ("driver", "owner", "resource")]},
    "then": {"properties": {"functions": {"const": "passthrough"}}, "required": ["functions"]},
    "dependentSchemas": {
        "vf_msix": {
            "properties": {
                "functions": {"enum": ["any", "passthrough"]},
                "count": {"not": {"const": 0}},
            }
        }
    },
}


def layout_schema() -> dict[str, Any]:
    """The schema of layout files; the reader also rejects what no schema can express."""
    schema = LayoutFile.model_json_schema()
    parts = schema["$defs"]
    for name, part in ({LayoutFile.__name__: schema} | parts).items():
        _describe(part, vars(model)[name])
    parts["VgpuRequest"] |= _OF_VGPU_REQUESTS
    parts["SriovRule"] |= _OF_SRIOV_RULES
    for rule in ("PassthroughRule", "SriovRule", "VgpuRule"):
        parts[rule]["dependentRequired"] = {"consumer": ["resource"], "reset": ["resource"]}
    parts["Selector"] = _selector(parts["Selector"])
    one = {"enum": [override for override in OVERRIDES if override not in UNKNOWABLE]}
    for rule in ("HostRule", "PassthroughRule", "OnDemandRule", "SriovRule", "VgpuRule"):
        parts[rule]["properties"]["allow"]["anyOf"] = [one, {"type": "array", "items": one}]
    return {
        "$schema": _DIALECT,
        "$id": ID,
        **_without_null(schema),
        "title": "Layouts of vfiomgr",
    }


def _describe(schema: dict[str, Any], kind: type[BaseModel]) -> None:
    """Describe the keys by the docstrings of their attributes.

    pydantic can do so, too, but reads the source of each class whenever it is imported.
    """
    told = {name: text for one in reversed(kind.__mro__) for name, text in _docstrings(one)}
    for name, field in kind.model_fields.items():
        if name in told:
            key = field.alias or name
            described = {**schema["properties"][key], "description": told[name]}
            schema["properties"][key] = dict(sorted(described.items()))


def _docstrings(kind: type) -> Iterator[tuple[str, str]]:
    """The attributes of a class of the model, with their docstrings."""
    if kind.__module__ != model.__name__:
        return
    (found,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(found, ast.ClassDef)  # noqa: S101 - the source of a class
    for one, text in pairwise(found.body):
        match one, text:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(said))):
                yield name, inspect.cleandoc(said)


def _without_null(part: Any) -> Any:  # noqa: ANN401 - as JSON has it
    """The schema without null, which no key accepts, and without redundant parts."""
    if isinstance(part, list):
        return [_without_null(item) for item in part]
    if not isinstance(part, dict):
        return part
    found = {key: _without_null(value) for key, value in part.items()}
    if found.get("default", ...) is None:
        del found["default"]
    choices = found.get("anyOf")
    if isinstance(choices, list) and _NULL in choices:
        rest = [choice for choice in choices if choice != _NULL]
        del found["anyOf"]
        found |= rest[0] if len(rest) == 1 else {"anyOf": rest}
    return found


def _selector(schema: dict[str, Any]) -> dict[str, Any]:
    """`all`, or criteria; their lists are not empty."""
    for criterion in schema["properties"].values():
        for choice in criterion.get("anyOf", ()):
            if choice.get("type") == "array":
                choice["minItems"] = 1
    alone = {"if": {"required": ["parent"]}, "then": {"maxProperties": 1}}
    title, description = schema.pop("title"), schema.pop("description")
    return {
        "title": title,
        "description": description,
        "anyOf": [{"const": "all"}, {**schema, "minProperties": 1, **alone}],
    }
