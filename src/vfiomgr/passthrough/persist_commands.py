"""Bindings for each boot on the command line: their list, their rules, and their service."""

from __future__ import annotations

import click

from vfiomgr import passthrough
from vfiomgr.cli.garbage import collect_as_usual
from vfiomgr.cli.options import CHANGING, session_options
from vfiomgr.cli.output import note, or_dash, print_document, print_table
from vfiomgr.engine.changes import change
from vfiomgr.errors import UsageError
from vfiomgr.passthrough.reserve import Reserve
from vfiomgr.persistence.named import PersistedFunction, persisted, program_for_units
from vfiomgr.persistence.steps import ForgetPersisted, ImportDriverctl
from vfiomgr.snapshot.session import Session, pass_session

_PERSISTED_HEADINGS = ("ADDRESS", "DRIVER", "OWNER", "DEVICE", "NODES", "RESERVED", "NOW")


_PRESENCE = {
    "another": "a different device is at this address",
    "unrecorded": "unknown (the rule does not name it)",
}
"""The text in the column DEVICE, instead of the word in JSON."""


@click.group("persist")
def persist() -> None:
    """Bind persisted functions as they are hot-plugged; run by a service.

    Bindings are created by `vfiomgr bind --persist`, listed by `vfiomgr list --persistent`, and
    removed by `vfiomgr unbind --forget` or `--forget-only`.
    """


def print_persisted(session: Session) -> None:
    """Print the persistent bindings, and the reserved cards."""
    rows = persisted(session)
    if session.format != "table":
        print_document("PersistedList", {"items": rows}, session.format)
    elif rows:
        print_table(_PERSISTED_HEADINGS, [_persisted_cells(row) for row in rows])
    else:
        note("no persistent bindings; create one with: vfiomgr bind --persist ADDRESS")


def _persisted_cells(row: PersistedFunction) -> tuple[str, ...]:
    return (
        str(row.address),
        or_dash(row.driver),
        row.owner,
        _PRESENCE.get(row.device, row.device),
        or_dash(None if row.node_owner is None else row.node_owner.name),
        "yes" if row.reserved else "-",
        f"{row.driver_now} until reboot" if row.is_pending else or_dash(row.driver_now),
    )


def remove_rules(
    session: Session, addresses: tuple[str, ...], *, every: bool, update_initramfs: bool
) -> None:
    """Remove the rules of functions, or all, and leave the drivers as they are."""
    if bool(addresses) == every:
        message = "expected addresses, or --all"
        raise UsageError(message, "list persistent bindings with: vfiomgr list --persistent")
    known = session.addresses(addresses)
    change(session, ForgetPersisted(known, every=every, update_initramfs=update_initramfs))


def import_driverctl(session: Session, *, update_initramfs: bool) -> None:
    """Import VFIO entries from /etc/driverctl.d as rules."""
    program = program_for_units(session)
    change(session, ImportDriverctl(update_initramfs=update_initramfs, program=program))


def reserve_cards(session: Session, addresses: tuple[str, ...]) -> None:
    """Keep compositors off cards, and leave their drivers as they are."""
    request = Reserve(session.addresses(addresses))
    outcome = change(session, request)
    if outcome is not None and outcome.is_changed and session.format == "table":
        names = " ".join(map(str, request.addresses))
        note(f"undo with: vfiomgr unbind {names} --forget-only")


@persist.command("watch", hidden=True)
@session_options(*CHANGING)
@pass_session
def watch(session: Session) -> None:
    """Bind persisted functions as they are hot-plugged.

    Runs until interrupted. With systemd, `bind --persist` installs a service that runs it.

    \b
    Examples:
      vfiomgr persist watch
    """
    collect_as_usual()
    passthrough.watch_machine(session)
