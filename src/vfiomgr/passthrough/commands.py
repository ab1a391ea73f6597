"""`vfiomgr bind` and `vfiomgr unbind`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from vfiomgr.cli.apply import confirm, plan_or_apply, print_outcome, update_initramfs_option
from vfiomgr.cli.output import note
from vfiomgr.cli.program import program_for_units
from vfiomgr.cli.session import Session, complete_address, session_options
from vfiomgr.cli.usage import forbid_alone, forbid_together
from vfiomgr.diagnostic import ALLOWANCES, Allowance
from vfiomgr.host.accounts import find_owner
from vfiomgr.passthrough.requests import Bind, Reset, Unbind
from vfiomgr.passthrough.steps import ChangeDriver, ReleaseDriver
from vfiomgr.paths import pci_device, vfio_group_node
from vfiomgr.pci.facts import read_driver_state
from vfiomgr.pci.iommu import group_number
from vfiomgr.pci.model import is_vfio_driver
from vfiomgr.pci.reset_capabilities import RESET_METHODS, ResetMethod

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vfiomgr.api import Outcome
    from vfiomgr.host.accounts import NodeOwner
    from vfiomgr.pci.model import PciAddress, PciDevice
    from vfiomgr.snapshot.model import HostSnapshot


@click.command("bind")
@click.argument("addresses", nargs=-1, required=True, shell_complete=complete_address)
@click.option(
    "--driver", metavar="NAME", help="VFIO driver.  [default: the variant that fits, or vfio-pci]"
)
@click.option("--only", is_flag=True, help="Leave the other functions of the slot alone.")
@click.option("--with-group", is_flag=True, help="Take foreign members of the IOMMU group too.")
@click.option(
    "--allow",
    multiple=True,
    type=click.Choice(ALLOWANCES),
    help="Override a guard; a refusal names the one.",
)
@click.option(
    "--reset-method",
    type=click.Choice(RESET_METHODS),
    help="Reset the named functions by this alone, until unbind.",
)
@click.option("--no-d3cold", is_flag=True, help="Keep the functions out of D3cold, until unbind.")
@click.option("--persist", is_flag=True, help="Bind it again at each boot and hot-plug.")
@click.option("--owner", metavar="USER[:GROUP]", help="Who may open the VFIO nodes besides root.")
@update_initramfs_option
@session_options()
@click.pass_obj
def bind(
    session: Session,
    *,
    addresses: tuple[str, ...],
    driver: str | None,
    only: bool,
    with_group: bool,
    allow: tuple[Allowance, ...],
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
    """
    _refuse_contradictions(only=only, with_group=with_group)
    if update_initramfs and not persist:
        forbid_alone("--update-initramfs", "--persist", "no rule is written that it must hold")
    intent = Bind(
        session.addresses(addresses),
        driver=driver,
        only=only,
        with_group=with_group,
        allow=frozenset(allow),
        reset_method=reset_method,
        no_d3cold=no_d3cold,
        persist=persist,
        owner=None if owner is None else _owner(session, owner),
        update_initramfs=update_initramfs,
        program=program_for_units(session) if persist else None,
    )
    if allow:
        confirm(session, f"Override the guard {', '.join(allow)} for {', '.join(addresses)}?")
    outcome = plan_or_apply(session, intent)
    if outcome is None:
        return
    _print_moved(session, outcome)
    if outcome.is_changed and session.format == "table":
        whole = " --with-group" * with_group + " --forget" * persist
        note(f"undo with: vfiomgr unbind {' '.join(str(a) for a in intent.addresses)}{whole}")


