"""The commands for vGPU definitions."""

from __future__ import annotations

import uuid as uuids
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from vfiomgr.cli.options import CHANGING, file_option, flag, session_options
from vfiomgr.cli.output import note, print_document, say
from vfiomgr.definitions.completion import complete_defined_or_active, complete_definition
from vfiomgr.definitions.model import Configuration, canonical, read_configuration
from vfiomgr.definitions.requests import DefineVgpu, RestoreVgpus, StartVgpu, StopVgpu, UndefineVgpu
from vfiomgr.definitions.restore import Restored
from vfiomgr.definitions.restore import restore as restore_vgpus
from vfiomgr.documents.text import bytes_of
from vfiomgr.engine.changes import change, host_of, plan_or_apply, print_outcome
from vfiomgr.errors import InvalidDocument, UsageError
from vfiomgr.libvirt.commands.connection import (
    complete_nodedev_or,
    forbid_with_libvirt,
    libvirt_options,
)
from vfiomgr.libvirt.commands.nodedev import define_mdev, start_mdev, stop_mdev, undefine_mdev
from vfiomgr.persistence.named import own_program
from vfiomgr.snapshot.session import Session, pass_session, session_of
from vfiomgr.vgpu.commands.create import parent_option
from vfiomgr.vgpu.completion import complete_type
from vfiomgr.vgpu.named import name_of, uuid_of

if TYPE_CHECKING:
    from vfiomgr.diagnostic import Override
    from vfiomgr.engine.run import Outcome
    from vfiomgr.snapshot.source import HostSource


_LONGEST = 1 << 20
"""Maximum length of a definition; those of mdevctl have a few hundred bytes."""
_FORMAT = "see CONFIGURATION FILE FORMAT in mdevctl(8)"


def add_commands(group: click.Group) -> None:
    """Add these commands to `vfiomgr vgpu`."""
    for command in (define, undefine, start, stop, restore):
        group.add_command(command)


_names = click.argument(
    "name", nargs=-1, required=True, shell_complete=complete_nodedev_or(complete_definition)
)


@click.command("define")
@parent_option("Use this GPU or virtual function.")
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
@click.option(
    "--autostart/--manual",
    "autostart",
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
@file_option("--jsonfile", text="Read type, start and attributes in mdevctl's format.")
@libvirt_options
@session_options(*CHANGING)
@pass_session
def define(
    session: Session,
    *,
    parent: str | None,
    type_name: str | None,
    uuid: str | None,
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
    name = _name_to_define(session, parent, uuid)
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


def _name_to_define(host: HostSource, parent: str | None, uuid: str | None) -> str:
    """The given UUID, the address of a virtual function, or a random UUID."""
    if uuid is not None:
        return uuid_of(uuid)
    place = canonical(parent or "")
    parents = host.scan_devices().vgpus.parents
    if any(known.name == place and known.family == "vendor-vfio" for known in parents):
        return place
    return str(uuids.uuid4())


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
        text = bytes_of(source, "the definition", _LONGEST).decode()
        return read_configuration(text, is_input=True)
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
@parent_option("Use the definition of this parent.")
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
    change(session, UndefineVgpu(tuple(map(name_of, name)), parent))


@click.command("start")
@_names
@parent_option("Use the definition of this parent.")
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
@flag("--boot", text="Leave to mdevctl what it starts at boot.")
@parent_option("Only vGPUs of this device.")
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
