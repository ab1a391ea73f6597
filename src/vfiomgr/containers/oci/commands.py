"""`vfiomgr oci …`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from vfiomgr import oci as library
from vfiomgr.cli.changes import host_of
from vfiomgr.cli.completion import complete_address
from vfiomgr.cli.group import LazyGroup
from vfiomgr.cli.options import FILES, function_only_option, session_options
from vfiomgr.cli.output import note, print_document, say, say_text
from vfiomgr.cli.session import Session, pass_session

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vfiomgr.containers.oci.edit import Edit
    from vfiomgr.containers.oci.model import ContainerRuntime, NodeForm


_COMMANDS = {
    "inject": ("vfiomgr.containers.oci.commands", "inject"),
    "eject": ("vfiomgr.containers.oci.commands", "eject"),
}


@click.group("oci", cls=LazyGroup, table=_COMMANDS)
def oci() -> None:
    """OCI bundles: devices for a container that has not started yet."""


def _conclude(session: Session, edit: Edit, notes: Sequence[str] = ()) -> None:
    """Write what is different, and say what came and went; with --dry-run, show it alone."""
    if not session.dry_run:
        library.write(edit)
    if session.format != "table":
        print_document("OciEdit", {**_body(session, edit), "notes": notes}, session.format)
        return
    if session.dry_run:
        say_text(library.difference(edit))
    tell = note if session.dry_run else say
    for line in _told(edit):
        shown = line.replace("added", "would add", 1).replace("removed", "would remove", 1)
        tell(shown if session.dry_run else line)
    for line in edit.left:
        note(f"{edit.before.source}: {line}")
    for line in notes:
        note(line)


def _told(edit: Edit) -> Iterator[str]:
    source = edit.before.source
    for injection in edit.added:
        nodes = ", ".join(map(str, injection.nodes))
        names = "".join(f", {name}" for name in injection.cdi)
        yield f"added {injection.device.name}: {nodes}{names}"
    yield from (f"removed {name}" for name in edit.removed)
    yield from (f"{name} is in {source} already" for name in edit.already)
    yield from (f"vfiomgr put no {name} into {source}" for name in edit.absent)
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


@click.command("eject")
@click.argument("bundle")
@click.argument("devices", nargs=-1, metavar="[ADDRESS|UUID...]", shell_complete=complete_address)
@session_options(*FILES)
@pass_session
def eject(session: Session, *, bundle: str, devices: tuple[str, ...]) -> None:
    """Take out of an OCI bundle what `vfiomgr oci inject` put in: all, or these devices.

    What somebody else put there stays, and so does what was changed since, which is told. Where
    nothing else was changed, the file is what it was before, to the byte. The host need not have
    the devices any more.

    \b
    Examples:
      vfiomgr oci eject /run/bundle
      vfiomgr oci eject /run/bundle 0000:04:00.0
      vfiomgr oci eject /run/bundle --dry-run --format json
    """
    _conclude(session, library.eject(bundle, *devices))


@click.command("inject")
@click.argument("bundle")
@click.argument(
    "devices", nargs=-1, required=True, metavar="ADDRESS|UUID...", shell_complete=complete_address
)
@click.option(
    "--node",
    type=click.Choice(["group", "cdev"]),
    default="group",
    show_default=True,
    help="/dev/vfio/N, or /dev/vfio/devices/vfioN (Linux 6.6).",
)
@click.option(
    "--runtime",
    type=click.Choice(["runc", "kata"]),
    help="What starts the container; without it, only what both can take.",
)
@click.option(
    "--cdi",
    multiple=True,
    metavar="KIND=NAME",
    help="Also ask for this CDI device in an annotation; one for each device, in their order.",
)
@function_only_option("Leave the other functions of the slot out.")
@session_options(*FILES)
@pass_session
def inject(
    session: Session,
    *,
    bundle: str,
    devices: tuple[str, ...],
    node: NodeForm,
    runtime: ContainerRuntime | None,
    cdi: tuple[str, ...],
    only: bool,
) -> None:
    """Put devices into the config.json of an OCI bundle, before its container starts.

    BUNDLE is its directory, or the file. It gets the nodes of VFIO with the numbers, mode and owner
    that they have on this host (linux.devices), the cgroup rules that let the container open them
    (linux.resources.devices), and a note of what was put in, by which `vfiomgr oci eject` takes
    back exactly that. Nothing else changes by a byte. A second run writes nothing.

    \b
    Examples:
      vfiomgr oci inject /run/bundle 0000:04:00.0
      vfiomgr oci inject /run/bundle 04:00.0 --dry-run             # show the difference
      vfiomgr oci inject /run/bundle 04:00.0 --runtime kata --cdi nvidia.com/pgpu=23
      vfiomgr oci inject config.json 04:00.0 --node cdev --function-only --format json
      vfiomgr oci inject /run/bundle f715f63c-0d00-4007-9c5a-b07b0c6c05de --runtime runc
    """
    notes: list[str] = []
    host = host_of(session, on_note=notes.append)
    edit = library.inject(host, bundle, *devices, node=node, runtime=runtime, cdi=cdi, only=only)
    _conclude(session, edit, notes)
