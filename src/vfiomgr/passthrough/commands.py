"""`vfiomgr bind` and `vfiomgr unbind`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from vfiomgr.cli.changes import confirm, plan_or_apply, print_outcome, update_initramfs_option
from vfiomgr.cli.completion import complete_address, complete_owner, complete_vfio_driver
from vfiomgr.cli.options import CHANGING, function_only_option, session_options
from vfiomgr.cli.output import note
from vfiomgr.cli.session import Session, pass_session
from vfiomgr.diagnostic import OVERRIDES, Override
from vfiomgr.errors import UsageError
from vfiomgr.passthrough.named import Bind, Reset, Unbind, is_kept, moved_functions
from vfiomgr.pci.reset_capabilities import RESET_METHODS, ResetMethod

if TYPE_CHECKING:
    from vfiomgr.engine.run import Outcome


_match_option = click.option(
    "--match", metavar="NAME", help="The only device with a name like this, e.g. A40."
)


def _chosen(session: Session, addresses: tuple[str, ...], match: str | None) -> tuple[str, ...]:
    """The devices that are meant, as they are named on the command line."""
    if match is not None:
        return (*addresses, session.matching(match))
    if not addresses:
        message = "missing argument: ADDRESS"
        raise UsageError(message, "vfiomgr list lists the addresses of GPUs and accelerators")
    return addresses


@click.command("bind")
@click.argument("addresses", nargs=-1, metavar="ADDRESS...", shell_complete=complete_address)
@_match_option
@click.option(
    "--driver",
    metavar="NAME",
    shell_complete=complete_vfio_driver,
    help="VFIO driver.  [default: the variant that fits, or vfio-pci]",
)
@function_only_option("Leave the other functions of the slot alone.")
@click.option("--with-group", is_flag=True, help="Take foreign members of the IOMMU group too.")
@click.option(
    "--allow",
    multiple=True,
    type=click.Choice(OVERRIDES),
    help="Override a guard; a refusal names the one.",
)
@click.option(
    "--reset-method",
    type=click.Choice(RESET_METHODS),
    help="Reset the named functions by this alone, until unbind.",
)
@click.option("--no-d3cold", is_flag=True, help="Keep the functions out of D3cold, until unbind.")
@click.option("--persist", is_flag=True, help="Bind it again at each boot and hot-plug.")
@click.option(
    "--owner",
    metavar="USER[:GROUP]",
    shell_complete=complete_owner,
    help="Who may open the VFIO nodes besides root.",
)
@update_initramfs_option
@session_options(*CHANGING, "yes")
@pass_session
def bind(
    session: Session,
    *,
    addresses: tuple[str, ...],
    match: str | None,
    driver: str | None,
    only: bool,
    with_group: bool,
    allow: tuple[Override, ...],
    reset_method: ResetMethod | None,
    no_d3cold: bool,
    persist: bool,
    owner: str | None,
    update_initramfs: bool,
) -> None:
    """Hand devices to guests: bind all functions of their slots to vfio-pci.

    A GPU's audio function comes along. What they were bound to is recorded, and `vfiomgr unbind`
    gives it back exactly. Nothing is left half done: a failure is rolled back.

    \b
    Examples:
      vfiomgr bind 0000:04:00.0
      vfiomgr bind 04:00.0 --dry-run
      vfiomgr bind 04:00.0 --persist --owner libvirt-qemu:kvm
      vfiomgr bind 0000:04:00.0 0000:05:00.0 --format json
      vfiomgr bind 0000:04:00.0 --reset-method flr --no-d3cold
      vfiomgr bind 10de:2684            # all devices with these PCI IDs
      vfiomgr bind --match "RTX 4090"
    """
    addresses = _chosen(session, addresses, match)
    request = Bind(
        *addresses,
        driver=driver,
        only=only,
        with_group=with_group,
        allow=allow,
        reset_method=reset_method,
        no_d3cold=no_d3cold,
        persist=persist,
        owner=owner,
        update_initramfs=update_initramfs,
    ).request(session)
    if allow:
        confirm(session, f"Override the guard {', '.join(allow)} for {', '.join(addresses)}?")
    outcome = plan_or_apply(session, request)
    if outcome is None:
        return
    _print_moved(session, outcome)
    if outcome.is_changed and session.format == "table":
        names = " ".join(str(address) for address in request.addresses)
        whole = " --with-group" * with_group + " --forget" * persist
        note(f"undo with: vfiomgr unbind {names}{whole}")
        if not persist and not is_kept(session, request.addresses):
            note(f"until reboot; keep it with: vfiomgr bind --persist {names}")


@click.command("unbind")
@click.argument("addresses", nargs=-1, metavar="ADDRESS...", shell_complete=complete_address)
@_match_option
@function_only_option("Leave the other functions of the slot alone.")
@click.option("--with-group", is_flag=True, help="Give back the whole IOMMU group.")
@click.option(
    "--allow",
    multiple=True,
    type=click.Choice(["in-use"]),
    help="Try it although a guest holds the device: see --timeout.",
)
@click.option("--forget", is_flag=True, help="Remove what bind --persist wrote, too.")
@update_initramfs_option
@session_options(*CHANGING, "yes")
@pass_session
def unbind(
    session: Session,
    *,
    addresses: tuple[str, ...],
    match: str | None,
    only: bool,
    with_group: bool,
    allow: tuple[Override, ...],
    forget: bool,
    update_initramfs: bool,
) -> None:
    """Give devices back to the host: the driver and driver_override that they had.

    \b
    Examples:
      vfiomgr unbind 0000:04:00.0
      vfiomgr unbind 04:00.0 --dry-run
      vfiomgr unbind 04:00.0 --forget
    """
    addresses = _chosen(session, addresses, match)
    request = Unbind(
        *addresses,
        only=only,
        with_group=with_group,
        allow=allow,
        forget=forget,
        update_initramfs=update_initramfs,
    ).request(session)
    if allow:
        confirm(session, f"Override the guard {', '.join(allow)} for {', '.join(addresses)}?")
    outcome = plan_or_apply(session, request)
    if outcome is not None:
        _print_moved(session, outcome)


def _print_moved(session: Session, outcome: Outcome) -> None:
    moved = moved_functions(session, outcome)
    lines = [
        f"{one.address} is on {one.driver or 'no driver'}"
        + (f", guests open {one.node}" if one.node else "")
        for one in moved
    ]
    print_outcome(session, outcome, lines, devices=moved)


@click.command("reset")
@click.argument("address", shell_complete=complete_address)
@click.option(
    "--method", type=click.Choice(RESET_METHODS), help="One way of resetting, for this time alone."
)
@click.option(
    "--allow",
    multiple=True,
    type=click.Choice(OVERRIDES),
    help="Override a guard; a refusal names the one.",
)
@session_options(*CHANGING, "yes")
@pass_session
def reset(
    session: Session, *, address: str, method: ResetMethod | None, allow: tuple[Override, ...]
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
    request = Reset(address, method, allow).request(session)
    if allow:
        confirm(session, f"Override the guard {', '.join(allow)} for {request.address}?")
    outcome = plan_or_apply(session, request)
    if outcome is not None:
        print_outcome(session, outcome, [f"{request.address} was reset, and answers as before"])
