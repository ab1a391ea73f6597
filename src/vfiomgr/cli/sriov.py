"""`vfiomgr sriov …`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from vfiomgr.cli.change import plan_or_apply, print_outcome
from vfiomgr.cli.output import note, or_dash, print_document, print_table
from vfiomgr.cli.parameters import WholeNumber
from vfiomgr.cli.quotas import quota, quota_items, share_of, share_options
from vfiomgr.cli.session import Session, complete_address, session_options
from vfiomgr.host.iommu import group_number
from vfiomgr.host.pci import read_driver_state, read_virtual_functions
from vfiomgr.model.gpu_step import RunSriovManage
from vfiomgr.model.intent import SetVirtualFunctions
from vfiomgr.model.path import pci_device
from vfiomgr.model.quota_step import SetQuotas
from vfiomgr.model.step import SetVfCount

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vfiomgr.api import Outcome
    from vfiomgr.model.pci import PciAddress, PciDevice
    from vfiomgr.model.quota import Priority
    from vfiomgr.model.snapshot import HostSnapshot

_HEADINGS = ("ADDRESS", "NAME", "DRIVER", "VFS", "AUTOPROBE", "VF DRIVERS")


@click.group("sriov")
@session_options()
def sriov() -> None:
    """SR-IOV: how many virtual functions (VFs) a device has, and what each gets of it."""


sriov.add_command(quota)


@sriov.command("list")
@session_options()
@click.pass_obj
def list_physical_functions(session: Session) -> None:
    """List devices that make virtual functions: how many there are, and who has them.

    \b
    Examples:
      vfiomgr sriov list
      vfiomgr sriov list --format json
    """
    host = session.host()
    items = [_item(host, device) for device in host.devices if device.sriov_totalvfs]
    if session.format != "table":
        print_document("PhysicalFunctionList", {"items": items}, session.format)
    elif any(item["quotas"] for item in items):
        rows = [(*_row(item), or_dash(_each(host, item))) for item in items]
        print_table((*_HEADINGS, "EACH GETS"), rows)
    elif items:
        print_table(_HEADINGS, [_row(item) for item in items])
    else:
        note("no device of this host makes virtual functions")


def _item(host: HostSnapshot, device: PciDevice) -> dict[str, object]:
    drivers = [vf.driver for vf in host.devices if vf.address in device.virtual_functions]
    known = host.quotas_of(device)
    return {
        "address": device.address,
        "name": device.name,
        "driver": device.driver,
        "sriov_totalvfs": device.sriov_totalvfs,
        "sriov_numvfs": device.sriov_numvfs or 0,
        "sriov_drivers_autoprobe": device.sriov_drivers_autoprobe,
        "virtual_functions": device.virtual_functions,
        "vf_drivers": {name or "": drivers.count(name) for name in _sorted(drivers)},
        "quotas": [] if known is None else quota_items(host, known),
    }


def _each(host: HostSnapshot, item: dict[str, object]) -> str | None:
    """What each virtual function gets of a GPU."""
    functions = host.device(item["address"]).virtual_functions  # type: ignore[arg-type]
    found = {str(host.function_quotas(host.device(address))) for address in functions}
    if not item["quotas"] or not found:
        return None
    return found.pop() if len(found) == 1 else "different quotas: vfiomgr sriov quota"


def _sorted(drivers: Iterable[str | None]) -> list[str | None]:
    return sorted(set(drivers), key=lambda name: name or "")


def _row(item: dict[str, object]) -> tuple[str, ...]:
    autoprobe = {True: "on", False: "off", None: None}[item["sriov_drivers_autoprobe"]]  # type: ignore[index]
    drivers: dict[str, int] = item["vf_drivers"]  # type: ignore[assignment]
    return (
        str(item["address"]),
        str(item["name"]),
        or_dash(item["driver"]),
        f"{item['sriov_numvfs']} of {item['sriov_totalvfs']}",
        or_dash(autoprobe),
        or_dash(", ".join(f"{count} on {name or 'none'}" for name, count in drivers.items())),
    )


@sriov.command("set")
@click.argument("address", shell_complete=complete_address)
@click.argument("count", type=WholeNumber(min=0))
@click.option("--autoprobe", is_flag=True, help="Let the host's drivers take the new functions.")
@share_options
@session_options()
@click.pass_obj
def set_count(
    session: Session,
    *,
    address: str,
    count: int,
    autoprobe: bool,
    vf_memory: str | None,
    exec_quantum: int | None,
    preempt_timeout: int | None,
    priority: Priority | None,
) -> None:
    """Make COUNT virtual functions of a device; 0 removes them all.

    Those that exist are removed first, so none of them may be in use. The new ones have no driver,
    ready for `vfiomgr bind`, unless --autoprobe is given. Intel's GPUs (xe, i915) give each what
    the options name, set before the functions are made; of what none names, an equal share. With 0
    all quotas are as they were.

    \b
    Examples:
      vfiomgr sriov set 0000:05:00.0 4
      vfiomgr sriov set 05:00.0 8 --dry-run
      vfiomgr sriov set 05:00.0 0
      vfiomgr sriov set 03:00.0 4 --vf-memory 4G --exec-quantum 20 --preempt-timeout 1000
    """
    share = share_of(vf_memory, exec_quantum, preempt_timeout, priority)
    (chosen,) = session.addresses((address,))
    outcome = plan_or_apply(session, SetVirtualFunctions(chosen, count, autoprobe, share=share))
    if outcome is None:
        return
    made = [_made(session, vf) for vf in read_virtual_functions(session.tree, chosen)]
    shares = _shares(session, chosen) if _has_quotas(outcome) else {}
    lines = [
        f"{vf['address']} is in IOMMU group {or_dash(vf['iommu_group'])}, "
        f"on {vf['driver'] or 'no driver'}{shares.get(str(vf['address']), '')}"
        for vf in made
    ]
    shown = (lines or [f"{chosen} has no virtual functions"]) if outcome.is_changed else []
    print_outcome(session, outcome, shown, virtual_functions=made)
    _tell_undo(session, outcome)


def _has_quotas(outcome: Outcome) -> bool:
    return any(isinstance(step, SetQuotas) for step in outcome.plan.steps)


def _shares(session: Session, address: PciAddress) -> dict[str, str]:
    """What came of the quotas, read again from the host; the driver may have aligned them."""
    host = session.host()
    functions = host.device(address).virtual_functions
    known = [(vf, host.function_quotas(host.device(vf))) for vf in functions]
    return {str(vf): f", with {quotas}" for vf, quotas in known if quotas is not None}


def _made(session: Session, address: PciAddress) -> dict[str, object]:
    """What came of a virtual function, read again from the host."""
    return {
        "address": address,
        "iommu_group": group_number(session.tree, pci_device(address)),
        "driver": read_driver_state(session.tree, address).driver,
    }


def _tell_undo(session: Session, outcome: Outcome) -> None:
    steps = outcome.plan.steps
    counts = [step for step in steps if isinstance(step, SetVfCount | RunSriovManage)]
    if counts and session.format == "table":
        first = counts[0]
        note(f"undo with: vfiomgr sriov set {first.device.address} {first.before}")
