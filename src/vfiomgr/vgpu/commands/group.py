"""The commands below `vfiomgr vgpu`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from vfiomgr.cli.options import (
    CHANGING,
    READING,
    WholeNumber,
    allow_option,
    session_options,
)
from vfiomgr.cli.output import note, or_dash, print_document, print_table, say
from vfiomgr.cli.table import wrapped
from vfiomgr.definitions.commands import add_commands, parent_option
from vfiomgr.definitions.commands.listing import list_defined
from vfiomgr.engine.changes import plan_or_apply, print_outcome
from vfiomgr.errors import forbid_alone, forbid_together
from vfiomgr.gpu.commands import instances, mode
from vfiomgr.libvirt.commands.connection import forbid_with_libvirt, libvirt_options
from vfiomgr.libvirt.commands.nodedev import list_mdevs
from vfiomgr.snapshot.completion import complete_numa_node
from vfiomgr.snapshot.named import find_address
from vfiomgr.snapshot.session import Session, pass_session
from vfiomgr.vgpu.capacity import Capacity, Gpu, gpus, lost_functions, rooms, totals
from vfiomgr.vgpu.commands.active import list_active
from vfiomgr.vgpu.completion import complete_type, complete_vgpu
from vfiomgr.vgpu.mig.steps import creation, without_functions
from vfiomgr.vgpu.named import CreateVgpu, RemoveVgpu, created, removed
from vfiomgr.vgpu.placement import find_parents
from vfiomgr.vgpu.quota.capacity import function_rooms

if TYPE_CHECKING:
    from vfiomgr.diagnostic import Override
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.vgpu.named import VgpuOutcome
    from vfiomgr.vgpu.steps import Strategy

_TYPE_HEADINGS = (
    *("GPU", "TYPE", "NAME", "MEMORY", "HEADS", "AVAILABLE", "UNUSABLE"),
    wrapped("NOTES"),
)


@click.group("vgpu")
def vgpu() -> None:
    """Create, remove, define, start and stop vGPUs."""


add_commands(vgpu)


vgpu.add_command(instances)
vgpu.add_command(mode)


def _list_types(session: Session, parent: str | None) -> None:
    """List vGPU types and how many more fit on each GPU."""
    host = session.scan(with_gpu_modes=True)
    found, items = _rooms(host, parent)
    together = totals(room for _, room in items)
    if session.format != "table":
        body = {
            "items": [_type_item(gpu, room) for gpu, room in items],
            "totals": [_total_item(room) for room in together],
        }
        print_document("VgpuTypeList", body, session.format)
    elif items:
        rows = [_type_row(gpu.name, room) for gpu, room in items]
        rows += [_type_row("all", room) for room in together]
        print_table(_TYPE_HEADINGS, rows)
    elif found:
        note(f"no vGPU types available on: {', '.join(gpu.name for gpu in found)}")
    elif not without_functions(host):
        note("no device of this host supports vGPUs")
    _tell_of_lost(host)
    _tell_of_idle(host)


def _rooms(
    host: HostSnapshot, parent: str | None
) -> tuple[tuple[Gpu, ...], list[tuple[Gpu, Capacity]]]:
    """The GPUs and their capacities, including GPUs whose virtual functions are vGPUs."""
    divided = function_rooms(host)
    if parent is not None:
        name = str(find_address(host, parent)) if ":" in parent else parent
        asked = [(gpu, one) for gpu, one in divided if gpu.name == name]
        if asked:
            return tuple(gpu for gpu, _ in asked), asked
        divided = ()
    found = gpus(host) if parent is None else tuple(find_parents(host, parent))
    items = [(gpu, one) for gpu in found for one in rooms(gpu)]
    return (*found, *(gpu for gpu, _ in divided)), [*items, *divided]


def _type_item(gpu: Gpu, room: Capacity) -> dict[str, object]:
    kind = room.type
    return {
        "gpu": gpu.name,
        "family": gpu.family,
        "id": kind.id,
        "name": kind.name,
        "series": kind.series,
        "framebuffer_mib": kind.framebuffer,
        "heads": kind.heads,
        "resolution": kind.resolution,
        "max_instances": kind.max_instances,
        "device_api": kind.device_api,
        "description": kind.description,
        "numa_node": gpu.numa_node,
        "active": sum(vgpu.type == kind.id for vgpu in gpu.instances),
        "available_instances": room.more,
        "available_in_new_gpu_instances": room.makeable,
        "is_certain": room.is_certain,
        "unavailable_because": room.unavailable_because,
        "stranded_mib": room.stranded,
    }


def _total_item(room: Capacity) -> dict[str, object]:
    return {
        "id": room.type.id,
        "name": room.type.name,
        "available_instances": room.more,
        "available_in_new_gpu_instances": room.makeable,
        "is_certain": room.is_certain,
    }


def _type_row(gpu: str, room: Capacity) -> tuple[str, ...]:
    kind = room.type
    return (
        gpu,
        kind.id,
        or_dash(kind.model_name),
        "-" if kind.framebuffer is None else f"{kind.framebuffer}M",
        or_dash(kind.heads),
        f"{'' if room.is_certain else '<='}{room.more}"
        + (f" +{room.makeable}" if room.makeable else ""),
        or_dash(room.stranded),
        or_dash(room.unavailable_because),
    )


def _tell_of_lost(host: HostSnapshot) -> None:
    """Report unusable virtual functions, and how to restore them."""
    wedged = {one.name: one.why for one in host.wedged}
    for gpu in gpus(host):
        known = lost_functions(host, gpu.parents)
        reasons = {p.name: known.get(p.name) or wedged.get(p.name) for p in gpu.parents}
        told = [f"{name} {why}" for name, why in reasons.items() if why]
        if told:
            count = gpu.device.sriov_numvfs if gpu.device is not None else None
            note(
                f"unusable: {', '.join(told)}; to restore them, remove all vGPUs of {gpu.name}, "
                f"then: vfiomgr sriov set {gpu.name} 0; vfiomgr sriov set {gpu.name} {count}"
            )


def _tell_of_idle(host: HostSnapshot) -> None:
    """Report GPUs that need virtual functions before they offer vGPUs."""
    known = {gpu.name for gpu in gpus(host)}
    for device in without_functions(host):
        if str(device.address) in known:
            continue
        present, total = device.sriov_numvfs or 0, device.sriov_totalvfs
        has = (
            f"none of its {present} is on the driver {device.driver}; create them again"
            if present
            else f"has 0 of {total}; create them"
        )
        note(f"{device} needs virtual functions for vGPUs and {has}: {creation(host, device)}")


@vgpu.command("list")
@click.option("--defined", is_flag=True, help="List definitions, active or not.")
@click.option("--types", is_flag=True, help="List types, and how many more fit on each GPU.")
@parent_option("Only types of this GPU or virtual function.")
@libvirt_options
@session_options(*READING, "timeout")
@pass_session
def list_vgpus(
    session: Session, *, defined: bool, types: bool, parent: str | None, uri: str | None
) -> None:
    """List active vGPUs, definitions or types.

    USED BY is the guest (of libvirt, Kata, or QEMU's -name), its process and its systemd unit; it
    is unknown without root. --libvirt lists the mediated devices that libvirt has, active and
    defined.

    With --types, AVAILABLE is the capacity of the GPU, not the sum over its virtual functions. "<="
    marks a maximum, if the driver does not report everything; "+N" counts vGPUs in GPU instances
    (MIG) that vgpu create would create, if no other type gets them. UNUSABLE is the memory (MiB)
    left over when the GPU is filled with this type. The last rows are the totals of all GPUs. NOTES
    says why a type is unavailable.

    \b
    Examples:
      vfiomgr vgpu list
      vfiomgr vgpu list --defined
      vfiomgr vgpu list --types
      vfiomgr vgpu list --types --parent 0000:08:00.0 --format json
      vfiomgr vgpu list --libvirt
      vfiomgr vgpu list --connect qemu+ssh://node7/system
    """
    if parent is not None and not types:
        forbid_alone("--parent", "--types", "vGPUs are listed for all GPUs")
    if defined and types:
        forbid_together("--defined", "--types", "one lists vGPUs, the other what can be created")
    if uri is not None:
        forbid_with_libvirt(defined=defined, types=types)
        list_mdevs(session, uri)
        return
    if types:
        _list_types(session, parent)
    elif defined:
        list_defined(session)
    else:
        list_active(session)


@vgpu.command("create")
@click.argument("uuid", required=False)
@click.option(
    "--type",
    "type_name",
    metavar="TYPE",
    shell_complete=complete_type,
    help="Type by ID, number or name (A10-4Q).",
)
@click.option("--framebuffer", metavar="SIZE", help="Require at least this memory, e.g. 6G.")
@click.option(
    "--series",
    type=click.Choice(["A", "B", "C", "Q"], case_sensitive=False),
    metavar="[A|B|C|Q]",
    help="NVIDIA series: A(pps), B(usiness), C(ompute), Q(uadro).",
)
@click.option("--heads", type=WholeNumber(1), metavar="N", help="Require at least N displays.")
@click.option(
    "--count", type=WholeNumber(1), default=1, metavar="N", help="Create N vGPUs, all or none."
)
@parent_option("Use this GPU or virtual function.")
@click.option(
    "--numa",
    "numa_node",
    type=WholeNumber(0),
    metavar="NODE",
    shell_complete=complete_numa_node,
    help="Use a GPU of this NUMA node.",
)
@click.option(
    "--strategy",
    type=click.Choice(["pack", "spread"]),
    default="pack",
    show_default=True,
    help="Fill one GPU after the other, or spread evenly.",
)
@session_options(*CHANGING)
@pass_session
def create(
    session: Session,
    *,
    type_name: str | None,
    framebuffer: str | None,
    series: str | None,
    heads: int | None,
    count: int,
    parent: str | None,
    numa_node: int | None,
    strategy: Strategy,
    uuid: str | None,
) -> None:
    """Create vGPUs and print their names.

    The names are UUIDs, or addresses of virtual functions. Name the type, or describe it: the
    smallest matching type is used. Without --parent vfiomgr selects the GPU: --strategy pack
    prefers a GPU with vGPUs of this size, then the GPU that wastes the least memory, and keeps
    unused GPUs free. On a GPU in MIG mode, missing GPU instances are created.

    \b
    Examples:
      vfiomgr vgpu create --type A10-4Q
      vfiomgr vgpu create --type nvidia-754 --parent 0000:08:00.4
      vfiomgr vgpu create --framebuffer 6G --series Q --heads 2 --count 4
      vfiomgr vgpu create --type A100-1-5C --count 2 --dry-run
      vfiomgr vgpu create --parent mtty --type mtty-2 --dry-run
    """
    request = CreateVgpu(
        type=type_name,
        framebuffer=framebuffer,
        series=series,
        heads=heads,
        count=count,
        parent=parent,
        numa_node=numa_node,
        strategy=strategy,
        uuid=uuid,
    ).request(session)
    outcome = plan_or_apply(session, request)
    if outcome is not None:
        _print_created(session, created(request, outcome))


def _print_created(session: Session, outcome: VgpuOutcome) -> None:
    """Print only the names on standard output, for scripts."""
    if session.format != "table":
        print_outcome(session, outcome, [], vgpus=outcome.names)
        return
    for text in (*outcome.plan.notes, *outcome.plan.already):
        note(text if outcome.is_changed else f"{text}: nothing to do")
    for name in outcome.names:
        say(name)


@vgpu.command("remove")
@click.argument("name", nargs=-1, shell_complete=complete_vgpu)
@click.option("--all", "every", is_flag=True, help="Remove all vGPUs created by vfiomgr.")
@parent_option("With --all: only vGPUs of this device.")
@allow_option("in-use", text="Try even if a guest uses the vGPU (see --timeout).")
@session_options(*CHANGING)
@pass_session
def remove(
    session: Session,
    *,
    name: tuple[str, ...],
    every: bool,
    parent: str | None,
    allow: tuple[Override, ...],
) -> None:
    """Remove vGPUs by UUID or virtual function address.

    A vGPU that a guest uses is refused.

    \b
    Examples:
      vfiomgr vgpu remove f715f63c-0d00-4007-9c5a-b07b0c6c05de
      vfiomgr vgpu remove 0000:41:00.4
      vfiomgr vgpu remove --all --parent 0000:41:00.0
    """
    request = RemoveVgpu(*name, every=every, parent=parent, allow=allow)
    done = plan_or_apply(session, request)
    if done is not None:
        outcome = removed(done)
        lines = [f"removed {text}" for text in outcome.names]
        print_outcome(session, outcome, lines, vgpus=outcome.names)
