"""The command `vfiomgr vgpu instances`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import click

from vfiomgr.cli.changes import plan_or_apply, print_outcome
from vfiomgr.cli.completion import complete_gpu
from vfiomgr.cli.group import FormerGroup
from vfiomgr.cli.options import CHANGING, session_options
from vfiomgr.cli.output import note, or_dash, print_document, print_table
from vfiomgr.cli.session import Session, pass_session
from vfiomgr.cli.table import wrapped
from vfiomgr.diagnostic import blocker, refusal
from vfiomgr.errors import UsageError
from vfiomgr.gpu.requests import SetMigInstances
from vfiomgr.usage import forbid_together
from vfiomgr.vgpu.gpu_instances import users
from vfiomgr.vgpu.mig.model import by_start
from vfiomgr.vgpu.mig.placement import more_of

if TYPE_CHECKING:
    from vfiomgr.engine.run import Outcome
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.vgpu.mig.model import GpuInstance, GpuPartition, InstanceProfile

_HEADINGS = ("GPU", "PROFILE", "MEMORY", "AVAILABLE", "OF", "INSTANCE", "START", wrapped("USED BY"))
_COUNT = re.compile(r"(?P<profile>[^=]+)=(?P<count>[0-9]{1,4})")
_EXAMPLE = "vfiomgr vgpu instances 0000:41:00.0 3g.20gb=1 1g.5gb=3"


_FORMER = {
    "list": "",
    "set": "GPU PROFILES",
    "remove": "--none GPU",
    "clear": "--none GPU",
}


@click.command("instances", cls=FormerGroup, former=_FORMER)
@click.argument("gpu", required=False, shell_complete=complete_gpu)
@click.argument("profiles", nargs=-1, metavar="[PROFILE=COUNT]...")
@click.option("--none", "is_none", is_flag=True, help="Destroy all GPU instances; MIG stays on.")
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
    _print_instances(session, plan_or_apply(session, SetMigInstances(address, counts)))


def _list(session: Session, gpu: str | None) -> None:
    """List instances, profiles and free capacity, of all GPUs or of one."""
    host = session.scan(with_gpu_modes=True)
    found = host.gpu_partitions
    if gpu is not None:
        device = host.device(host.parse_address(gpu))
        found = tuple(known for known in found if known.gpu == str(device.address))
        if not found:
            message = f"{device} is not in MIG mode, or nvidia-smi does not report it"
            raise refusal(
                [
                    blocker(
                        "mig-mode",
                        device,
                        message,
                        f"show its modes with: vfiomgr vgpu mode {device.address}",
                    )
                ]
            )
    if session.format != "table":
        items = [_item(host, known) for known in found]
        print_document("GpuInstanceList", {"items": items}, session.format)
    elif found:
        print_table(_HEADINGS, [row for known in found for row in _rows(host, known)])
    else:
        note("no GPU is in MIG mode; show supported modes with: vfiomgr vgpu mode")


def _item(host: HostSnapshot, found: GpuPartition) -> dict[str, object]:
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
    return [] if device is None else users(host, device, one)


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


def _print_instances(session: Session, outcome: Outcome | None) -> None:
    if outcome is not None:
        lines = [step.describe() for step in outcome.plan.steps] if outcome.is_changed else []
        print_outcome(session, outcome, lines)
