"""The commands below `vfiomgr persist`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from vfiomgr.cli.changes import plan_or_apply, print_outcome, update_initramfs_option
from vfiomgr.cli.completion import complete_address
from vfiomgr.cli.options import CHANGING, READING, session_options
from vfiomgr.cli.output import note, or_dash, print_document, print_table
from vfiomgr.cli.session import Session, pass_session
from vfiomgr.errors import UsageError
from vfiomgr.passthrough.watch import watch_machine
from vfiomgr.persistence.named import persisted
from vfiomgr.persistence.program import program_for_units
from vfiomgr.persistence.requests import ForgetPersisted, ImportDriverctl

if TYPE_CHECKING:
    from vfiomgr.engine.request import Request
    from vfiomgr.persistence.named import PersistedFunction

_HEADINGS = ("ADDRESS", "DRIVER", "OWNER", "DEVICE", "NODES", "NOW")


@click.group("persist")
def persist() -> None:
    """List, remove and import persistent bindings.

    \b
    Examples:
      vfiomgr persist list
      vfiomgr persist remove 0000:04:00.0
      vfiomgr persist import --dry-run
    """


@persist.command("list")
@session_options(*READING)
@pass_session
def list_persisted(session: Session) -> None:
    """List persistent bindings.

    Bindings of an installed layout and of driverctl are included.

    \b
    Examples:
      vfiomgr persist list
      vfiomgr persist list --format json
    """
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


@persist.command("remove")
@click.argument("addresses", nargs=-1, shell_complete=complete_address)
@click.option("--all", "every", is_flag=True, help="Remove all rules except those of a layout.")
@update_initramfs_option
@session_options(*CHANGING)
@pass_session
def remove(
    session: Session, *, addresses: tuple[str, ...], every: bool, update_initramfs: bool
) -> None:
    """Remove persistent bindings.

    Functions keep their drivers until `vfiomgr unbind` or the next boot.

    \b
    Examples:
      vfiomgr persist remove 0000:04:00.0 0000:04:00.1
      vfiomgr persist remove --all
    """
    if bool(addresses) == every:
        message = "expected addresses, or --all"
        raise UsageError(message, "list persistent bindings with: vfiomgr persist list")
    known = session.addresses(addresses)
    _carry_out(session, ForgetPersisted(known, every=every, update_initramfs=update_initramfs))


@persist.command("import")
@update_initramfs_option
@session_options(*CHANGING)
@pass_session
def take_over(session: Session, *, update_initramfs: bool) -> None:
    """Import VFIO entries from /etc/driverctl.d.

    Other entries stay with driverctl, as do entries of absent devices (vfiomgr records the identity
    of each device) and of devices in an installed layout.

    \b
    Examples:
      vfiomgr persist import --dry-run
      vfiomgr persist import
    """
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
