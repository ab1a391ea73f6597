"""`vfiomgr vgpu list --defined`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.cli.output import note, or_dash, print_document, print_table
from vfiomgr.cli.vgpu_active import unseen_users, users_of
from vfiomgr.model.definition import PARAMETERS
from vfiomgr.model.vgpu_service import RULE, SERVICE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from vfiomgr.cli.session import Session
    from vfiomgr.model.definition import VgpuDefinition
    from vfiomgr.model.gpu_definition import FunctionDefinition, GpuDefinition
    from vfiomgr.model.snapshot import HostSnapshot
    from vfiomgr.model.vgpu import Vgpu

_HEADINGS = ("VGPU", "PARENT", "TYPE", "NAME", "START", "STATE", "ATTRIBUTES")
_IN_WORDS = {
    "in-use": "in use",
    "other": "another vGPU has its name",
}
"""States that are told in other words than JSON has for them."""


def list_defined(session: Session) -> None:
    """What vGPUs are to be, whether they are there or not, and files that say nothing."""
    host = session.with_vgpu_users(session.host())
    items = [_mdev_item(host, definition) for definition in host.vgpu_definitions]
    items += [_function_item(host, gpu, f) for gpu in host.defined.gpus for f in gpu.vgpus]
    problems = host.vgpu_definition_problems
    if session.format != "table":
        print_document("VgpuDefinitionList", {"items": items, "problems": problems}, session.format)
        return
    if items:
        print_table(_HEADINGS, [_row(item) for item in items])
    else:
        note("no vGPU is defined: vfiomgr vgpu define does it")
    if host.users is None and any(item["active"] for item in items):
        note(unseen_users("whether they are in use"))
    for problem in problems:
        note(f"not shown: {problem.path}: {problem.reason}")
    for text in _without_starter(items):
        note(text)


def _mdev_item(host: HostSnapshot, definition: VgpuDefinition) -> dict[str, object]:
    active = host.vgpu(definition.uuid)
    starter = "vfiomgr" if host.defined.file(RULE) is not None else None
    kinds = [k for p in host.vgpu_parents if p.name == definition.parent for k in p.types]
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
            definition.autostart,
            "mdevctl" if host.defined.is_started_by_mdevctl else starter,
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
        **_state(host, host.vgpu(name), name, function.type_id),
        "attributes": _attributes(attributes),
        "kept_by": "vfiomgr",
        "path": gpu.path,
        "started_by": _starter(function.autostart, starter),
    }


def _state(host: HostSnapshot, active: Vgpu | None, parent: str, type_id: str) -> dict[str, object]:
    """What has become of a definition; a vGPU of its name that is another one is `other`."""
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
    assert isinstance(found, list)  # noqa: S101 - made above
    return (
        str(item["name"]),
        str(item["parent"]),
        str(item["type"]),
        or_dash(item["type_name"]),
        str(item["start"]),
        _IN_WORDS.get(state := str(item["state"]), state),
        or_dash(" ".join(f"{attribute['name']}={attribute['value']}" for attribute in found)),
    )


def _without_starter(items: Iterable[dict[str, object]]) -> Iterator[str]:
    for item in items:
        if item["start"] == "auto" and item["started_by"] is None:
            option = "--uuid" if item["uuid"] else "--parent"
            yield (
                f"nothing starts {item['name']} at boot: vfiomgr vgpu define "
                f"{option} {item['name']} --auto sees to it"
            )
