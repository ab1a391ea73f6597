"""`vfiomgr cdi remove`."""

from __future__ import annotations

import click

from vfiomgr.cli.change import plan_or_apply, print_outcome
from vfiomgr.cli.session import Session, session_options
from vfiomgr.errors import UsageError
from vfiomgr.model.intent import RemoveCdi


@click.command("remove")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--kind", metavar="VENDOR/CLASS", help="Devices of this kind alone.")
@click.option("--all", "every", is_flag=True, help="Remove all that vfiomgr wrote.")
@click.option("--stale", is_flag=True, help="Remove what no guest could have now.")
@session_options()
@click.pass_obj
def remove(
    session: Session, *, names: tuple[str, ...], kind: str | None, every: bool, stale: bool
) -> None:
    """Take devices out of the specifications that vfiomgr wrote, by NAME or VENDOR/CLASS=NAME.

    A file that loses its last device is removed. Specifications of others are left alone. The
    devices themselves stay as they are.

    \b
    Examples:
      vfiomgr cdi remove nvidia.com/pgpu=0000:04:00.0
      vfiomgr cdi remove --stale
      vfiomgr cdi remove --all --kind nvidia.com/pgpu
    """
    if bool(names) + every + stale != 1:
        message = "name devices, or pass either --all or --stale"
        raise UsageError(message, "vfiomgr cdi list shows them")
    intent = RemoveCdi(names, of_kind=kind, every=every, stale=stale)
    if stale and session.snapshot is None:
        session.devices()  # where they cannot be listed, all would seem stale
    outcome = plan_or_apply(session, intent, only_files=not stale)
    if outcome is not None:
        steps = outcome.plan.steps if outcome.is_changed else ()
        print_outcome(session, outcome, [f"done: {step.describe()}" for step in steps])
