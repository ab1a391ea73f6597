"""`vfiomgr oci …`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import click

from vfiomgr import oci as library
from vfiomgr.cli.options import (
    FILES,
    LazyGroup,
    complete_directory,
    flag,
    function_only_option,
    session_options,
)
from vfiomgr.cli.output import note, print_document, say, say_text
from vfiomgr.containers.cdi.completion import complete_cdi_device
from vfiomgr.engine.changes import host_of
from vfiomgr.errors import UsageError
from vfiomgr.snapshot.session import Session, pass_session
from vfiomgr.vgpu.completion import complete_device

if TYPE_CHECKING:
    from vfiomgr.containers.oci.edit import Edit
    from vfiomgr.containers.oci.nodes import ContainerRuntime, NodeForm


_COMMANDS = {"edit": ("vfiomgr.main.commands.oci", "edit")}


@click.group("oci", cls=LazyGroup, table=_COMMANDS)
def oci() -> None:
    """Add devices to OCI bundles before the container starts."""


class _InjectOptions(TypedDict):
    """The options for devices that are added."""

    node: NodeForm | None
    runtime: ContainerRuntime | None
    cdi: tuple[str, ...]
    only: bool


_DEVICE = "ADDRESS|UUID"


def _conclude(session: Session, edit: Edit, notes: Sequence[str] = ()) -> None:
    """Write the changes and print them; with --dry-run, only print them."""
    if not session.dry_run:
        library.write(edit)
    if session.format != "table":
        print_document("OciEdit", {**_body(session, edit), "notes": notes}, session.format)
        return
    if session.dry_run:
        say_text(library.difference(edit))
    tell = note if session.dry_run else say
    for line in _told(edit, would=session.dry_run):
        tell(line)
    for line in edit.left:
        note(f"{edit.before.source}: {line}")
    for line in notes:
        note(line)


def _told(edit: Edit, *, would: bool) -> Iterator[str]:
    source = edit.before.source
    added, removed = ("would add", "would remove") if would else ("added", "removed")
    for injection in edit.added:
        nodes = ", ".join(map(str, injection.nodes))
        names = "".join(f", {name}" for name in injection.cdi)
        yield f"{added} {injection.device.name}: {nodes}{names}"
    yield from (f"{removed} {name}" for name in edit.removed)
    yield from (f"{name} is already in {source}" for name in edit.already)
    yield from (f"{name} was not added to {source} by vfiomgr" for name in edit.absent)
    if not edit.is_changed:
        yield f"{source} is unchanged"


def _body(session: Session, edit: Edit) -> dict[str, object]:
    body: dict[str, object] = {
        "source": edit.before.source,
        "changed": edit.is_changed,
        "added": [
            {
                "name": one.device.name,
                "functions": one.device.functions,
                "nodes": one.nodes,
                "cdi": one.cdi,
            }
            for one in edit.added
        ],
        "already": edit.already,
        "removed": edit.removed,
        "absent": edit.absent,
        "left": edit.left,
    }
    return {**body, "difference": library.difference(edit)} if session.dry_run else body


def _inject_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options for devices that are added."""
    for option in (
        function_only_option("Leave the other functions of the slot out."),
        click.option(
            "--cdi",
            multiple=True,
            metavar="KIND=NAME",
            shell_complete=complete_cdi_device,
            help="Annotate with this CDI name; one per device, in order.",
        ),
        click.option(
            "--runtime",
            type=click.Choice(["runc", "kata"]),
            help="Set the runtime; by default both must support the devices.",
        ),
        click.option(
            "--node",
            type=click.Choice(["group", "cdev"]),
            help="Use /dev/vfio/N, or /dev/vfio/devices/vfioN (Linux 6.6; default on a kernel "
            "without VFIO groups).",
        ),
    ):
        function = option(function)
    return function


@click.command("edit")
@click.argument("bundle", shell_complete=complete_directory)
@click.option(
    "--add",
    "added",
    multiple=True,
    metavar=_DEVICE,
    shell_complete=complete_device,
    help="Add this device; repeatable.",
)
@click.option(
    "--remove",
    "removed",
    multiple=True,
    metavar=_DEVICE,
    shell_complete=complete_device,
    help="Remove this device; repeatable.",
)
@flag("--remove-all", text="Remove all devices that were added.")
@_inject_options
@session_options(*FILES)
@pass_session
def edit(
    session: Session,
    *,
    bundle: str,
    added: tuple[str, ...],
    removed: tuple[str, ...],
    remove_all: bool,
    node: NodeForm | None,
    runtime: ContainerRuntime | None,
    cdi: tuple[str, ...],
    only: bool,
) -> None:
    """Add devices to the config.json of an OCI bundle, or remove them.

    BUNDLE is its directory, or the file. The added parts are the VFIO nodes with their numbers,
    mode and owner on this host (linux.devices), the cgroup rules that let the container open them
    (linux.resources.devices), and a record for the removal, which removes exactly these parts.
    Nothing else in the file changes. A second run writes nothing.

    Parts that other programs added stay, and so do parts that were changed since, with a note. If
    nothing else was changed, the original file is restored exactly. Devices that are removed need
    not exist on the host.

    \b
    Examples:
      vfiomgr oci edit /run/bundle --add 0000:04:00.0
      vfiomgr oci edit /run/bundle --add 04:00.0 --dry-run             # show the difference
      vfiomgr oci edit /run/bundle --add 04:00.0 --runtime kata --cdi nvidia.com/pgpu=23
      vfiomgr oci edit config.json --add 04:00.0 --node cdev --function-only --format json
      vfiomgr oci edit /run/bundle --runtime runc --add f715f63c-0d00-4007-9c5a-b07b0c6c05de
      vfiomgr oci edit /run/bundle --remove 0000:04:00.0
      vfiomgr oci edit /run/bundle --remove-all
    """
    if [bool(added), bool(removed), remove_all].count(True) != 1:
        message = "expected one of --add, --remove and --remove-all"
        raise UsageError(message, "e.g. vfiomgr oci edit /run/bundle --add 0000:04:00.0")
    if added:
        _inject(session, bundle, added, node=node, runtime=runtime, cdi=cdi, only=only)
        return
    if runtime or cdi or only or node:
        message = "--node, --runtime, --cdi and --function-only apply only to --add"
        raise UsageError(message, "leave them out")
    _conclude(session, library.eject(bundle, *removed))


def _inject(
    session: Session, bundle: str, devices: tuple[str, ...], **options: Unpack[_InjectOptions]
) -> None:
    notes: list[str] = []
    host = host_of(session, on_note=notes.append)
    _conclude(session, library.inject(host, bundle, *devices, **options), notes)
