"""`vfiomgr fleet place` and `drain`."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import click
from msgspec.structs import replace

from vfiomgr.cli.options import WholeNumber, file_option, flag, session_options, with_options
from vfiomgr.cli.output import note, or_dash, print_document, print_table, say
from vfiomgr.cli.table import wrapped
from vfiomgr.errors import Refusal, UsageError
from vfiomgr.fleet.commands.common import age, directories, hosts_of, note_old, now, silent
from vfiomgr.fleet.model import hosts
from vfiomgr.fleet.named import host_named, read_reservations, request_of
from vfiomgr.fleet.placing import NOTHING, WORDS, ordered
from vfiomgr.fleet.placing import place as placed
from vfiomgr.listing import listed
from vfiomgr.snapshot.document import load_dated
from vfiomgr.snapshot.session import Session, pass_session
from vfiomgr.units import counted

if TYPE_CHECKING:
    from typing import Any

    from vfiomgr.fleet.draining import Move
    from vfiomgr.fleet.model import Fleet, Gpu, HostSummary
    from vfiomgr.fleet.placing import Kind, Order, Placement, Reserved, Wanted

_SHOWN = 20
"""Hosts that fit and are listed without --all."""
_LIVE = {True: "yes", False: "no", None: "unknown"}


def _hosts_for_shell(context: click.Context) -> tuple[HostSummary, ...]:
    """The hosts of the directories that are typed."""
    try:
        return hosts_of(context.params.get("places") or (), silent).hosts
    except UsageError:
        return ()


def _complete_with(names: Callable[[Gpu], Iterable[str]]) -> Callable[..., list[str]]:
    """What completes names of something of GPUs, behind a number."""

    def complete(context: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
        count, times, typed = incomplete.rpartition("x")
        before, typed = (count + times, typed) if count.isdecimal() else ("", incomplete)
        gpus = (gpu for host in _hosts_for_shell(context) for gpu in host.gpus)
        found = sorted({name for gpu in gpus for name in names(gpu)})
        return [before + name for name in found if name.startswith(typed)]

    return complete


def _models(gpu: Gpu) -> Iterable[str]:
    return (gpu.name.partition(" ")[2] or gpu.name, gpu.ids)


_NAMES: dict[Kind, Callable[[Gpu], Iterable[str]]] = {
    "gpu": lambda gpu: [gpu.name],
    "vgpu": lambda gpu: [one.name for one in gpu.types],
    "mig": lambda gpu: [one.name for one in gpu.instances],
}
"""The names by which parts of a GPU are requested."""


def _complete_host(context: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    names = (host.name for host in _hosts_for_shell(context))
    return [name for name in names if name.startswith(incomplete)]


def _choices(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options for the order of hosts, and for what is reserved."""
    return with_options(
        command,
        click.option(
            "--pack/--spread",
            "is_packed",
            default=True,
            help="Prefer hosts with the fewest, or with the most, free GPUs.  [default: pack]",
        ),
        file_option(
            "--reservations", text="Leave out what FILE reserves: hosts, GPUs, memory (YAML)."
        ),
    )


