"""`vfiomgr fleet list`, `check` and `diff`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from hashlib import sha256

import click
from msgspec.structs import replace

from vfiomgr.cli.options import complete_file, file_option, session_options
from vfiomgr.cli.output import note, or_dash, print_document, print_table, say
from vfiomgr.cli.reports import strict_option
from vfiomgr.cli.table import cut, wrapped
from vfiomgr.documents.text import source_of, text_of
from vfiomgr.errors import UsageError, forbid_alone
from vfiomgr.fleet.checking import HostReport, by_rule, report_of
from vfiomgr.fleet.commands.common import age, directories, hosts_of, once, read_fleet, silent
from vfiomgr.fleet.differences import Inventory, differences, inventory
from vfiomgr.fleet.model import STATES, Fleet, HostSummary, hosts
from vfiomgr.listing import first_of
from vfiomgr.snapshot.session import Session, pass_session
from vfiomgr.units import counted

_COLUMNS = (
    *("HOST", cut("GPUS"), "FREE", "USED", "UNKNOWN", "UNAVAILABLE", "VGPUS"),
    *(wrapped("LAYOUT"), "AGE"),
)
_SHOWN = 3
"""Hosts that are named in a line; JSON has all."""


def _complete_layout(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[str]:
    from vfiomgr.layout.commands.changes import complete_layout  # noqa: PLC0415 - slow

    return complete_layout(context, parameter, incomplete)


@click.command("list")
@directories()
@file_option(
    "--with-layout",
    "layout_file",
    text="Compare with the layout in FILE instead of the layouts installed on the hosts.",
)
@click.option(
    "--layout",
    "layout_name",
    metavar="NAME",
    shell_complete=_complete_layout,
    help="Name of the layout, if FILE has several.",
)
@session_options("format")
@pass_session
def list_hosts(
    session: Session, *, places: tuple[str, ...], layout_file: str | None, layout_name: str | None
) -> int:
    """List hosts: GPUs, how many are free, drift, age of the snapshot.

    FREE counts the GPUs that a guest could have entirely when the snapshot was created. UNKNOWN:
    their users cannot be read, e.g. because the snapshot was not created by root. UNAVAILABLE:
    `bind` would refuse them; JSON has the reasons. LAYOUT says how many differences there
    are from the installed layout, or from the one in FILE; unknown if the snapshot lacks a fact for
    that, e.g. of the IOMMU.

    Exit status: 1 if a file cannot be read as a snapshot, otherwise 0.

    \b
    Examples:
      vfiomgr fleet list snapshots
      vfiomgr fleet list snapshots --with-layout fleet.yaml --layout kata-node
      vfiomgr fleet list snapshots --format json
    """
    if layout_name is not None and layout_file is None:
        forbid_alone("--layout", "--with-layout", "it chooses a layout of the file")
    fleet = hosts_of(places)
    known = fleet.hosts
    if layout_file is not None:
        known = _compared(places, known, layout_file, layout_name)
    if session.format == "table":
        print_table(_COLUMNS, [_row(host) for host in known])
        unknown = [f"{host.name}: {host.drift_unknown}" for host in known if host.drift_unknown]
        shown, more = first_of(unknown, _SHOWN)
        for text in (*shown, *more):
            note(f"drift unknown: {text}")
        note(_totals(fleet))
    else:
        body = {"items": known, "unreadable": fleet.unreadable, "outdated": fleet.outdated}
        print_document("FleetHostList", body, session.format)
    return 1 if fleet.unreadable else 0


def _compared(
    places: tuple[str, ...], known: Sequence[HostSummary], file: str, name: str | None
) -> tuple[HostSummary, ...]:
    """The hosts with their drift from the layout in a file."""
    from vfiomgr.fleet.summary import Drift, drift_of, layout_in  # noqa: PLC0415 - slow

    text, source = text_of(file, "the layout file"), source_of(file)
    chosen, _ = layout_in(text, source, name)
    derive = partial(drift_of, text, source, name)
    digest = sha256(f"{name}\\n{text}".encode()).hexdigest()
    drift = read_fleet(places, "drift", Drift, derive, on_note=silent, of_what=digest)
    by_path = {one.path: (one.drift, one.drift_unknown) for one in drift.hosts}
    found = ((host, *by_path.get(host.path, (None, "the file changed"))) for host in known)
    return tuple(
        replace(host, layout=chosen, drift=differs, drift_unknown=why)
        for host, differs, why in found
    )


def _row(host: HostSummary) -> list[str]:
    counts = map(host.count, STATES)
    vgpus = sum(gpu.vgpus for gpu in host.gpus)
    cells = (*map(str, counts), str(vgpus), _layout(host), age(host.time))
    return [host.name, host.models or "-", *cells]


def _layout(host: HostSummary) -> str:
    """`kata-node: 2 differences`."""
    if host.drift_unknown is not None:
        return f"{host.layout}: unknown" if host.layout else "unknown"
    if host.drift is None:
        return or_dash(host.layout)
    return f"{host.layout}: {counted(len(host.drift), 'difference') if host.drift else 'matches'}"


def _totals(fleet: Fleet[HostSummary]) -> str:
    gpus = sum(len(host.gpus) for host in fleet.hosts)
    told = ", ".join(f"{sum(h.count(s) for h in fleet.hosts)} {s}" for s in STATES)
    unknown = f"; {counted(len(fleet.unreadable), 'unreadable file')}" if fleet.unreadable else ""
    return f"{hosts(len(fleet.hosts))}, {counted(gpus, 'GPU')}: {told}{unknown}"


@click.command("check")
@directories()
@strict_option()
@session_options("format")
@pass_session
def check(session: Session, *, places: tuple[str, ...], strict: bool) -> int:
    """Run the rules of `vfiomgr check` on each host; summarize by rule.

    Exit status: 1 for a blocker on any host, or a file that cannot be read as a snapshot; with
    --strict also if a fact that decides the result of a host is unknown.

    \b
    Examples:
      vfiomgr fleet check snapshots
      vfiomgr fleet check snapshots --format json
      vfiomgr check --snapshot snapshots/gpu07.json    # the findings of one host in detail
    """
    fleet = read_fleet(places, "check", HostReport, report_of)
    rules = by_rule(fleet.hosts)
    unknown = {one.name: one.unknown for one in fleet.hosts if one.unknown}
    if session.format == "table":
        columns = ("SEVERITY", "RULE", "HOSTS", wrapped("ON"), wrapped("FINDING"))
        rows = [[r.severity, r.rule, str(len(r.hosts)), _named(r.hosts), r.summary] for r in rules]
        print_table(columns, rows)
        for text in dict.fromkeys(text for texts in unknown.values() for text in texts):
            of = [name for name, texts in unknown.items() if text in texts]
            note(f"unknown on {_named(of)}: {text}")
        blocked = {name for r in rules if r.severity == "blocker" for name in r.hosts}
        note(f"{hosts(len(fleet.hosts))}: {len(blocked)} with blockers, {len(unknown)} unknown")
    else:
        body = {
            "items": rules,
            "unknown": [{"host": name, "facts": texts} for name, texts in unknown.items()],
            "unreadable": fleet.unreadable,
            "outdated": fleet.outdated,
        }
        print_document("FleetCheck", body, session.format)
    is_blocked = any(rule.severity == "blocker" for rule in rules)
    return 1 if is_blocked or fleet.unreadable or (strict and unknown) else 0


def _named(names: Sequence[str]) -> str:
    shown, more = first_of(names, _SHOWN)
    return ", ".join((*shown, *more))


@click.command("diff")
@click.argument("before", shell_complete=complete_file)
@click.argument("after", shell_complete=complete_file)
@session_options("format")
@pass_session
def diff(session: Session, *, before: str, after: str) -> int:
    """Show what differs between two snapshots, or two directories.

    Hosts of two directories are compared by their names. If BEFORE is a file and AFTER a directory,
    each host is compared with the one in the file. Compared are kernel, programs, modules, memory,
    layouts, and the driver, IDs, links and settings of devices; not users, not what changes by
    itself, and not what is unknown in one of the snapshots.

    Exit status: 1 if something differs, a host is missing, or a file cannot be read as a snapshot.

    \b
    Examples:
      vfiomgr fleet diff before after
      vfiomgr fleet diff snapshots/gpu01.json snapshots
    """
    tell = once()
    old = read_fleet((before,), "inventory", Inventory, inventory, on_note=tell)
    new = read_fleet((after,), "inventory", Inventory, inventory, on_note=tell)
    pairs, missing, added = _paired(old, new, is_reference=not os.path.isdir(before))
    found = differences(pairs)
    unreadable = (*old.unreadable, *new.unreadable)
    if session.format == "table":
        rows = [
            [d.what, or_dash(d.before), or_dash(d.after), str(len(d.hosts)), _named(d.hosts)]
            for d in found
        ]
        columns = ("WHAT", wrapped("BEFORE"), wrapped("AFTER"), "HOSTS", wrapped("ON"))
        if rows:
            print_table(columns, rows)
        else:
            say(f"no differences on {hosts(len(pairs))}")
        for text, names in (("only in BEFORE", missing), ("only in AFTER", added)):
            if names:
                note(f"{text}: {_named(names)}")
    else:
        body = {"items": found, "missing": missing, "added": added, "unreadable": unreadable}
        print_document("FleetDiff", body, session.format)
    return 1 if found or missing or added or unreadable else 0


def _paired(
    old: Fleet[Inventory], new: Fleet[Inventory], *, is_reference: bool
) -> tuple[list[tuple[Inventory, Inventory]], list[str], list[str]]:
    """The hosts to compare, and the names of those that only one side has."""
    if not (old.hosts and new.hosts):
        message = "nothing to compare: no readable snapshot"
        raise UsageError(message, "create one on each host: vfiomgr snapshot > HOST.json")
    if is_reference:
        first = old.hosts[0]
        of_first = os.path.realpath(first.path)
        others = [one for one in new.hosts if os.path.realpath(one.path) != of_first]
        if not others:
            message = "nothing to compare: AFTER has no other snapshot than BEFORE"
            raise UsageError(message, "name another snapshot, or a directory")
        return [(first, one) for one in others], [], []
    before = {one.name: one for one in old.hosts}
    after = {one.name: one for one in new.hosts}
    both = [(before[name], after[name]) for name in before if name in after]
    return both, [n for n in before if n not in after], [n for n in after if n not in before]
