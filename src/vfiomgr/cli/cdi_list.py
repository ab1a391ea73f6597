"""`vfiomgr cdi list`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from vfiomgr.cli.cdi_files import present_nodes
from vfiomgr.cli.output import note, or_dash, print_document, print_table
from vfiomgr.cli.session import Session, session_options

if TYPE_CHECKING:
    from vfiomgr.planner.cdi.listing import CdiEntry

_HEADINGS = ("NAME", "STATE", "NODES", "GROUP", "FUNCTIONS", "FILE", "OWN")


@click.command("list")
@session_options()
@click.pass_obj
def list_devices(session: Session) -> None:
    """List the CDI devices in /etc/cdi and /run/cdi, and what each leads to on this host.

    /run/cdi is what consumers call /var/run/cdi. STATE is ready, stale (no guest could have it),
    missing (a node is not there), conflict (the name is there twice, so that nobody gets it),
    shadowed (another directory counts), unread (no consumer reads such a file) or unknown.

    \b
    Examples:
      vfiomgr cdi list
      vfiomgr cdi list --format json
    """
    from vfiomgr.model.cdi_document import (  # noqa: PLC0415 - not for help
        is_readable,
        read_quickly,
    )
    from vfiomgr.planner.cdi.listing import entries  # noqa: PLC0415

    host = session.host_or_image()
    found = list(entries(host, present_nodes(session, host, host.cdi_files) or {}))
    if session.format != "table":
        print_document("CdiDeviceList", {"items": found}, session.format)
    elif found:
        print_table(_HEADINGS, [_cells(entry) for entry in found])
    for entry in found:
        if entry.problem is not None and session.format == "table":
            note(f"{entry.name}: {entry.problem}")
    for file in host.cdi_files:
        if not is_readable(read_quickly(file)):
            note(f"{file.path} is no specification: vfiomgr cdi check tells why")
    if not found:
        note("there is no CDI device: vfiomgr cdi generate --write makes them of what is bound")


def _cells(entry: CdiEntry) -> tuple[str, ...]:
    groups = dict.fromkeys(n.iommu_group for n in entry.nodes if n.iommu_group is not None)
    functions = [f"{f.address} ({f.driver or '-'})" for node in entry.nodes for f in node.functions]
    vgpus = [name for node in entry.nodes for name in node.vgpus]
    return (
        entry.name,
        entry.state,
        or_dash(" ".join(node.path for node in entry.nodes)),
        or_dash(" ".join(map(str, groups))),
        or_dash(", ".join(dict.fromkeys((*functions, *vgpus)))),
        entry.file,
        "yes" if entry.is_own else "no",
    )