@click.command("place")
@directories()
@click.option(
    "--gpu",
    "gpus",
    multiple=True,
    metavar="[N x]MODEL",
    shell_complete=_complete_with(_models),
    help="Entire GPUs: words of the model, or PCI IDs; repeatable.",
)
@click.option(
    "--vgpu",
    "vgpus",
    multiple=True,
    metavar="[N x]TYPE",
    shell_complete=_complete_with(_NAMES["vgpu"]),
    help="vGPUs of a type; repeatable.",
)
@click.option(
    "--mig",
    "instances",
    multiple=True,
    metavar="[N x]PROFILE",
    shell_complete=_complete_with(_NAMES["mig"]),
    help="New GPU instances of a profile on GPUs in MIG mode; repeatable.",
)
@flag("--same-numa", text="GPUs, memory and CPUs on one NUMA node.")
@click.option("--memory", metavar="SIZE", help="Free memory of the host.")
@click.option("--hugepages", metavar="SIZE", help="Memory in free huge pages of this size.")
@click.option(
    "--vcpus", "cpus", type=WholeNumber(0), default=0, metavar="N", help="CPUs of the host."
)
@_choices
@flag("--all", "every", text="List every host, with the reason.")
@session_options("format")
@pass_session
def place(
    session: Session,
    *,
    places: tuple[str, ...],
    gpus: tuple[str, ...],
    vgpus: tuple[str, ...],
    instances: tuple[str, ...],
    same_numa: bool,
    memory: str | None,
    hugepages: str | None,
    cpus: int,
    is_packed: bool,
    reservations: str | None,
    every: bool,
) -> int:
    """Show which hosts a guest fits on, and why not on the others.

    Free is what was free when the snapshot was created (AGE): a GPU if `bind` would have taken it
    and its users are known, and memory. GPUs of one IOMMU group go to the same guest. CPUs of other
    guests are not subtracted, as snapshots do not have them.

    Exit status: 1 if no host fits, otherwise 0.

    \b
    Examples:
      vfiomgr fleet place snapshots --gpu 2xA40 --same-numa --memory 128G --vcpus 32
      vfiomgr fleet place snapshots --gpu 10de:2235 --spread --all
      vfiomgr fleet place snapshots --vgpu 2xA40-8Q --reservations reserved.yaml
      vfiomgr fleet place snapshots --mig 1g.5gb
      vfiomgr fleet place snapshots --gpu A40 --memory 64G --hugepages 1G
    """
    request = request_of(
        {"gpu": gpus, "vgpu": vgpus, "mig": instances},
        memory,
        hugepages,
        cpus,
        is_on_one_node=same_numa,
    )
    fleet = hosts_of(places)
    reserved = _reserved(reservations, fleet)
    order: Order = "pack" if is_packed else "spread"
    _note_absent(request.wanted, fleet)
    found = [
        replace(placed(host, request, reserved.get(host.name, NOTHING)), time=host.time)
        for host in fleet.hosts
    ]
    note_old((one.host, one.time) for one in found if one.fits)
    sorted_ones = ordered(found, order)
    if session.format == "table":
        _print(sorted_ones, every=every, unreadable=len(fleet.unreadable))
    else:
        body = {"items": sorted_ones, "unreadable": fleet.unreadable, "outdated": fleet.outdated}
        print_document("FleetPlacement", body, session.format)
    return 0 if any(one.fits for one in found) else 1


def _note_absent(wanted: Iterable[Wanted], fleet: Fleet[HostSummary]) -> None:
    """Note parts of a request that no GPU of the fleet could serve, and what there is."""
    gpus = [gpu for host in fleet.hosts for gpu in host.gpus]
    for one in wanted:
        if not any(map(one.is_served_by, gpus)):
            known = listed(sorted({name for gpu in gpus for name in _NAMES[one.kind](gpu)}), 5)
            note(f"no snapshot has a {WORDS[one.kind]} {one.name} (available: {known or 'none'})")


def _reserved(file: str | None, fleet: Fleet[HostSummary]) -> dict[str, Reserved]:
    return {} if file is None else read_reservations(file, fleet, now())


def _print(found: Sequence[Placement], *, every: bool, unreadable: int) -> None:
    fitting = [one for one in found if one.fits]
    shown = fitting if every else fitting[:_SHOWN]
    if shown:
        columns = ("HOST", "NUMA", wrapped("GPUS"), "LEFT", "AGE")
        print_table(columns, [_row(one) for one in shown])
    if len(shown) < len(fitting):
        say(f"and {hosts(len(fitting) - len(shown))} more (--all lists them)")
    others = [one for one in found if not one.fits]
    if every and others:
        print_table(
            ("HOST", wrapped("WHY NOT")), [[o.host, f"{o.reason}: {o.why}"] for o in others]
        )
    reasons = Counter(one.reason for one in others).most_common()
    told = [f"{count} ({reason})" for reason, count in reasons]
    told += [f"{unreadable} (unreadable file)"] if unreadable else []
    rest = f"; others: {', '.join(told)}" if told else ""
    verb = "fits" if len(fitting) == 1 else "fit"
    note(f"{len(fitting)} of {hosts(len(found) + unreadable)} {verb}{rest}")


