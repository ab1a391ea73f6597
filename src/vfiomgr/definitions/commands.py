"""The commands for vGPU definitions, and `vfiomgr vgpu list --defined`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from vfiomgr.cli.changes import host_of, plan_or_apply, print_outcome
from vfiomgr.cli.completion import (
    complete_defined_or_active,
    complete_definition,
    complete_parent,
    complete_type,
)
from vfiomgr.cli.options import CHANGING, RenamedOption, complete_file, session_options
from vfiomgr.cli.output import (
    note,
    or_dash,
    print_document,
    print_table,
    say,
    unknown_users,
)
from vfiomgr.cli.session import Session, pass_session, session_of
from vfiomgr.cli.table import cut, wrapped
from vfiomgr.definitions.model import Configuration, read_configuration
from vfiomgr.definitions.named import name_to_define
from vfiomgr.definitions.named import restore as restore_vgpus
from vfiomgr.definitions.requests import DefineVgpu, RestoreVgpus, StartVgpu, StopVgpu, UndefineVgpu
from vfiomgr.definitions.service import RULE, SERVICE
from vfiomgr.errors import InvalidDocument, UsageError
from vfiomgr.libvirt.commands.connection import (
    complete_nodedev_or,
    forbid_with_libvirt,
    libvirt_options,
)
from vfiomgr.libvirt.commands.nodedev import define_mdev, start_mdev, stop_mdev, undefine_mdev
from vfiomgr.persistence.named import own_program
from vfiomgr.vgpu.commands.active import users_of
from vfiomgr.vgpu.model import PARAMETERS, describe_type
from vfiomgr.vgpu.named import name_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from vfiomgr.definitions.model import FunctionDefinition, GpuDefinition, VgpuDefinition
    from vfiomgr.definitions.named import Restored
    from vfiomgr.diagnostic import Override
    from vfiomgr.engine.run import Outcome
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.vgpu.model import Vgpu


_HEADINGS = ("VGPU", "PARENT", "TYPE", cut("NAME"), "START", "STATE", wrapped("ATTRIBUTES"))
_IN_WORDS = {
    "in-use": "in use",
    "other": "name used by another vGPU",
}
"""States whose text differs from JSON."""


def list_defined(session: Session) -> None:
    """List vGPU definitions, active or not, and unusable files."""
    host = session.with_vgpu_users(session.scan())
    items = [_mdev_item(host, definition) for definition in host.vgpu_definitions]
    items += [_function_item(host, gpu, f) for gpu in host.defined.gpus for f in gpu.vgpus]
    problems = host.vgpu_definition_problems
    if session.format != "table":
        print_document("VgpuDefinitionList", {"items": items, "problems": problems}, session.format)
        return
    if items:
        print_table(_HEADINGS, [_row(item) for item in items])
    else:
        note("no vGPUs defined; define one with: vfiomgr vgpu define")
    if host.users is None and any(item["active"] for item in items):
        note(unknown_users("in use", is_live=session.is_live))
    for problem in problems:
        note(f"skipped {problem.path}: {problem.reason}")
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


_LONGEST = 1 << 20
"""Maximum length of a definition; a longer one is truncated and then fails to parse."""
_FORMAT = "see CONFIGURATION FILE FORMAT in mdevctl(8)"


def add_commands(group: click.Group) -> None:
    """Add these commands to `vfiomgr vgpu`."""
    for command in (define, undefine, start, stop, restore):
        group.add_command(command)


_names = click.argument(
    "name",
    nargs=-1,
    required=True,
    shell_complete=complete_nodedev_or(complete_definition),
)


@click.command("define")
@click.option(
    "--parent",
    metavar="DEVICE",
    shell_complete=complete_parent,
    help="Use this GPU or virtual function.",
)
@click.option(
    "--type",
    "type_name",
    metavar="TYPE",
    shell_complete=complete_type,
    help="Type by ID, number or name (A10-4Q).",
)
@click.argument(
    "uuid", required=False, shell_complete=complete_nodedev_or(complete_defined_or_active)
)
@click.option("--uuid", "former_uuid", hidden=True)
@click.option(
    "--autostart/--manual",
    "autostart",
    cls=RenamedOption,
    former=("--auto",),
    default=None,
    help="Start it at boot, or only manually.",
)
@click.option(
    "--attribute",
    "attributes",
    multiple=True,
    metavar="NAME=VALUE",
    help="Attribute to write at start; replaces all defined ones.",
)
@click.option(
    "--jsonfile",
    metavar="FILE",
    shell_complete=complete_file,
    help="Read type, start and attributes in mdevctl's format.",
)
@libvirt_options
@session_options(*CHANGING)
@pass_session
def define(
    session: Session,
    *,
    parent: str | None,
    type_name: str | None,
    uuid: str | None,
    former_uuid: str | None,
    autostart: bool | None,
    attributes: tuple[str, ...],
    jsonfile: str | None,
    uri: str | None,
) -> None:
    """Define a vGPU without starting it; print its name.

    Omitted values come from the active vGPU, or from its existing definition. Definitions are
    stored in mdevctl's files (/etc/mdevctl.d), so that both tools can start them. Virtual functions
    of a vendor's own interface, which mdevctl does not support, are stored in /etc/vfiomgr/vgpu.d.

    With --autostart the vGPU starts when its parent appears: by mdevctl's udev rule, or by a
    service of vfiomgr if that rule does not work.

    With --libvirt, libvirt writes the definition, to the same files: on other hosts (--connect), or
    as a user whom polkit allows it. Parent and type are required, and are checked first.

    \b
    Examples:
      vfiomgr vgpu define --parent 0000:08:00.4 --type A10-4Q --autostart
      vfiomgr vgpu define f715f63c-0d00-4007-9c5a-b07b0c6c05de --autostart
      vfiomgr vgpu define --parent mtty --type mtty-2 --attribute power/control=on
      vfiomgr vgpu define --parent 0000:08:00.4 --type A10-4Q \\
          --attribute nvidia/vgpu_params=frame_rate_limiter=0,disable_vnc=1
      vfiomgr vgpu define --parent mtty --jsonfile vgpu.json --dry-run
      vfiomgr vgpu define --libvirt --parent 65:00.0 --type nvidia-468 --autostart
    """
    uuid = uuid or former_uuid
    if uri is not None:
        forbid_with_libvirt(attribute=attributes, jsonfile=jsonfile)
        define_mdev(session, uri, uuid, parent=parent, wanted=type_name, autostart=bool(autostart))
        return
    if parent is None and uuid is None:
        message = "missing argument: UUID (or --parent for a new vGPU)"
        raise UsageError(message, "list the active vGPUs with: vfiomgr vgpu list")
    if jsonfile is not None and (type_name or attributes or autostart is not None):
        message = "--jsonfile already sets type, start and attributes"
        raise UsageError(message, "leave out --type, --attribute, --autostart and --manual")
    read = None if jsonfile is None else _configuration(jsonfile)
    name = name_to_define(session, parent, uuid)
    starts = read.autostart if read else autostart
    request = DefineVgpu(
        name,
        parent=None if name == parent else parent,
        type=read.type_id if read else type_name,
        attributes=read.attributes if read else tuple(map(_attribute, attributes)) or None,
        autostart=starts,
        program=own_program() if starts else None,
    )
    outcome = plan_or_apply(session, request)
    if outcome is not None:
        _print_defined(session, outcome, name)


def _print_defined(session: Session, outcome: Outcome, name: str) -> None:
    """Print only the name on standard output, for scripts."""
    if session.format != "table":
        print_outcome(session, outcome, [], name=name)
        return
    for text in outcome.plan.notes:
        note(text)
    for text in outcome.plan.already:
        note(text if outcome.is_changed else f"{text}: nothing to do")
    say(name)


def _attribute(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        message = f"invalid --attribute: {text} (expected NAME=VALUE)"
        raise UsageError(message, "example: --attribute nvidia/vgpu_params=disable_vnc=1")
    return name, value


def _configuration(source: str) -> Configuration:
    try:
        with open(source, encoding="utf-8") as file:
            return read_configuration(file.read(_LONGEST), is_input=True)
    except OSError as error:
        message = f"cannot read {source}: {error.strerror}"
        raise UsageError(message, _FORMAT) from None
    except UnicodeDecodeError:
        message = f"{source}: not UTF-8 text"
        raise InvalidDocument(message, _FORMAT) from None
    except InvalidDocument as error:
        message = f"{source}: {error.message}"
        raise InvalidDocument(message, _FORMAT) from None


@click.command("undefine")
@_names
@click.option(
    "--parent",
    metavar="DEVICE",
    shell_complete=complete_parent,
    help="Use the definition of this parent.",
)
@libvirt_options
@session_options(*CHANGING)
@pass_session
def undefine(
    session: Session, *, name: tuple[str, ...], parent: str | None, uri: str | None
) -> None:
    """Delete vGPU definitions; active vGPUs keep running.

    A file that is not a valid definition is also removed, if its name is the UUID.

    \b
    Examples:
      vfiomgr vgpu undefine f715f63c-0d00-4007-9c5a-b07b0c6c05de
      vfiomgr vgpu undefine f715f63c-0d00-4007-9c5a-b07b0c6c05de --parent 0000:08:00.4
      vfiomgr vgpu undefine 0000:41:00.4 --dry-run
      vfiomgr vgpu undefine f715f63c-0d00-4007-9c5a-b07b0c6c05de --libvirt
    """
    if uri is not None:
        forbid_with_libvirt(parent=parent)
        undefine_mdev(session, uri, name)
        return
    outcome = plan_or_apply(session, UndefineVgpu(tuple(map(name_of, name)), parent))
    if outcome is not None:
        print_outcome(session, outcome)


@click.command("start")
@_names
@click.option(
    "--parent",
    metavar="DEVICE",
    shell_complete=complete_parent,
    help="Use the definition of this parent.",
)
@libvirt_options
@session_options(*CHANGING)
@pass_session
def start(session: Session, *, name: tuple[str, ...], parent: str | None, uri: str | None) -> None:
    """Start vGPUs as defined, all or none.

    Active vGPUs keep running. Attributes that differ from the definition are written again, unless
    a guest uses the vGPU.

    \b
    Examples:
      vfiomgr vgpu start f715f63c-0d00-4007-9c5a-b07b0c6c05de
      vfiomgr vgpu start f715f63c-0d00-4007-9c5a-b07b0c6c05de --parent 0000:08:00.4
      vfiomgr vgpu start 0000:41:00.4 0000:41:00.5
      vfiomgr vgpu start f715f63c-0d00-4007-9c5a-b07b0c6c05de --libvirt
    """
    if uri is not None:
        forbid_with_libvirt(parent=parent)
        start_mdev(session, uri, name)
        return
    outcome = plan_or_apply(session, StartVgpu(tuple(map(name_of, name)), parent))
    if outcome is not None:
        done = _changed(outcome)
        print_outcome(session, outcome, [f"started {text}" for text in done], vgpus=done)


@click.command("stop")
@_names
@click.option(
    "--allow",
    type=click.Choice(["in-use"]),
    multiple=True,
    help="Try even if a guest uses the vGPU (see --timeout).",
)
@libvirt_options
@session_options(*CHANGING)
@pass_session
def stop(
    session: Session, *, name: tuple[str, ...], allow: tuple[Override, ...], uri: str | None
) -> None:
    """Stop vGPUs and keep their definitions.

    A vGPU that a guest uses is refused.

    \b
    Examples:
      vfiomgr vgpu stop f715f63c-0d00-4007-9c5a-b07b0c6c05de
      vfiomgr vgpu stop f715f63c-0d00-4007-9c5a-b07b0c6c05de --libvirt
    """
    if uri is not None:
        forbid_with_libvirt(allow=allow)
        stop_mdev(session, uri, name)
        return
    outcome = plan_or_apply(session, StopVgpu(tuple(map(name_of, name)), frozenset(allow)))
    if outcome is not None:
        done = _changed(outcome)
        print_outcome(session, outcome, [f"stopped {text}" for text in done], vgpus=done)


def _changed(outcome: Outcome) -> list[str]:
    """The vGPUs that a run changed."""
    steps = outcome.plan.steps if outcome.is_changed else ()
    return list(dict.fromkeys(name for step in steps if (name := step.subject) is not None))


@click.command("restore", hidden=True)
@click.option("--boot", is_flag=True, help="Leave to mdevctl what it starts at boot.")
@click.option(
    "--parent", metavar="DEVICE", shell_complete=complete_parent, help="Only vGPUs of this device."
)
@session_options(*CHANGING)
@click.pass_context
def restore(context: click.Context, *, boot: bool, parent: str | None) -> None:
    """Start all autostart vGPUs.

    Virtual functions and modes of a GPU are set first, then types, then attributes. Active vGPUs
    are left alone. If one fails, the others are still started, and the failure is reported.

    Exit status: 0 if all are active or wait for their device, 1 if one failed.

    \b
    Examples:
      vfiomgr vgpu restore --dry-run
      vfiomgr vgpu restore
      vfiomgr vgpu restore --parent 0000:08:00.4 --format json
    """
    session = session_of(context)
    if session.dry_run or session.snapshot is not None:
        plan_or_apply(session, RestoreVgpus(parent, boot=boot))
        return
    found = restore_vgpus(host_of(session), parent, boot=boot)
    _print_restored(session, found)
    context.exit(int(any(item.state == "failed" for item in found)))


def _print_restored(session: Session, found: Sequence[Restored]) -> None:
    if session.format != "table":
        changed = any(item.state == "restored" for item in found)
        print_document("Restoration", {"changed": changed, "items": found}, session.format)
        return
    for item in found:
        why = f": {item.reason}" if item.reason else ""
        say(f"{item.state}: vGPU {item.name} ({item.type} on {item.parent}){why}")
    if not found:
        say("nothing to do: no autostart vGPUs")
