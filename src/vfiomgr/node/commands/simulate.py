"""`vfiomgr node simulate`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Unpack

import click

from vfiomgr.cli.options import complete_file, declared, file_option, flag, session_options
from vfiomgr.cli.output import note, print_document, print_table, say
from vfiomgr.cli.reports import say_unknown, strict_option
from vfiomgr.cli.table import wrapped
from vfiomgr.documents.text import source_of, text_of
from vfiomgr.errors import forbid_alone
from vfiomgr.host.installation import optional
from vfiomgr.layout.commands.changes import complete_layout
from vfiomgr.node.commands.run import NamingOptions, node_settings
from vfiomgr.node.simulation.model import document_of, lines_about, node_rows, pod_rows
from vfiomgr.snapshot.session import Session, pass_session

if TYPE_CHECKING:
    from vfiomgr.layout.model import Layout
    from vfiomgr.node.simulation.model import SimulationResult

_PODS = ("POD", "NODE", wrapped("DEVICES"))
_NODES = ("NODE", "PODS", "USED", "USED BEFORE", "FREE")


@click.command("simulate")
@click.argument("nodes", metavar="NODE...", nargs=-1, required=True, shell_complete=complete_file)
@click.option(
    "--pods",
    "file",
    metavar="FILE",
    required=True,
    shell_complete=complete_file,
    help="Place the pods in FILE, with its claims and classes.",
)
@file_option(
    "--with-layout",
    "layout_file",
    text="The layout of the nodes: resources, and devices that claims bind.",
)
@click.option(
    "--layout",
    "layout_name",
    metavar="NAME",
    shell_complete=complete_layout,
    help="Name of the layout, if FILE has several.",
)
@flag(
    "--compatibility-groups",
    "has_groups",
    text="The cluster has the feature gate DRADeviceCompatibilityGroups (Kubernetes 1.37).",
)
@flag("--allow-pending", text="Exit with status 0 even if pods stay pending.")
@strict_option()
@declared(NamingOptions)
@session_options("format")
@pass_session
def simulate(
    session: Session,
    *,
    nodes: tuple[str, ...],
    file: str,
    layout_file: str | None,
    layout_name: str | None,
    has_groups: bool,
    allow_pending: bool,
    strict: bool,
    **names: Unpack[NamingOptions],
) -> int:
    """Show where pods would run, or why they stay pending.

    NODE is an output of `vfiomgr snapshot`; the node is named after the file. FILE=COPIES stands
    for COPIES equal nodes. Claims are allocated by the rules of Kubernetes' scheduler, and limits
    of device plugins are counted. CPU, memory, affinity and taints of nodes are not simulated; Node
    objects in the pods' file define labels of nodes. FREE is the number of devices that can still
    be allocated at once, the smallest vGPUs first.

    Exit status: 1 if a pod stays pending (without --allow-pending), or with --strict if a snapshot
    lacks facts that decide which devices its node offers.

    \b
    Examples:
      vfiomgr node simulate worker-1.json worker-2.json --pods pods.yaml
      vfiomgr node simulate dgx.json=1000 --pods pods.yaml --format json
      vfiomgr node simulate worker-1.json --pods pods.yaml --with-layout mixed.yaml
    """
    settings = node_settings(names)
    text = text_of(file, "the pods")
    module = optional("vfiomgr.node.simulation.simulate", "simulate", "simulate")
    layout = _layout(layout_file, layout_name)
    result, notes = module.simulation(
        nodes, text, source_of(file), settings, layout, has_groups=has_groups
    )
    if session.format == "table":
        _print(result, notes)
    else:
        print_document("Simulation", document_of(result, notes), session.format)
    is_pending = result.is_blocked and not allow_pending
    return int(is_pending or (strict and bool(result.unknown)))


def _layout(file: str | None, name: str | None) -> Layout | None:
    """The layout of the nodes.

    Raises:
        UsageError: it cannot be read, or a name is missing.
        InvalidDocument: it is malformed.
    """
    if file is None:
        if name is not None:
            forbid_alone("--layout", "--with-layout", "it chooses a layout of the file")
        return None
    chosen: Layout = import_module("vfiomgr.node.layouts").named_layout(file, name)
    return chosen


def _print(result: SimulationResult, notes: tuple[str, ...]) -> None:
    """Print the pods, the nodes with pods, and what needs attention."""
    print_table(_PODS, pod_rows(result))
    if rows := node_rows(result):
        say("")
        print_table(_NODES, rows)
    say_unknown(result.unknown)
    for line in (*notes, *lines_about(result)):
        note(line)
