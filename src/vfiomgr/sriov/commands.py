"""The commands below `vfiomgr sriov`, and the quota options."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Unpack

import click

from vfiomgr.cli.keywords import Keywords, Option, fields_of
from vfiomgr.cli.options import CHANGING, READING, WholeNumber, declared, flag, session_options
from vfiomgr.cli.output import note, or_dash, print_document, print_table
from vfiomgr.cli.table import cut, wrapped
from vfiomgr.engine.changes import plan_or_apply, print_outcome
from vfiomgr.errors import UsageError, forbid_alone, forbid_together
from vfiomgr.passthrough.named import virtual_functions
from vfiomgr.snapshot.completion import complete_sriov
from vfiomgr.snapshot.session import Session, pass_session
from vfiomgr.sriov.steps import (
    ChangeQuotas,
    ChangeVectors,
    SetQuotas,
    SetVectors,
    SetVfCount,
    SetVirtualFunctions,
)
from vfiomgr.units import memory_bytes
from vfiomgr.vgpu.commands.quotas import quota_items
from vfiomgr.vgpu.quota.model import GpuQuotas, Priority, VfQuota, in_bytes
from vfiomgr.vgpu.steps import RunSriovManage

if TYPE_CHECKING:
    from vfiomgr.engine.run import Outcome
    from vfiomgr.pci.model import PciAddress, PciDevice
    from vfiomgr.snapshot.model import HostSnapshot


_QUOTA_HEADINGS = (
    "FUNCTION",
    "ADDRESS",
    "MEMORY",
    "QUANTUM",
    "PREEMPTION",
    "PRIORITY",
    wrapped("NOTES"),
)
_LARGEST = (1 << 32) - 1
_MOST_VECTORS = 1 << 11
"""The Table Size of MSI-X has 11 bits."""


class QuotaOptions(Keywords, total=False):
    """The quotas of virtual functions; all are optional."""

    vf_memory: Annotated[
        str | None,
        Option("Set the GPU memory of each VF, e.g. 4G.", metavar="SIZE", field="memory"),
    ]
    exec_quantum: Annotated[
        int | None,
        Option(
            "Set the time slice of each VF (0: no limit).",
            metavar="MS",
            least=0,
            most=_LARGEST,
            field="exec_quantum_ms",
        ),
    ]
    preempt_timeout: Annotated[
        int | None,
        Option(
            "Set the preemption timeout of each VF (0: no limit).",
            metavar="US",
            least=0,
            most=_LARGEST,
            field="preempt_timeout_us",
        ),
    ]
    priority: Annotated[
        Priority | None, Option("Set the priority of all VFs.", field="sched_priority")
    ]


def share_of(options: QuotaOptions) -> VfQuota | None:
    """The quota of the options; None if no option is given."""
    fields = fields_of(QuotaOptions, options)
    if "memory" in fields:
        fields["memory"] = memory_bytes("--vf-memory", fields["memory"])
    return VfQuota(**fields) if fields else None


def _change(
    session: Session, chosen: PciAddress, share: VfQuota | None, *, is_physical: bool
) -> None:
    """Change the quotas of existing functions."""
    if share is None:
        message = "missing argument: COUNT (or a quota to change)"
        listed = f"the present number and quotas: vfiomgr sriov list {chosen}"
        raise UsageError(message, f"e.g. vfiomgr sriov set {chosen} 4; {listed}")
    outcome = plan_or_apply(session, ChangeQuotas(chosen, share, is_physical=is_physical))
    if outcome is None:
        return
    host = session.scan()
    gpu = _physical(host, host.device(chosen))
    rows = quota_items(host, gpu) if gpu is not None else []
    named = [row for row in rows if str(chosen) in (str(row["address"]), str(rows[0]["address"]))]
    shown = [f"{row['address'] or row['function']} has {_in_words(row)}" for row in named]
    print_outcome(session, outcome, shown if outcome.is_changed else [], quotas=named)


def _show(session: Session, host: HostSnapshot, device: PciDevice) -> None:
    """Show the quotas of a virtual function, or of all functions of a physical one."""
    gpu = _physical(host, device)
    items = [] if gpu is None else quota_items(host, gpu)
    if gpu is not None and str(device.address) != gpu.gpu:
        items = [item for item in items if str(item["address"]) == str(device.address)]
    if session.format != "table":
        facts = {"gpu": gpu.gpu, "interface": gpu.interface, "memory": gpu.memory} if gpu else {}
        print_document("QuotaList", {**facts, "items": items}, session.format)
    elif items:
        print_table(_QUOTA_HEADINGS, [_quota_row(item) for item in items])
    else:
        physical = host.device_named(str(device.physical_function)) or device
        if physical.sriov_totalvfs:
            print_table(_HEADINGS, [_row(_item(host, physical))])
        note(f"no quotas of virtual functions: {device} is on {device.driver or 'no driver'}")
    if gpu is not None and gpu.interface == "debugfs":
        note("quotas are read-only: xe supports setting them since Linux 6.19")


def _physical(host: HostSnapshot, device: PciDevice) -> GpuQuotas | None:
    physical = host.device_named(str(device.physical_function or device.address))
    return host.vgpus.quotas_of(physical) if physical is not None else None


def _quota_row(item: dict[str, Any]) -> tuple[str, ...]:
    memory, differing = item["memory"], item["differing"]
    limits = (item["exec_quantum_ms"], "ms"), (item["preempt_timeout_us"], "us")
    notes = [f"{name} differs between tiles" for name in differing]
    notes += ["not created yet"] if item["address"] is None else []
    return (
        item["function"],
        or_dash(item["address"]),
        "-" if memory is None else in_bytes(memory),
        *(
            "-" if number is None else f"{number} {unit}" if number else "no limit"
            for number, unit in limits
        ),
        or_dash(item["sched_priority"]),
        or_dash("; ".join(notes)),
    )


def _in_words(item: dict[str, Any]) -> str:
    _, _, memory, quantum, preemption, priority, _ = _quota_row(item)
    return f"memory {memory}, quantum {quantum}, preemption {preemption}, priority {priority}"


_HEADINGS = ("ADDRESS", cut("NAME"), "DRIVER", "VFS", "AUTOPROBE", wrapped("VF DRIVERS"))


@click.group("sriov")
def sriov() -> None:
    """Create virtual functions (VFs) and set their quotas."""


@sriov.command("list")
@click.argument("address", required=False, shell_complete=complete_sriov)
@session_options(*READING)
@pass_session
def list_physical_functions(session: Session, address: str | None) -> None:
    """List devices with SR-IOV and their virtual functions.

    With ADDRESS the quotas of that virtual function are listed, or those of all functions of that
    physical function.

    \b
    Examples:
      vfiomgr sriov list
      vfiomgr sriov list --format json
      vfiomgr sriov list 0000:03:00.0     # quotas
    """
    host = session.scan()
    if address is not None:
        _show(session, host, host.device(session.address(address)))
        return
    items = [_item(host, device) for device in host.devices if device.sriov_totalvfs]
    if session.format != "table":
        print_document("PhysicalFunctionList", {"items": items}, session.format)
    elif any(item["quotas"] for item in items):
        rows = [(*_row(item), or_dash(_each(host, item))) for item in items]
        print_table((*_HEADINGS, wrapped("EACH GETS")), rows)
    elif items:
        print_table(_HEADINGS, [_row(item) for item in items])
    else:
        note("no device of this host supports virtual functions")


def _item(host: HostSnapshot, device: PciDevice) -> dict[str, object]:
    drivers = [vf.driver or "" for vf in host.devices if vf.address in device.virtual_functions]
    known = host.vgpus.quotas_of(device)
    return {
        "address": device.address,
        "name": device.name,
        "short_name": device.short_name,
        "driver": device.driver,
        "sriov_totalvfs": device.sriov_totalvfs,
        "sriov_numvfs": device.sriov_numvfs or 0,
        "sriov_drivers_autoprobe": device.sriov_drivers_autoprobe,
        "virtual_functions": device.virtual_functions,
        "vf_drivers": {name: drivers.count(name) for name in sorted(set(drivers))},
        "quotas": [] if known is None else quota_items(host, known),
    }


def _each(host: HostSnapshot, item: dict[str, object]) -> str | None:
    """The quotas of the virtual functions of a GPU."""
    functions = host.device(item["address"]).virtual_functions  # type: ignore[arg-type]
    found = {str(host.function_quotas(host.device(address))) for address in functions}
    if not item["quotas"] or not found:
        return None
    return (
        found.pop()
        if len(found) == 1
        else f"different quotas: vfiomgr sriov list {item['address']}"
    )


def _row(item: dict[str, object]) -> tuple[str, ...]:
    autoprobe = {True: "on", False: "off", None: None}[item["sriov_drivers_autoprobe"]]  # type: ignore[index]
    drivers: dict[str, int] = item["vf_drivers"]  # type: ignore[assignment]
    return (
        str(item["address"]),
        str(item["short_name"]),
        or_dash(item["driver"]),
        f"{item['sriov_numvfs']} of {item['sriov_totalvfs']}",
        or_dash(autoprobe),
        or_dash(", ".join(f"{count} on {name or 'none'}" for name, count in drivers.items())),
    )


@sriov.command("set")
@click.argument("address", shell_complete=complete_sriov)
@click.argument("count", required=False, type=WholeNumber(min=0))
@flag("--autoprobe", text="Let host drivers bind the new functions.")
@click.option(
    "--vf-msix",
    type=WholeNumber(1, _MOST_VECTORS),
    metavar="N",
    help="Set the MSI-X vectors of each VF.",
)
@declared(QuotaOptions)
@flag("--physical", text="Change the quotas of the physical function itself.")
@session_options(*CHANGING)
@pass_session
def set_count(
    session: Session,
    *,
    address: str,
    count: int | None,
    autoprobe: bool,
    vf_msix: int | None,
    physical: bool,
    **quotas: Unpack[QuotaOptions],
) -> None:
    """Set virtual functions (0 removes all), their vectors, or quotas.

    With COUNT existing functions are removed first; none of them may be in use. New functions have
    no driver and are ready for `vfiomgr bind`, unless --autoprobe is given. On Intel GPUs (xe,
    i915) the options set the quotas of each function; the driver divides everything else evenly.
    COUNT 0 restores the original quotas.

    Without COUNT the quotas of existing functions are changed: ADDRESS is a virtual function, or a
    physical function for all of its virtual functions. Time and priority can be changed while
    guests run; memory cannot, and with i915 only before the functions are created.

    --vf-msix sets the number of MSI-X vectors where the driver supports it (mlx5_core, ice; Linux
    5.13), e.g. one for each vCPU of a guest and one more. Existing functions must have no driver.

    \b
    Examples:
      vfiomgr sriov set 0000:05:00.0 4
      vfiomgr sriov set 05:00.0 8 --dry-run
      vfiomgr sriov set 05:00.0 0
      vfiomgr sriov set 03:00.0 4 --vf-memory 4G --exec-quantum 20 --preempt-timeout 1000
      vfiomgr sriov set 03:00.0 --exec-quantum 20 --preempt-timeout 1000
      vfiomgr sriov set 03:00.2 --vf-memory 6G --dry-run
      vfiomgr sriov set 03:00.0 --physical --priority high
      vfiomgr sriov set 05:00.0 4 --vf-msix 33 --dry-run
      vfiomgr sriov set 05:10.0 --vf-msix 65 --dry-run
    """
    share = share_of(quotas)
    chosen = session.address(address)
    if count is None:
        if autoprobe:
            forbid_alone("--autoprobe", "COUNT", "existing functions keep their drivers")
        if vf_msix is not None:
            if share is not None or physical:
                why = "MSI-X vectors and quotas of existing functions are set separately"
                forbid_together("--vf-msix", "a quota", why)
            _change_vectors(session, ChangeVectors(chosen, vf_msix))
            return
        _change(session, chosen, share, is_physical=physical)
        return
    if physical:
        forbid_together("--physical", "COUNT", "a physical function has quotas of its own")
    request = SetVirtualFunctions(chosen, count, autoprobe, share=share, vectors=vf_msix)
    outcome = plan_or_apply(session, request)
    if outcome is not None:
        _print_functions(session, outcome, chosen)
        steps = outcome.plan.steps
        counts = [step for step in steps if isinstance(step, SetVfCount | RunSriovManage)]
        if counts and session.format == "table":
            first = counts[0]
            note(f"undo with: vfiomgr sriov set {first.device.address} {first.before}")


def _change_vectors(session: Session, request: ChangeVectors) -> None:
    """Set the MSI-X vectors of existing functions, and print what they have."""
    outcome = plan_or_apply(session, request)
    if outcome is None:
        return
    host = session.scan()
    chosen = host.device(request.address)
    named = chosen.virtual_functions or (chosen.address,)
    found = [each for each in host.msix if each.address in named]
    lines = [f"{each.address} has {each.count} MSI-X vectors" for each in found]
    print_outcome(session, outcome, lines if outcome.is_changed else [], vectors=found)
    before = {n for s in outcome.plan.steps if isinstance(s, SetVectors) for n in s.before if n}
    if len(before) == 1 and session.format == "table":
        note(f"undo with: vfiomgr sriov set {request.address} --vf-msix {before.pop()}")


def _print_functions(session: Session, outcome: Outcome, chosen: PciAddress) -> None:
    """Print the virtual functions that a device has now."""
    made = virtual_functions(session, chosen)
    has_quotas = any(isinstance(step, SetQuotas) for step in outcome.plan.steps)
    shares = _shares(session, chosen) if has_quotas else {}
    lines = [
        f"{vf.address} is in IOMMU group {or_dash(vf.iommu_group)}, "
        f"on {vf.driver or 'no driver'}{shares.get(str(vf.address), '')}"
        for vf in made
    ]
    shown = (lines or [f"{chosen} has no virtual functions"]) if outcome.is_changed else []
    items = [
        {"address": vf.address, "iommu_group": vf.iommu_group, "driver": vf.driver} for vf in made
    ]
    print_outcome(session, outcome, shown, virtual_functions=items)


def _shares(session: Session, address: PciAddress) -> dict[str, str]:
    """The resulting quotas, read from the host; the driver may have aligned them."""
    host = session.scan()
    functions = host.device(address).virtual_functions
    known = [(vf, host.function_quotas(host.device(vf))) for vf in functions]
    return {str(vf): f", with {quotas}" for vf, quotas in known if quotas is not None}
