"""The commands `vfiomgr fleet`."""

from __future__ import annotations

import click

from vfiomgr.cli.options import LazyGroup

_COMMANDS = {
    "list": ("vfiomgr.fleet.commands.reading", "list_hosts"),
    "check": ("vfiomgr.fleet.commands.reading", "check"),
    "diff": ("vfiomgr.fleet.commands.reading", "diff"),
    "place": ("vfiomgr.fleet.commands.placing", "place"),
    "drain": ("vfiomgr.fleet.commands.placing", "drain"),
    "export": ("vfiomgr.fleet.commands.exporting", "export"),
}


@click.group("fleet", cls=LazyGroup, table=_COMMANDS)
def fleet() -> None:
    """Answer questions about many hosts from a directory of snapshots.

    Create a snapshot on each host, as root, and collect the files in a directory:
    vfiomgr snapshot > HOST.json. Files may be compressed with gzip (.json.gz). Of several
    snapshots of a host the newest counts. Nothing on a host is read or changed.

    What is read is kept in an index in the user's cache directory. Only files that changed are read
    again.
    """
