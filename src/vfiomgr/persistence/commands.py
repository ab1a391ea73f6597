"""Persistent bindings, as other commands show and change them, and `vfiomgr persist watch`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from vfiomgr.cli.changes import plan_or_apply, print_outcome
from vfiomgr.cli.options import CHANGING, READING, LazyGroup, session_options
from vfiomgr.cli.output import note, or_dash, print_document, print_table
from vfiomgr.cli.session import Session, pass_session
from vfiomgr.errors import UsageError
from vfiomgr.passthrough.watch import watch_machine
from vfiomgr.persistence.named import persisted
from vfiomgr.persistence.program import program_for_units
from vfiomgr.persistence.steps import ForgetPersisted, ImportDriverctl

if TYPE_CHECKING:
    from vfiomgr.engine.plan import Request
    from vfiomgr.persistence.named import PersistedFunction

_HEADINGS = ("ADDRESS", "DRIVER", "OWNER", "DEVICE", "NODES", "NOW")


_FORMER = {
    "remove": "unbind --forget-only",
    "import": "bind --persist --driverctl",
}


@click.group("persist", cls=LazyGroup, table={}, unlisted=_FORMER)
def persist() -> None:
    """Bind persisted functions as they are hot-plugged: see `vfiomgr bind --persist`."""


@persist.command("list", hidden=True)
@session_options(*READING)
@pass_session
def list_persisted(session: Session) -> None:
    """List persistent bindings: now `vfiomgr list --persistent`."""
    rows = persisted(session)
    if session.format != "table":
        print_document("PersistedList", {"items": rows}, session.format)
    elif rows:
        print_table(_HEADINGS, [_cells(row) for row in rows])
    else:
        note("no persistent bindings; create one with: vfiomgr bind --persist ADDRESS")


def _cells(row: PersistedFunction) -> tuple[str, ...]:
    return (
        str(row.address),
        row.driver,
        row.owner,
        row.device,
        or_dash(None if row.node_owner is None else row.node_owner.name),
        or_dash(row.driver_now),
    )


def forget_only(
    session: Session, addresses: tuple[str, ...], *, every: bool, update_initramfs: bool
) -> None:
    """Remove the rules of functions, or all, and leave the drivers as they are."""
    if bool(addresses) == every:
        message = "expected addresses, or --all"
        raise UsageError(message, "list persistent bindings with: vfiomgr list --persistent")
    known = session.addresses(addresses)
    _carry_out(session, ForgetPersisted(known, every=every, update_initramfs=update_initramfs))


def import_driverctl(session: Session, *, update_initramfs: bool) -> None:
    """Import VFIO entries from /etc/driverctl.d as rules."""
    _carry_out(
        session,
        ImportDriverctl(update_initramfs=update_initramfs, program=program_for_units(session)),
    )


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
    watch_machine(session)


def _carry_out(session: Session, request: Request) -> None:
    outcome = plan_or_apply(session, request)
    if outcome is not None:
        steps = outcome.plan.steps if outcome.is_changed else ()
        print_outcome(session, outcome, [step.describe() for step in steps])
