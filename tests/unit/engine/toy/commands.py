"""The command `vfiomgr toy-label`."""

from __future__ import annotations

import click

from tests.unit.engine.toy.requests import Label
from vfiomgr.cli.options import session_options
from vfiomgr.engine.changes import plan_or_apply, print_outcome
from vfiomgr.snapshot.session import Session, pass_session


@click.command("toy-label")
@click.argument("address")
@click.argument("label")
@session_options()
@pass_session
def toy_label(session: Session, address: str, label: str) -> None:
    """Put a label on a device."""
    (device,) = session.addresses((address,))
    outcome = plan_or_apply(session, Label(device, label))
    if outcome is not None:
        print_outcome(session, outcome, [f"{address}: {label}"])
