"""`vfiomgr layout install` and `uninstall`: a layout for every boot, and no more."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from vfiomgr.cli.change import (
    not_checked,
    plan_or_apply,
    print_outcome,
    print_plan,
    update_initramfs_option,
)
from vfiomgr.cli.layout_files import source_of, text_of
from vfiomgr.cli.output import note
from vfiomgr.cli.program import program_for_units
from vfiomgr.cli.session import Session, session_options
from vfiomgr.errors import Refusal
from vfiomgr.model.intent import ALLOWANCES, InstallLayout, UninstallLayout

if TYPE_CHECKING:
    from vfiomgr import api
    from vfiomgr.model.intent import Allowance


def add_commands(group: click.Group) -> None:
    """Make these commands part of `vfiomgr layout`."""
    for command in (install, uninstall):
        group.add_command(command)


@click.command("install")
@click.argument("file")
@click.option("--layout", "name", metavar="NAME", help="Which one, where FILE has several.")
@click.option(
    "--allow",
    multiple=True,
    type=click.Choice(ALLOWANCES),
    help="Override a guard, at each boot; in-use holds for now alone.",
)
@click.option("--enforce", is_flag=True, help="Also run `vfiomgr watch --enforce` from boot on.")
@update_initramfs_option
@session_options()
@click.pass_obj
def install(
    session: Session,
    *,
    file: str,
    name: str | None,
    allow: tuple[Allowance, ...],
    enforce: bool,
    update_initramfs: bool,
) -> None:
    """Have this host brought to a layout at each boot; nothing moves now.

    Written are /etc/vfiomgr/layout.yaml, rules of udev for functions that go to guests whole, so
    that no host driver gets them first, and vfiomgr-layout.service, which runs `vfiomgr apply`
    before display managers, libvirt, kubelet and container runtimes start. A layout that this host
    cannot have is refused. Installed again, only what differs is changed.

    \b
    Examples:
      vfiomgr layout install host.yaml
      vfiomgr layout install fleet.yaml --layout kata-node --dry-run
      vfiomgr layout install host.yaml --enforce --update-initramfs
    """
    from vfiomgr.cli.layout_commands import host_for, intent_of  # noqa: PLC0415 - not for schemas

    text = text_of(file, "a layout file")
    wish = intent_of(session, text, source_of(file), name, frozenset(allow))
    intent = InstallLayout(
        wish,
        text,
        enforce=enforce,
        update_initramfs=update_initramfs,
        program=program_for_units(session),
    )
    if session.dry_run:
        host = host_for(session, wish)
        from vfiomgr.planner import plan  # noqa: PLC0415 - not for schemas

        print_plan(session, plan(host, intent), not_checked(host, intent))
        return
    _told(session, plan_or_apply(session, intent), "vfiomgr layout uninstall", layout=wish.name)


@click.command("uninstall")
@update_initramfs_option
@session_options()
@click.pass_obj
def uninstall(session: Session, *, update_initramfs: bool) -> None:
    """Take back what `vfiomgr layout install` wrote: file, rules, units. Devices stay as they are.

    Rules that `bind --persist` had written before are there again.

    \b
    Examples:
      vfiomgr layout uninstall --dry-run
      vfiomgr layout uninstall
    """
    _told(
        session,
        plan_or_apply(session, UninstallLayout(update_initramfs, _program_if_trusted(session))),
    )


def _program_if_trusted(session: Session) -> str | None:
    """For the unit of rules that come back; a layout can be uninstalled without one."""
    try:
        return program_for_units(session)
    except Refusal as refusal:
        note(f"no unit is written: {refusal.message}")
        return None


def _told(session: Session, outcome: api.Outcome | None, undo: str = "", **facts: object) -> None:
    if outcome is None:
        return
    steps = outcome.plan.steps if outcome.is_changed else ()
    print_outcome(session, outcome, [f"done: {step.describe()}" for step in steps], **facts)
    if undo and outcome.is_changed and session.format == "table":
        note(f"undo with: {undo}")
