"""`vfiomgr sriov quota`, and the options that name a share of a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from vfiomgr.cli.change import plan_or_apply, print_outcome
from vfiomgr.cli.output import note, or_dash, print_document, print_table
from vfiomgr.cli.parameters import WholeNumber, mebibytes
from vfiomgr.cli.session import Session, complete_address, session_options
from vfiomgr.cli.usage import forbid_alone
from vfiomgr.model.intent import ChangeQuotas
from vfiomgr.model.quota import PRIORITIES, Share, in_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from vfiomgr.model.pci import PciDevice
    from vfiomgr.model.quota import FunctionQuotas, GpuQuotas, Priority
    from vfiomgr.model.snapshot import HostSnapshot

_HEADINGS = ("FUNCTION", "ADDRESS", "MEMORY", "QUANTUM", "PREEMPTION", "PRIORITY", "NOTES")
_LARGEST = (1 << 32) - 1
_MIB = 1 << 20


def share_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a command with the options of a share."""
    options = (
        click.option("--vf-memory", metavar="SIZE", help="Of the GPU's memory for each, e.g. 4G."),
        click.option(
            "--exec-quantum",
            type=WholeNumber(0, _LARGEST),
            metavar="MS",
            help="How long each runs at a time; 0: without limit.",
        ),
        click.option(
            "--preempt-timeout",
            type=WholeNumber(0, _LARGEST),
            metavar="US",
            help="How long each may take to stop; 0: without limit.",
        ),
        click.option("--priority", type=click.Choice(PRIORITIES), help="Of all functions alike."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def share_of(
    vf_memory: str | None,
    exec_quantum: int | None,
    preempt_timeout: int | None,
    priority: Priority | None,
) -> Share | None:
    """What the options name; None where they name nothing."""
    memory = None if vf_memory is None else mebibytes("--vf-memory", vf_memory) * _MIB
    share = Share(memory, exec_quantum, preempt_timeout, priority)
    return share if share.quantities else None


@click.command("quota")
@click.argument("address", shell_complete=complete_address)
@share_options
@click.option("--physical", is_flag=True, help="Of the physical function itself, the host's own.")
@session_options()
@click.pass_obj
def quota(
    session: Session,
    *,
    address: str,
    vf_memory: str | None,
    exec_quantum: int | None,
    preempt_timeout: int | None,
    priority: Priority | None,
    physical: bool,
) -> None:
    """Show what the functions of a GPU get of it, or change that while they are there.

    ADDRESS is a virtual function, or a physical one for all of its virtual ones. Time and priority
    can be changed while guests run; memory not, and with i915 only before the functions are made:
    `vfiomgr sriov set`. What the quotas were comes back with the last of the functions.

    \b
    Examples:
      vfiomgr sriov quota 0000:03:00.0
      vfiomgr sriov quota 0000:03:00.0 --exec-quantum 20 --preempt-timeout 1000
      vfiomgr sriov quota 03:00.2 --vf-memory 6G --dry-run
      vfiomgr sriov quota 03:00.0 --physical --priority high
    """
    share = share_of(vf_memory, exec_quantum, preempt_timeout, priority)
    (chosen,) = session.addresses((address,))
    if physical and share is None:
        forbid_alone("--physical", "a quota", "all are shown without it")
    if share is None:
        host = session.host()
        _show(session, host, host.device(chosen))
        return
    outcome = plan_or_apply(session, ChangeQuotas(chosen, share, is_physical=physical))
    if outcome is None:
        return
    host = session.host()
    gpu = _physical(host, host.device(chosen))
    rows = quota_items(host, gpu) if gpu is not None else []
    named = [row for row in rows if str(chosen) in (str(row["address"]), str(rows[0]["address"]))]
    shown = [f"{row['address'] or row['function']} has {_in_words(row)}" for row in named]
    print_outcome(session, outcome, shown if outcome.is_changed else [], quotas=named)


def _show(session: Session, host: HostSnapshot, device: PciDevice) -> None:
    gpu = _physical(host, device)
    items = [] if gpu is None else quota_items(host, gpu)
    if gpu is not None and str(device.address) != gpu.gpu:
        items = [item for item in items if str(item["address"]) == str(device.address)]
    if session.format != "table":
        facts = {"gpu": gpu.gpu, "interface": gpu.interface, "memory": gpu.memory} if gpu else {}
        print_document("QuotaList", {**facts, "items": items}, session.format)
    elif items:
        print_table(_HEADINGS, [_row(item) for item in items])
    else:
        driver = device.driver or "no driver"
        note(f"{device} is on {driver}, which shows no quotas of virtual functions")
    if gpu is not None and gpu.interface == "debugfs":
        note("xe of this kernel shows quotas in debugfs; they can be set as of Linux 6.19")


def _physical(host: HostSnapshot, device: PciDevice) -> GpuQuotas | None:
    physical = host.device_named(str(device.physical_function or device.address))
    return host.quotas_of(physical) if physical is not None else None


def quota_items(host: HostSnapshot, gpu: GpuQuotas) -> list[dict[str, object]]:
    """The physical function, and the virtual ones that are there or have memory already."""
    device = host.device_named(gpu.gpu)
    addresses = () if device is None else (device.address, *device.virtual_functions)
    return [
        quota_item(function, addresses[function.number] if is_there else None)
        for function in gpu.functions
        if (is_there := function.number < len(addresses)) or function.memory
    ]


def quota_item(function: FunctionQuotas, address: object) -> dict[str, object]:
    """What a function gets, as JSON has it; bytes, milliseconds, microseconds."""
    return {
        "function": f"vf{function.number}" if function.number else "pf",
        "address": address,
        "memory": function.memory,
        "exec_quantum_ms": function.exec_quantum_ms,
        "preempt_timeout_us": function.preempt_timeout_us,
        "sched_priority": function.sched_priority,
        "differing": function.differing,
        "attributes": {attribute.name: attribute.text for attribute in function.attributes},
    }


def _row(item: dict[str, Any]) -> tuple[str, ...]:
    memory, differing = item["memory"], item["differing"]
    limits = (item["exec_quantum_ms"], "ms"), (item["preempt_timeout_us"], "us")
    notes = [f"{name} differs between tiles" for name in differing]
    notes += ["not made yet"] if item["address"] is None else []
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
    _, _, memory, quantum, preemption, priority, _ = _row(item)
    return f"memory {memory}, quantum {quantum}, preemption {preemption}, priority {priority}"