def _row(one: Placement) -> list[str]:
    more = f" ({counted(one.unused, 'GPU')} only for its IOMMU group)" if one.unused else ""
    numa = ",".join(map(str, one.numa_nodes))
    return [
        one.host,
        or_dash(numa),
        ", ".join(one.gpus) + more or "-",
        str(one.left),
        age(one.time),
    ]


@click.command("drain")
@directories()
@click.option(
    "--host",
    "name",
    required=True,
    metavar="HOST",
    shell_complete=_complete_host,
    help="The host whose guests are to leave.",
)
@_choices
@session_options("format")
@pass_session
def drain(
    session: Session,
    *,
    places: tuple[str, ...],
    name: str,
    is_packed: bool,
    reservations: str | None,
) -> int:
    """Show where the guests of a host would fit.

    Guests are placed one after the other, those with most devices first. LIVE says whether the
    drivers of all devices of a guest can migrate it; any other guest must be shut down first. Their
    memory and CPUs are not in snapshots. For one domain, `vfiomgr check migration` compares two
    hosts in detail.

    Exit status: 1 if a guest fits nowhere, otherwise 0.

    \b
    Examples:
      vfiomgr fleet drain snapshots --host gpu07
      vfiomgr fleet drain snapshots --host gpu07 --spread --reservations reserved.yaml
    """
    fleet = hosts_of(places)
    leaving = host_named(name, fleet)
    snapshot, _ = load_dated(leaving.path)
    if snapshot.users.processes is None:
        message = f"the guests of {name} are unknown: its snapshot has no users of devices"
        raise Refusal(message, "create it as root, on the running host: sudo vfiomgr snapshot")
    from vfiomgr.fleet.draining import drain as drained  # noqa: PLC0415 - slow
    from vfiomgr.fleet.draining import unknown_guests  # noqa: PLC0415 - slow

    unknown = unknown_guests(snapshot)
    if unknown is not None:
        message = f"the guests of {name} are unknown: {unknown.why}"
        raise Refusal(message, unknown.lift)
    others = [host for host in fleet.hosts if host.name != name]
    order: Order = "pack" if is_packed else "spread"
    moves = drained(snapshot, others, _reserved(reservations, fleet), order)
    targets = {move.host for move in moves}
    read = (leaving, *(host for host in others if host.name in targets))
    note_old((host.name, host.time) for host in read)
    if session.format == "table":
        _print_moves(name, moves, {host.name: host.path for host in others})
    else:
        body = {"host": name, "items": moves, "unreadable": fleet.unreadable}
        print_document("FleetDrain", body, session.format)
    return 1 if any(move.host is None for move in moves) else 0


def _print_moves(name: str, moves: Sequence[Move], files: dict[str, str]) -> None:
    if not moves:
        say(f"no guest of {name} has a device")
        return
    columns = ("GUEST", wrapped("NEEDS"), "LIVE", "TO", wrapped("NOTES"))
    rows = []
    for move in moves:
        why = [move.why] if move.why else []
        if move.host is None:
            why += [f"{reason}: {hosts(n)}" for reason, n in move.reasons.items()]
        needs = ", ".join(move.needs)
        rows.append([move.guest, needs, _LIVE[move.is_live], move.host or "-", "; ".join(why)])
    print_table(columns, rows)
    for move in moves:
        if move.is_live and move.host is not None:
            words = (move.guest, "--to", files[move.host])
            note(f"compare the hosts, on {name}: vfiomgr check migration {shlex.join(words)}")
    live = sum(bool(move.is_live) for move in moves)
    left = sum(move.host is None for move in moves)
    note(f"{counted(len(moves), 'guest')}: {live} can move while running, {left} fit nowhere")
