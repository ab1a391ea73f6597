"""`vfiomgr fleet export`."""

from __future__ import annotations

import os

import click

from vfiomgr.cli.options import complete_directory, session_options
from vfiomgr.cli.output import note, print_document, say
from vfiomgr.fleet.commands.common import directories, once, snapshots_in, summarized
from vfiomgr.fleet.exporting import export as exported
from vfiomgr.fleet.index import Index
from vfiomgr.fleet.model import HostSummary, Unreadable
from vfiomgr.snapshot.redaction import Redaction
from vfiomgr.snapshot.session import Session, pass_session
from vfiomgr.units import counted


@click.command("export")
@directories()
@click.option(
    "--output",
    required=True,
    metavar="DIR",
    shell_complete=complete_directory,
    help="Write to this directory, which is empty or does not exist.",
)
@click.option(
    "--redact/--no-redact",
    default=True,
    help="Replace serial numbers, UUIDs, addresses and names.  [default: redact]",
)
@session_options("format")
@pass_session
def export(session: Session, *, places: tuple[str, ...], output: str, redact: bool) -> int:
    """Write redacted snapshots for others.

    What identifies machines and persons is replaced as by `vfiomgr snapshot --redact`. Equal values
    get equal replacements in all files of one export, so that `fleet diff` finds the same: name all
    directories at once. Files are named after the replaced hosts. Several directories become
    subdirectories with their names, or with numbers if their names contain those of hosts.

    \b
    Examples:
      vfiomgr fleet export snapshots --output for-support
      vfiomgr fleet export before after --output for-support
      vfiomgr fleet export snapshots --output copy --no-redact
    """
    found: list[tuple[str, str, str]] = []
    unreadable = []
    tell = once()
    for place in places:
        is_below = len(places) > 1 and os.path.isdir(place)
        below = os.path.basename(os.path.abspath(place)) if is_below else ""
        for path, one in Index("summary", HostSummary, summarized, tell).of(snapshots_in([place])):
            if isinstance(one, Unreadable):
                note(f"not exported: {one.why}")
                unreadable.append(one)
            else:
                found.append((path, below, one.name))
    redaction = Redaction(name for _, _, name in found) if redact else None
    if redact:
        numbered = _numbered({below for _, below, _ in found}, {name for _, _, name in found})
        found = [(path, numbered.get(below, below), name) for path, below, name in found]
    written = exported(found, output, redaction)
    if session.format == "table":
        say(f"wrote {counted(len(written), 'snapshot')} to {output}")
    else:
        print_document("FleetExport", {"files": written, "unreadable": unreadable}, session.format)
    if redact:
        note("comments and descriptions in files stay as they are: read them before you publish")
    return 1 if unreadable else 0


def _numbered(directories: set[str], hosts: set[str]) -> dict[str, str]:
    """`directory-1` for each directory whose name contains that of a host."""
    short = {name.partition(".")[0] for name in hosts} - {""}
    naming = (one for one in sorted(directories) if any(name in one for name in short))
    return {one: f"directory-{number}" for number, one in enumerate(naming, start=1)}
