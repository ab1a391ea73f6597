"""`vfiomgr vgpu mode` and `vfiomgr vgpu switch`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from vfiomgr.cli.changes import confirm, plan_or_apply, print_outcome
from vfiomgr.cli.completion import complete_gpu
from vfiomgr.cli.options import CHANGING, session_options
from vfiomgr.cli.output import note, or_dash, print_document, print_table
from vfiomgr.cli.session import Session, pass_session
from vfiomgr.diagnostic import OVERRIDES, Override, blocker, refusal
from vfiomgr.documents.jsonable import to_jsonable
from vfiomgr.errors import UsageError
from vfiomgr.gpu.requests import GpuUse, SetGpuMode, SwitchGpu
from vfiomgr.passthrough.named import function_state, virtual_functions
from vfiomgr.usage import forbid_together

if TYPE_CHECKING:
    from vfiomgr.engine.run import Outcome
    from vfiomgr.pci.model import PciAddress
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.vgpu.model import GpuMode

_HEADINGS = ("GPU", "VFS", "VGPU SIZES", "MIG")
_WORDS = {True: "on", False: "off", None: "-"}


@click.command("mode")
@click.argument("gpu", required=False, shell_complete=complete_gpu)
@click.option("--heterogeneous/--homogeneous", default=None, help="vGPUs of several sizes, or one.")
@click.option("--mig/--no-mig", default=None, help="GPU instances of its own hardware, or none.")
@session_options(*CHANGING)
@pass_session
def mode(
    session: Session, gpu: str | None, *, heterogeneous: bool | None, mig: bool | None
) -> None:
    """Show how GPUs divide their memory, or set it for one.

    A mode is set while the GPU has no vGPU. Around a change of MIG, which outlasts a reboot, its
    virtual functions are removed and made again; GPU instances go with it.

    \b
    Examples:
      vfiomgr vgpu mode
      vfiomgr vgpu mode 0000:41:00.0 --heterogeneous
      vfiomgr vgpu mode 41:00.0 --mig --dry-run
    """
    if heterogeneous is None and mig is None:
        _show(session, gpu)
        return
    if gpu is None:
        message = "which GPU? A mode is set for one"
        raise UsageError(message, "name it: vfiomgr vgpu mode 0000:41:00.0 --heterogeneous")
    if heterogeneous and mig:
        forbid_together("--heterogeneous", "--mig", "with MIG each GPU instance has one size")
    address = session.address(gpu)
    outcome = plan_or_apply(session, SetGpuMode(address, heterogeneous, mig))
    if outcome is not None:
        lines = [step.describe() for step in outcome.plan.steps] if outcome.is_changed else []
        print_outcome(session, outcome, lines)


def _show(session: Session, gpu: str | None) -> None:
    host = session.scan(with_gpu_modes=True)
    modes = host.gpu_modes
    if gpu is not None:
        address = host.device(host.parse_address(gpu)).address
        modes = tuple(found for found in modes if found.gpu == str(address))
        if not modes:
            message = f"nvidia-smi tells nothing of {address}"
            raise refusal(
                [
                    blocker(
                        "nvidia-smi-silent",
                        address,
                        message,
                        "is it on the driver nvidia, and does nvidia-smi -q work?",
                    )
                ]
            )
    if session.format != "table":
        items = [_item(host, found) for found in modes]
        print_document("GpuModeList", {"items": items}, session.format)
    elif modes:
        print_table(_HEADINGS, [_row(host, found) for found in modes])
    else:
        note("nvidia-smi tells of no GPU: it is absent, or no GPU is on the driver nvidia")


def _item(host: HostSnapshot, found: GpuMode) -> dict[str, object]:
    device = host.device_named(found.gpu)
    return {
        **to_jsonable(found),
        "sriov_numvfs": None if device is None else device.sriov_numvfs,
        "sriov_totalvfs": None if device is None else device.sriov_totalvfs,
    }


def _row(host: HostSnapshot, found: GpuMode) -> tuple[str, ...]:
    device = host.device_named(found.gpu)
    total = None if device is None else device.sriov_totalvfs
    waits = "" if found.pending_mig in (None, found.mig) else f" ({_WORDS[found.pending_mig]} after"
    sizes = {True: "several", False: "one", None: None}[found.heterogeneous]
    return (
        found.gpu,
        f"{device.sriov_numvfs or 0} of {total}" if device is not None and total else "-",
        or_dash(sizes),
        _WORDS[found.mig] + (f"{waits} a reset)" if waits else ""),
    )


@click.command("switch")
@click.argument("gpu", shell_complete=complete_gpu)
@click.argument("to", type=click.Choice(["host", "passthrough", "vgpu"]))
@click.option("--functions", type=click.IntRange(1), metavar="N", help="For vgpu: so many VFs.")
@click.option(
    "--heterogeneous/--homogeneous", default=None, help="For vgpu: vGPUs of several sizes, or one."
)
@click.option(
    "--allow",
    multiple=True,
    type=click.Choice(OVERRIDES),
    help="Override a guard; a refusal names the one.",
)
@session_options(*CHANGING, "yes")
@pass_session
def switch(
    session: Session,
    *,
    gpu: str,
    to: GpuUse,
    functions: int | None,
    heterogeneous: bool | None,
    allow: tuple[Override, ...],
) -> None:
    """Give a GPU, whole, to the host or to a guest, or make it ready for vGPUs.

    All that lies between is done as one run: vGPUs that vfiomgr made are removed, virtual functions
    come or go, the slot changes its drivers. What would be refused on the way is refused before
    anything is touched, and a failure gives everything back. Other vGPUs are never removed.

    \b
    Examples:
      vfiomgr vgpu switch 0000:41:00.0 vgpu
      vfiomgr vgpu switch 41:00.0 vgpu --functions 16 --heterogeneous
      vfiomgr vgpu switch 41:00.0 passthrough --dry-run
      vfiomgr vgpu switch 41:00.0 host
    """
    if to != "vgpu" and (functions is not None or heterogeneous is not None):
        message = "--functions, --heterogeneous and --homogeneous are for vgpu alone"
        raise UsageError(message, f"leave them out: vfiomgr vgpu switch {gpu} {to}")
    address = session.address(gpu)
    if allow:
        confirm(session, f"Override the guard {', '.join(allow)} for {gpu}?")
    request = SwitchGpu(address, to, functions, heterogeneous, frozenset(allow))
    outcome = plan_or_apply(session, request)
    if outcome is not None:
        _print_use(session, outcome, address)


def _print_use(session: Session, outcome: Outcome, address: PciAddress) -> None:
    """What came of the GPU, read again from the host."""
    driver = function_state(session, address).driver
    functions = [vf.address for vf in virtual_functions(session, address)]
    line = f"{address} is on {driver or 'no driver'}"
    line += f", with {len(functions)} virtual functions" if functions else ""
    lines = [line] if outcome.is_changed else []
    print_outcome(session, outcome, lines, driver=driver, virtual_functions=functions)
