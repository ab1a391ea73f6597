"""`vfiomgr vgpu list --defined`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from vfiomgr.cli.output import note, or_dash, print_document, print_table, unknown_users
from vfiomgr.cli.table import cut, wrapped
from vfiomgr.definitions.model import RULE, SERVICE, Definition, FunctionDefinition
from vfiomgr.vgpu.commands.active import users_of
from vfiomgr.vgpu.model import Vgpu, describe_type

if TYPE_CHECKING:
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.snapshot.session import Session


_HEADINGS = ("VGPU", "PARENT", "TYPE", cut("NAME"), "START", "STATE", wrapped("ATTRIBUTES"))
_IN_WORDS = {"in-use": "in use", "other": "name used by another vGPU"}
"""States whose text differs from JSON."""


def list_defined(session: Session) -> None:
    """List vGPU definitions, active or not, and unusable files."""
    host = session.with_vgpu_users(session.scan())
    items = [_item(host, one, one.path) for one in host.defined.vgpus]
    items += [_item(host, one, gpu.path) for gpu in host.defined.gpus for one in gpu.vgpus]
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


def _item(host: HostSnapshot, one: Definition, path: str) -> dict[str, object]:
    active = host.vgpus.named(one.name)
    is_there = active is not None and active.parent == one.parent
    users = users_of(host, active) if active is not None and is_there else []
    if isinstance(one, FunctionDefinition):
        is_mdev, type_name = False, one.type_name
        starter = "vfiomgr" if host.defined.file(SERVICE) is not None else None
    else:
        kinds = [k for p in host.vgpus.parents if p.name == one.parent for k in p.types]
        is_mdev, type_name = True, next((k.name for k in kinds if k.id == one.type_id), None)
        starter = "vfiomgr" if host.defined.file(RULE) is not None else None
        starter = "mdevctl" if host.defined.is_started_by_mdevctl else starter
    return {
        "name": one.name,
        "uuid": one.name if is_mdev else None,
        "parent": one.parent,
        "type": one.type_id,
        "type_name": type_name,
        "start": one.start,
        "active": is_there,
        "state": _state(active, one, is_used=bool(users)),
        "users": users,
        "attributes": [{"name": name, "value": text} for name, text in one.attributes],
        "kept_by": "mdevctl" if is_mdev else "vfiomgr",
        "path": path,
        "started_by": starter if one.autostart else None,
    }


def _state(active: Vgpu | None, one: Definition, *, is_used: bool) -> str:
    """The state of a definition; `other` if a different vGPU has its name."""
    if active is None:
        return "inactive"
    if (active.parent, active.type) != (one.parent, one.type_id):
        return "other"
    return "in-use" if is_used else "active"


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
