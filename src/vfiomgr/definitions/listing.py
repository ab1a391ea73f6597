"""`vfiomgr vgpu list --defined`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.cli.output import note, or_dash, print_document, print_table, unknown_users
from vfiomgr.cli.table import cut, wrapped
from vfiomgr.definitions.model import RULE, SERVICE
from vfiomgr.vgpu.commands.active import users_of
from vfiomgr.vgpu.model import PARAMETERS, describe_type

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from vfiomgr.definitions.model import FunctionDefinition, GpuDefinition, VgpuDefinition
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.snapshot.session import Session
    from vfiomgr.vgpu.model import Vgpu


_HEADINGS = ("VGPU", "PARENT", "TYPE", cut("NAME"), "START", "STATE", wrapped("ATTRIBUTES"))
_IN_WORDS = {"in-use": "in use", "other": "name used by another vGPU"}
"""States whose text differs from JSON."""


def list_defined(session: Session) -> None:
    """List vGPU definitions, active or not, and unusable files."""
    host = session.with_vgpu_users(session.scan())
    items = [_mdev_item(host, definition) for definition in host.defined.vgpus]
    items += [_function_item(host, gpu, f) for gpu in host.defined.gpus for f in gpu.vgpus]
    problems = host.defined.problems
    if session.format != "table":
        print_document("VgpuDefinitionList", {"items": items, "problems": problems}, session.format)
        return
    if items:
        print_table(_HEADINGS, [_row(item) for item in items])
    else:
        note("no vGPUs defined; define one with: vfiomgr vgpu define")
    if host.users.processes is None and any(item["active"] for item in items):
        note(unknown_users("in use", is_live=session.is_live))
    for problem in problems:
        note(f"skipped {problem.path}: {problem.reason}")
    for text in _without_starter(items):
        note(text)


def _mdev_item(host: HostSnapshot, definition: VgpuDefinition) -> dict[str, object]:
    active = host.vgpus.named(definition.uuid)
    starter = "vfiomgr" if host.defined.file(RULE) is not None else None
    kinds = [k for p in host.vgpus.parents if p.name == definition.parent for k in p.types]
    return {
        "name": definition.uuid,
        "uuid": definition.uuid,
        "parent": definition.parent,
        "type": definition.type_id,
        "type_name": next((kind.name for kind in kinds if kind.id == definition.type_id), None),
        "start": definition.start,
        **_state(host, active, definition.parent, definition.type_id),
        "attributes": _attributes(definition.attributes),
        "kept_by": "mdevctl",
        "path": definition.path,
        "started_by": _starter(
            definition.autostart, "mdevctl" if host.defined.is_started_by_mdevctl else starter
        ),
    }


def _function_item(
    host: HostSnapshot, gpu: GpuDefinition, function: FunctionDefinition
) -> dict[str, object]:
    name = str(function.address)
    starter = "vfiomgr" if host.defined.file(SERVICE) is not None else None
    attributes = [(PARAMETERS, function.parameters)] if function.parameters else []
    return {
        "name": name,
        "uuid": None,
        "parent": name,
        "type": function.type_id,
        "type_name": function.type_name,
        "start": function.start,
        **_state(host, host.vgpus.named(name), name, function.type_id),
        "attributes": _attributes(attributes),
        "kept_by": "vfiomgr",
        "path": gpu.path,
        "started_by": _starter(function.autostart, starter),
    }


def _state(host: HostSnapshot, active: Vgpu | None, parent: str, type_id: str) -> dict[str, object]:
    """The state of a definition; `other` if a different vGPU has its name."""
    is_there = active is not None and active.parent == parent
    users = users_of(host, active) if active is not None and is_there else []
    if active is None:
        state = "inactive"
    elif (active.parent, active.type) != (parent, type_id):
        state = "other"
    else:
        state = "in-use" if users else "active"
    return {"active": is_there, "state": state, "users": users}


def _starter(autostart: bool, starter: str | None) -> str | None:  # noqa: FBT001 - passed above
    return starter if autostart else None


def _attributes(attributes: Iterable[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"name": name, "value": text} for name, text in attributes]


def _row(item: dict[str, object]) -> tuple[str, ...]:
    found = item["attributes"]
    name = item["type_name"] and describe_type("", str(item["type_name"])).model_name
    assert isinstance(found, list)  # noqa: S101 - made above
    return (
        str(item["name"]),
        str(item["parent"]),
        str(item["type"]),
        or_dash(name),
        str(item["start"]),
        _IN_WORDS.get(state := str(item["state"]), state),
        or_dash(" ".join(f"{attribute['name']}={attribute['value']}" for attribute in found)),
    )


def _without_starter(items: Iterable[dict[str, object]]) -> Iterator[str]:
    for item in items:
        if item["start"] == "auto" and item["started_by"] is None:
            option = "" if item["uuid"] else "--parent "
            yield (
                f"{item['name']} is not started at boot; enable it with: vfiomgr vgpu define "
                f"{option}{item['name']} --autostart"
            )
