"""`vfiomgr persist`: what is bound again at each boot and hot-plug."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from vfiomgr.cli.apply import plan_or_apply, print_outcome, update_initramfs_option
from vfiomgr.cli.output import note, or_dash, print_document, print_table
from vfiomgr.cli.session import Session, complete_address, session_options
from vfiomgr.errors import UsageError
from vfiomgr.persistence.plan import of_layout
from vfiomgr.persistence.program import program_for_units
from vfiomgr.persistence.requests import ForgetPersisted, ImportDriverctl

if TYPE_CHECKING:
    from vfiomgr.engine.request import Request
    from vfiomgr.pci.model import PciAddress
    from vfiomgr.persistence.model import PersistedBinding
    from vfiomgr.snapshot.model import HostSnapshot

_HEADINGS = ("ADDRESS", "DRIVER", "OWNER", "DEVICE", "NODES", "NOW")


@click.group("persist")
@session_options()
def persist() -> None:
    """Show and remove what `vfiomgr bind --persist` wrote.

    \b
    Examples:
      vfiomgr persist list
      vfiomgr persist remove 0000:04:00.0
      vfiomgr persist import --dry-run
    """


@persist.command("list")
@session_options()
@click.pass_obj
def list_persisted(session: Session) -> None:
    """List persisted functions, those of an installed layout, and the entries of driverctl.

    \b
    Examples:
      vfiomgr persist list
      vfiomgr persist list --format json
    """
    host = session.scan()
    rows = [*_own_rows(host), *_driverctl_rows(host)]
    if session.format != "table":
        print_document("PersistedList", {"items": rows}, session.format)
    elif rows:
        print_table(_HEADINGS, [_cells(row) for row in rows])
    else:
        note("nothing is persisted: vfiomgr bind --persist does it")


def _own_rows(host: HostSnapshot) -> list[dict[str, object]]:
    return [
        {
            "address": binding.address,
            "driver": binding.driver,
            "owner": "vfiomgr" if of_layout(host, binding.address) is None else "layout",
            "device": _state(host, binding.address, binding),
            "recorded": binding.device,
            "node_owner": binding.owner,
            "driver_now": _driver_now(host, binding.address),
        }
        for binding in host.persisted
    ]


def _driverctl_rows(host: HostSnapshot) -> list[dict[str, object]]:
    return [
        {
            "address": entry.address,
            "driver": entry.driver,
            "owner": "driverctl",
            "device": _state(host, entry.address, None),
            "recorded": None,
            "node_owner": None,
            "driver_now": _driver_now(host, entry.address),
        }
        for entry in host.driverctl_overrides
    ]


def _state(host: HostSnapshot, address: PciAddress, binding: PersistedBinding | None) -> str:
    """`same`, `another`, `absent`, or `unrecorded` where nobody knows which one was meant."""
    present = next((d.identity for d in host.devices if d.address == address), None)
    if present is None:
        return "absent"
    if binding is None:
        return "unrecorded"
    return "same" if binding.is_of(present) else "another"


def _driver_now(host: HostSnapshot, address: PciAddress) -> str | None:
    return next((d.driver for d in host.devices if d.address == address), None)


def _cells(row: dict[str, object]) -> tuple[str, ...]:
    owner = row["node_owner"]
    return (
        str(row["address"]),
        str(row["driver"]),
        str(row["owner"]),
        str(row["device"]),
        or_dash(getattr(owner, "name", None)),
        or_dash(row["driver_now"]),
    )


@persist.command("remove")
@click.argument("addresses", nargs=-1, shell_complete=complete_address)
@click.option(
    "--all", "every", is_flag=True, help="Remove all rules but those of an installed layout."
)
@update_initramfs_option
@session_options()
@click.pass_obj
def remove(
    session: Session, *, addresses: tuple[str, ...], every: bool, update_initramfs: bool
) -> None:
    """Remove rules. Functions stay where they are until `vfiomgr unbind` or the next boot.

    \b
    Examples:
      vfiomgr persist remove 0000:04:00.0 0000:04:00.1
      vfiomgr persist remove --all
    """
    if bool(addresses) == every:
        message = "name the functions, or pass --all"
        raise UsageError(message, "vfiomgr persist list shows them")
    known = session.addresses(addresses)
    _carry_out(session, ForgetPersisted(known, every=every, update_initramfs=update_initramfs))


@persist.command("import")
@update_initramfs_option
@session_options()
@click.pass_obj
def take_over(session: Session, *, update_initramfs: bool) -> None:
    """Take over entries of /etc/driverctl.d that are for VFIO drivers.

    Others stay with driverctl, and so do those whose device is absent: vfiomgr keeps an address
    together with the device that it was recorded for. What an installed layout has stays as well.

    \b
    Examples:
      vfiomgr persist import --dry-run
      vfiomgr persist import
    """
    _carry_out(
        session,
        ImportDriverctl(update_initramfs=update_initramfs, program=program_for_units(session)),
    )


@persist.command("watch")
@session_options()
@click.pass_obj
def watch(session: Session) -> None:
    """Bind persisted functions as they are hot-plugged; runs until it is ended.

    A service of systemd runs this where there is systemd; `bind --persist` writes it.

    \b
    Examples:
      vfiomgr persist watch
    """
    from vfiomgr import api  # noqa: PLC0415 - the other commands only plan

    if session.snapshot is not None or session.tree.root != session.machine.root:
        message = "only the kernel of this machine tells of hot-plugged functions"
        raise UsageError(message, "leave out --root and --snapshot")
    api.watch(session.tree, on_note=note)


def _carry_out(session: Session, intent: Request) -> None:
    outcome = plan_or_apply(session, intent)
    if outcome is not None:
        steps = outcome.plan.steps if outcome.is_changed else ()
        print_outcome(session, outcome, [f"done: {step.describe()}" for step in steps])
