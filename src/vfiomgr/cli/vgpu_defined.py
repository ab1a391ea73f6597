"""`vfiomgr vgpu list --defined`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.cli.output import note, or_dash, print_document, print_table
from vfiomgr.model.definition import PARAMETERS
from vfiomgr.model.vgpu_service import RULE, SERVICE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from vfiomgr.cli.session import Session
    from vfiomgr.model.definition import VgpuDefinition
    from vfiomgr.model.gpu_definition import FunctionDefinition, GpuDefinition
    from vfiomgr.model.snapshot import HostSnapshot

_HEADINGS = ("VGPU", "PARENT", "TYPE", "NAME", "START", "ACTIVE", "ATTRIBUTES")


def list_defined(session: Session) -> None:
    """What vGPUs are to be, whether they are there or not, and files that say nothing."""
    host = session.host()
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
        "active": active is not None and active.parent == definition.parent,
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
        "active": host.vgpu(name) is not None,
        "attributes": _attributes(attributes),
        "kept_by": "vfiomgr",
        "path": gpu.path,
        "started_by": _starter(function.autostart, starter),
    }


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
        "yes" if item["active"] else "no",
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
