"""`vfiomgr reset`."""

from __future__ import annotations

import click

from vfiomgr.cli.change import confirm, plan_or_apply, print_outcome
from vfiomgr.cli.session import Session, complete_address, session_options
from vfiomgr.model.intent import ALLOWANCES, Allowance, Reset
from vfiomgr.model.reset import RESET_METHODS, ResetMethod


@click.command("reset")
@click.argument("address", shell_complete=complete_address)
@click.option(
    "--method", type=click.Choice(RESET_METHODS), help="One way of resetting, for this time alone."
)
@click.option(
    "--allow",
    multiple=True,
    type=click.Choice(ALLOWANCES),
    help="Override a guard; a refusal names the one.",
)
@session_options()
@click.pass_obj
def reset(
    session: Session, *, address: str, method: ResetMethod | None, allow: tuple[Allowance, ...]
) -> None:
    """Reset a device, and look whether it answers as before.

    The kernel tries the methods of reset_method in turn; `vfiomgr show` tells which there are, and
    why others are not. --method takes one, and reset_method is as it was afterwards.

    \b
    Examples:
      vfiomgr reset 0000:04:00.0
      vfiomgr reset 04:00.0 --method flr
      vfiomgr reset 04:00.0 --method bus --dry-run
    """
    (chosen,) = session.addresses((address,))
    if allow:
        confirm(session, f"Override the guard {', '.join(allow)} for {chosen}?")
    outcome = plan_or_apply(session, Reset(chosen, method, frozenset(allow)))
    if outcome is not None:
        print_outcome(session, outcome, [f"{chosen} was reset, and answers as before"])
