"""`vfiomgr vgpu …`."""

from __future__ import annotations

import uuid as uuids

import click

from vfiomgr.cli.change import plan_or_apply, print_outcome
from vfiomgr.cli.output import note, or_dash, print_document, print_table
from vfiomgr.cli.session import Session, session_options
from vfiomgr.errors import UsageError
from vfiomgr.model.intent import CreateVgpu, RemoveVgpu
from vfiomgr.model.step import RemoveMdev
from vfiomgr.planner.vgpu import find_parent

_TYPE_HEADINGS = ("PARENT", "TYPE", "NAME", "AVAILABLE", "DEVICE API", "DESCRIPTION")
_HEADINGS = ("UUID", "PARENT", "TYPE", "NAME", "GROUP", "DRIVER")


@click.group("vgpu")
@session_options()
def vgpu() -> None:
    """vGPUs: what a device can make, what it has made, create and remove."""


@vgpu.command("types")
@click.option("--parent", metavar="DEVICE", help="Types of this device alone.")
@session_options()
@click.pass_obj
def types(session: Session, parent: str | None) -> None:
    """List vGPU types by parent, and how many of each can still be made.

    \b
    Examples:
      vfiomgr vgpu types
      vfiomgr vgpu types --parent 0000:08:00.4 --format json
    """
    host = session.host()
    parents = host.vgpu_parents if parent is None else (find_parent(host, parent),)
    items = [vgpu_type for known in parents for vgpu_type in known.types]
    if session.format != "table":
        print_document("VgpuTypeList", {"items": items}, session.format)
    elif items:
        rows = [
            (
                t.parent,
                t.id,
                or_dash(t.name),
                or_dash(t.available_instances),
                or_dash(t.device_api),
                or_dash(t.description),
            )
            for t in items
        ]
        print_table(_TYPE_HEADINGS, rows)
    else:
        note("no device of this host makes vGPUs (mediated devices)")


@vgpu.command("list")
@session_options()
@click.pass_obj
def list_vgpus(session: Session) -> None:
    """List active vGPUs.

    \b
    Examples:
      vfiomgr vgpu list
      vfiomgr vgpu list --format json
    """
    host = session.host()
    if session.format != "table":
        print_document("VgpuList", {"items": host.vgpus}, session.format)
    elif host.vgpus:
        rows = [
            (
                v.uuid,
                v.parent,
                v.type,
                or_dash(v.type_name),
                or_dash(v.iommu_group),
                or_dash(v.driver),
            )
            for v in host.vgpus
        ]
        print_table(_HEADINGS, rows)
    else:
        note("no vGPU is active")


@vgpu.command("create")
@click.option("--parent", required=True, metavar="DEVICE", help="Address or name of the parent.")
@click.option("--type", "type_id", required=True, metavar="TYPE", help="As `vgpu types` lists it.")
@click.option("--uuid", metavar="UUID", help="Its name; a random one by default.")
@session_options()
@click.pass_obj
def create(session: Session, *, parent: str, type_id: str, uuid: str | None) -> None:
    """Make a vGPU and print its UUID.

    \b
    Examples:
      vfiomgr vgpu create --parent 0000:08:00.4 --type nvidia-754
      vfiomgr vgpu create --parent mtty --type mtty-2 --dry-run
    """
    chosen = _uuid(uuid) if uuid else str(uuids.uuid4())
    outcome = plan_or_apply(session, CreateVgpu(parent, type_id, chosen))
    if outcome is None:
        return
    if session.format == "table":
        for text in outcome.plan.already:
            note(f"{text}: nothing to do")
        click.echo(chosen)
    else:
        print_outcome(session, outcome, [], uuid=chosen)


@vgpu.command("remove")
@click.argument("uuid", nargs=-1, required=True)
@session_options()
@click.pass_obj
def remove(session: Session, uuid: tuple[str, ...]) -> None:
    """Remove vGPUs; one that a guest holds is refused.

    \b
    Examples:
      vfiomgr vgpu remove f715f63c-0d00-4007-9c5a-b07b0c6c05de
    """
    chosen = tuple(_uuid(text) for text in uuid)
    outcome = plan_or_apply(session, RemoveVgpu(chosen))
    if outcome is not None:
        removed = [step.uuid for step in outcome.plan.steps if isinstance(step, RemoveMdev)]
        print_outcome(session, outcome, [f"removed {text}" for text in removed], uuids=removed)


def _uuid(text: str) -> str:
    """The form that the kernel shows: lower case, with dashes."""
    try:
        return str(uuids.UUID(text))
    except ValueError:
        message = f"{text!r} is no UUID"
        raise UsageError(
            message, "write it like f715f63c-0d00-4007-9c5a-b07b0c6c05de; vfiomgr vgpu list"
        ) from None