@click.command("unbind")
@click.argument("addresses", nargs=-1, required=True, shell_complete=complete_address)
@click.option("--only", is_flag=True, help="Leave the other functions of the slot alone.")
@click.option("--with-group", is_flag=True, help="Give back the whole IOMMU group.")
@click.option(
    "--allow",
    multiple=True,
    type=click.Choice(["in-use"]),
    help="Try it although a guest holds the device: see --deadline.",
)
@click.option("--forget", is_flag=True, help="Remove what bind --persist wrote, too.")
@update_initramfs_option
@session_options()
@click.pass_obj
def unbind(
    session: Session,
    *,
    addresses: tuple[str, ...],
    only: bool,
    with_group: bool,
    allow: tuple[Allowance, ...],
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
    _refuse_contradictions(only=only, with_group=with_group)
    if update_initramfs and not forget:
        forbid_alone("--update-initramfs", "--forget", "the rules that it holds stay")
    intent = Unbind(
        session.addresses(addresses),
        only=only,
        with_group=with_group,
        allow=frozenset(allow),
        forget=forget,
        update_initramfs=update_initramfs,
    )
    if allow:
        confirm(session, f"Override the guard {', '.join(allow)} for {', '.join(addresses)}?")
    outcome = plan_or_apply(session, intent)
    if outcome is not None:
        _print_moved(session, outcome)


def _refuse_contradictions(*, only: bool, with_group: bool) -> None:
    if only and with_group:
        why = "one leaves functions out that share the slot, the other takes all of the group"
        forbid_together("--only", "--with-group", why)


def _owner(session: Session, text: str) -> NodeOwner:
    """Looked up in the host's own tables, of which a snapshot has none."""
    return find_owner(None if session.snapshot is not None else session.tree, text)


def _print_moved(session: Session, outcome: Outcome) -> None:
    moved = [
        _describe(session, step.device.address)
        for step in outcome.plan.steps
        if isinstance(step, ChangeDriver | ReleaseDriver)
    ]
    lines = [
        f"{m['address']} is on {m['driver'] or 'no driver'}"
        + (f", guests open {m['node']}" if m["node"] else "")
        for m in moved
    ]
    print_outcome(session, outcome, lines, devices=moved)


def _describe(session: Session, address: PciAddress) -> dict[str, object]:
    """What came of a function, read again from the host."""
    tree = session.tree
    group = group_number(tree, pci_device(address))
    node = None if group is None else vfio_group_node(group)
    state = read_driver_state(tree, address)
    return {
        "address": address,
        "driver": state.driver,
        "driver_override": state.driver_override,
        "iommu_group": group,
        "node": node if node and is_vfio_driver(state.driver) and tree.exists(node) else None,
    }


MOST = 4
"""Devices that are told of one by one: for each a bind is planned."""


def tell_of_many(devices: Sequence[PciDevice]) -> None:
    """Say where it is told what makes so many devices ready."""
    names = " ".join(str(device.address) for device in devices)
    note(
        f"{len(devices)} functions are not ready for a guest; what makes them so, or speaks "
        f"against it: vfiomgr bind --dry-run {names}"
    )


def tell_how_to_bind(host: HostSnapshot, devices: Iterable[PciDevice]) -> None:
    """Say what makes devices ready for a guest, or what keeps `bind` from it, a line for each."""
    from vfiomgr.passthrough.readiness_hints import objections_to_bind  # noqa: PLC0415 - not for many

    told: set[tuple[str, str]] = set()
    for device in devices:
        if host.is_vendor_function(device):
            create = f"vfiomgr vgpu create --parent {device.address} --type …"
            note(f"{device} is no vGPU yet: {create}")
            continue
        begin = f"{device} is on {device.driver or 'no driver'}"
        objections = objections_to_bind(host, [device])
        for reason, remedy in (o for o in objections if o not in told):
            shown = reason.replace(f"{device} ", "it ", 1)
            note(f"{begin}, and vfiomgr bind refuses it: {shown}; remedy: {remedy}")
        if not objections:
            note(f"{begin}; a guest can have it after: vfiomgr bind {device.address}")
        elif told.issuperset(objections):
            note(f"{begin}, and vfiomgr bind refuses it for the same reason")
        told.update(objections)


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
