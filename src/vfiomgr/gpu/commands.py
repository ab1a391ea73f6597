"""The commands `vfiomgr vgpu mode` and `vfiomgr vgpu instances`."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

import click

from vfiomgr.cli.options import CHANGING, allow_option, flag, session_options
from vfiomgr.cli.output import note, or_dash, print_document, print_table
from vfiomgr.cli.table import wrapped
from vfiomgr.diagnostic import OVERRIDES, Override, refuse
from vfiomgr.documents.jsonable import to_jsonable
from vfiomgr.engine.changes import change, confirm, plan_or_apply, print_outcome
from vfiomgr.errors import UsageError, forbid_alone, forbid_together
from vfiomgr.expressions import expression
from vfiomgr.gpu.requests import GpuUse, SetGpuMode, SetMigInstances, SwitchGpu
from vfiomgr.passthrough.named import function_state, virtual_functions
from vfiomgr.snapshot.completion import complete_gpu
from vfiomgr.snapshot.named import find_device
from vfiomgr.snapshot.session import Session, pass_session
from vfiomgr.units import counted
from vfiomgr.vgpu.capacity import instance_users
from vfiomgr.vgpu.instance_model import GpuInstance, GpuPartition, InstanceProfile, by_start
from vfiomgr.vgpu.instances import more_of

if TYPE_CHECKING:
    from vfiomgr.engine.run import Outcome
    from vfiomgr.pci.model import PciAddress
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.vgpu.model import GpuMode


_HEADINGS = ("GPU", "VFS", "VGPU SIZES", "MIG")
_USES = "host, passthrough or vgpu"
_WORDS = {True: "on", False: "off", None: "-"}


@click.command("mode")
@click.argument("gpu", required=False, shell_complete=complete_gpu)
@click.argument("to", required=False, type=click.Choice(get_args(GpuUse)))
@click.option("--heterogeneous/--homogeneous", default=None, help="Allow vGPUs of different sizes.")
@click.option("--mig/--no-mig", default=None, help="Turn MIG (GPU instances) on or off.")
@click.option("--functions", type=click.IntRange(1), metavar="N", help="For vgpu: number of VFs.")
@allow_option(*OVERRIDES)
@session_options(*CHANGING, "yes")
@pass_session
def mode(
    session: Session,
    *,
    gpu: str | None,
    to: GpuUse | None,
    heterogeneous: bool | None,
    mig: bool | None,
    functions: int | None,
    allow: tuple[Override, ...],
) -> None:
    """Show the modes of GPUs, or set those of one GPU.

    With host, passthrough or vgpu the GPU is switched to that use in one run: vGPUs created by
    vfiomgr are removed, virtual functions are created or removed, and the drivers of the slot are
    changed. All safety checks run before the first change; a failure is rolled back. vGPUs created
    by others are never removed.

    Without it only the options are set, while the GPU has no vGPUs. A change of MIG survives a
    reboot; it removes the GPU instances, and removes and recreates the virtual functions.

    \b
    Examples:
      vfiomgr vgpu mode
      vfiomgr vgpu mode 0000:41:00.0 vgpu
      vfiomgr vgpu mode 41:00.0 vgpu --functions 16 --heterogeneous
      vfiomgr vgpu mode 41:00.0 passthrough --dry-run
      vfiomgr vgpu mode 41:00.0 host
      vfiomgr vgpu mode 0000:41:00.0 --heterogeneous
      vfiomgr vgpu mode 41:00.0 --mig --dry-run
    """
    if gpu in get_args(GpuUse):
        message = "missing argument: GPU"
        raise UsageError(message, f"e.g. vfiomgr vgpu mode 0000:41:00.0 {gpu}")
    if to is not None and gpu is not None:
        if mig is not None:
            name = "--mig" if mig else "--no-mig"
            forbid_together(name, to, "MIG is set first, in a run of its own")
        _switch(session, gpu, to, functions=functions, heterogeneous=heterogeneous, allow=allow)
        return
    if functions is not None or allow:
        option, uses = ("--functions", "vgpu") if functions else ("--allow", _USES)
        forbid_alone(option, uses, "it is for a GPU that is switched to another use")
    if heterogeneous is None and mig is None:
        _show(session, gpu)
        return
    if gpu is None:
        message = "missing argument: GPU"
        raise UsageError(message, "example: vfiomgr vgpu mode 0000:41:00.0 --heterogeneous")
    if heterogeneous and mig:
        forbid_together("--heterogeneous", "--mig", "with MIG each GPU instance has one size")
    address = session.address(gpu)
    change(session, SetGpuMode(address, heterogeneous, mig))


def _show(session: Session, gpu: str | None) -> None:
    host = session.scan(with_gpu_modes=True)
    modes = host.vgpus.modes
    if gpu is not None:
        address = find_device(host, gpu).address
        modes = tuple(found for found in modes if found.gpu == str(address))
        if not modes:
            message = f"nvidia-smi does not report {address}"
            refuse(
                "nvidia-smi-silent",
                address,
                message,
                "check that it uses the driver nvidia and that nvidia-smi -q works",
            )
    if session.format != "table":
        items = [_item(host, found) for found in modes]
        print_document("GpuModeList", {"items": items}, session.format)
    elif modes:
        print_table(_HEADINGS, [_row(host, found) for found in modes])
    else:
        note("nvidia-smi not found, or no GPU uses the nvidia driver")


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


def _switch(
    session: Session,
    gpu: str,
    to: GpuUse,
    *,
    functions: int | None,
    heterogeneous: bool | None,
    allow: tuple[Override, ...],
) -> None:
    """Switch a GPU between host, passthrough and vGPUs."""
    if to != "vgpu" and (functions is not None or heterogeneous is not None):
        message = "--functions, --heterogeneous and --homogeneous apply only to vgpu"
        raise UsageError(message, f"leave them out: vfiomgr vgpu mode {gpu} {to}")
    address = session.address(gpu)
    if allow:
        confirm(session, f"Override safety check {', '.join(allow)} for {gpu}?")
    request = SwitchGpu(address, to, functions, heterogeneous, frozenset(allow))
    outcome = plan_or_apply(session, request)
    if outcome is not None:
        _print_use(session, outcome, address)


def _print_use(session: Session, outcome: Outcome, address: PciAddress) -> None:
    """Print the resulting state of the GPU, read from the host."""
    driver = function_state(session, address).driver
    functions = [vf.address for vf in virtual_functions(session, address)]
    line = f"{address} is on {driver or 'no driver'}"
    line += f", with {counted(len(functions), 'virtual function')}" if functions else ""
    lines = [line] if outcome.is_changed else []
    print_outcome(session, outcome, lines, driver=driver, virtual_functions=functions)


_INSTANCE_HEADINGS = (
    "GPU",
    "PROFILE",
    "MEMORY",
    "AVAILABLE",
    "OF",
    "INSTANCE",
    "START",
    wrapped("USED BY"),
)
_COUNT = expression(r"(?P<profile>[^=]+)=(?P<count>[0-9]{1,4})")
_EXAMPLE = "vfiomgr vgpu instances 0000:41:00.0 3g.20gb=1 1g.5gb=3"


@click.command("instances")
@click.argument("gpu", required=False, shell_complete=complete_gpu)
@click.argument("profiles", nargs=-1, metavar="[PROFILE=COUNT]...")
@flag("--none", "is_none", text="Destroy all GPU instances; MIG stays on.")
@session_options(*CHANGING)
@pass_session
def instances(
    session: Session, gpu: str | None, profiles: tuple[str, ...], *, is_none: bool
) -> None:
    """List GPU instances (MIG), or set those of one GPU.

    Without PROFILE=COUNT they are listed, with the profiles: AVAILABLE is how many more instances
    of the profile fit, if no other profile is added. OF is the maximum on an empty GPU. START is
    the first memory slice of the instance.

    With PROFILE=COUNT the GPU gets exactly these: matching instances stay, with their vGPUs and
    processes; others are destroyed, and missing ones are created. Instances in use are never
    destroyed. A failure is rolled back.

    \b
    Examples:
      vfiomgr vgpu instances
      vfiomgr vgpu instances 0000:41:00.0 --format json
      vfiomgr vgpu instances 0000:41:00.0 1g.5gb=7
      vfiomgr vgpu instances 41:00.0 3g.20gb=1 1g.5gb=3 --dry-run
      vfiomgr vgpu instances 41:00.0 1g.24gb+gfx=4
      vfiomgr vgpu instances 41:00.0 --none     # destroy all
    """
    if not profiles and not is_none:
        _list(session, gpu)
        return
    if gpu is None:
        message = "missing argument: GPU"
        raise UsageError(message, f"example: {_EXAMPLE}")
    if profiles and is_none:
        forbid_together(
            "--none", "PROFILE=COUNT", "one destroys all instances, the other sets them"
        )
    address = session.address(gpu)
    counts = () if is_none else _counts(profiles)
    change(session, SetMigInstances(address, counts))


def _list(session: Session, gpu: str | None) -> None:
    """List instances, profiles and free capacity, of all GPUs or of one."""
    host = session.scan(with_gpu_modes=True)
    found = host.vgpus.partitions
    if gpu is not None:
        device = find_device(host, gpu)
        found = tuple(known for known in found if known.gpu == str(device.address))
        if not found:
            message = f"{device} is not in MIG mode, or nvidia-smi does not report it"
            refuse(
                "mig-mode",
                device,
                message,
                f"show its modes with: vfiomgr vgpu mode {device.address}",
            )
    if session.format != "table":
        items = [_instance_item(host, known) for known in found]
        print_document("GpuInstanceList", {"items": items}, session.format)
    elif found:
        print_table(_INSTANCE_HEADINGS, [row for known in found for row in _rows(host, known)])
    else:
        note("no GPU is in MIG mode; show supported modes with: vfiomgr vgpu mode")


def _instance_item(host: HostSnapshot, found: GpuPartition) -> dict[str, object]:
    return {
        "gpu": found.gpu,
        "profiles": [
            {
                "id": profile.id,
                "name": profile.name,
                "memory_mib": profile.memory,
                "available_instances": more_of(found, profile),
                "max_instances": profile.total,
            }
            for profile in found.profiles
        ],
        "instances": [
            {
                "id": one.id,
                "profile_id": one.profile,
                "profile": one.name,
                "start": one.start,
                "size": one.size,
                "compute_instances": one.compute_instances,
                "users": _users(host, found, one),
            }
            for one in by_start(found.instances)
        ],
    }


def _users(host: HostSnapshot, found: GpuPartition, one: GpuInstance) -> list[str]:
    device = host.device_named(found.gpu)
    return [] if device is None else instance_users(host, device, one)


def _rows(host: HostSnapshot, found: GpuPartition) -> list[tuple[str, ...]]:
    """The rows of each profile, followed by its instances."""
    rows: list[tuple[str, ...]] = []
    for profile in found.profiles:
        rows.append((*_profile_row(found, profile), "-", "-", "-"))
        rows += [
            (found.gpu, profile.name, "", "", "", str(one.id), str(one.start), used)
            for one in by_start(found.instances)
            if one.profile == profile.id
            for used in [or_dash(", ".join(_users(host, found, one)))]
        ]
    return rows


def _profile_row(found: GpuPartition, profile: InstanceProfile) -> tuple[str, ...]:
    memory = "-" if profile.memory is None else f"{profile.memory}M"
    more = str(more_of(found, profile))
    return found.gpu, profile.name, memory, more, str(profile.total)


def _counts(words: tuple[str, ...]) -> tuple[tuple[str, int], ...]:
    counts: dict[str, int] = {}
    for word in words:
        match = _COUNT.fullmatch(word)
        if match is None:
            message = f"invalid argument: {word!r} (expected PROFILE=COUNT)"
            raise UsageError(message, f"example: {_EXAMPLE}")
        if match["profile"] in counts:
            message = f"profile specified twice: {match['profile']}"
            raise UsageError(message, f"name each profile once: {_EXAMPLE}")
        counts[match["profile"]] = int(match["count"])
    if not any(counts.values()):
        message = "no GPU instances requested"
        raise UsageError(message, "destroy all with: vfiomgr vgpu instances GPU --none")
    return tuple((name, count) for name, count in counts.items() if count)
