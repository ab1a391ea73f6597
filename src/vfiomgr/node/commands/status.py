"""`vfiomgr node status` and `vfiomgr node release`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import click
from click.shell_completion import CompletionItem

from vfiomgr.cli.options import session_options
from vfiomgr.cli.output import diagnostic_document, note, or_dash, print_document, print_table, say
from vfiomgr.cli.table import wrapped
from vfiomgr.errors import VfiomgrError
from vfiomgr.snapshot.session import Session, pass_session, session_of
from vfiomgr.users.node_agent import (
    CONTROL,
    ClaimStatus,
    DeviceStatus,
    NodeStatus,
    ResourceStatus,
    read_status,
    time_text,
)
from vfiomgr.users.node_agent import release as release_device

_HEADINGS = ("RESOURCE", "DEVICE", "NUMA", "HEALTH", wrapped("USED BY"))


def _complete_device(
    context: click.Context, _parameter: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    """The unhealthy devices of the agent."""
    try:
        found = read_status(_socket(session_of(context)))
    except VfiomgrError:
        return []
    devices = (device for resource in found.resources for device in resource.devices)
    names = [device.id for device in devices if not device.is_healthy]
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


@click.command("status")
@session_options("format", "root")
@pass_session
def status(session: Session) -> None:
    """Show the resources of this node, their devices and pods.

    \b
    Examples:
      vfiomgr node status
      vfiomgr node status --format json
    """
    found = read_status(_socket(session))
    if session.format != "table":
        print_document("NodeStatus", _document(found), session.format)
        return
    rows = [_cells(resource.name, device) for resource, device in _devices(found)]
    rows += [_cells("on demand", device) for device in found.on_demand]
    offered = {d.id for d in (*(device for _, device in _devices(found)), *found.on_demand)}
    rows += [
        ("-", each.device, "-", "-", f"claim {each.claim}")
        for each in found.claims
        if each.device not in offered
    ]
    if rows:
        print_table(_HEADINGS, rows)
    for text in _notes(found):
        note(text)


@click.command("release")
@click.argument("device", metavar="ADDRESS", shell_complete=_complete_device)
@session_options("root")
@pass_session
def release(session: Session, *, device: str) -> None:
    """End the quarantine of a device, and forgive its errors.

    ADDRESS is a device of `vfiomgr node status`; mediated devices are named by UUID.

    \b
    Examples:
      vfiomgr node release 0000:41:00.0
    """
    release_device(_socket(session), device)
    say(f"released {device}")


def _document(found: NodeStatus) -> dict[str, object]:
    return {
        "pid": found.pid,
        "plugin_directory": found.plugin_directory,
        "has_kubelet": found.has_kubelet,
        "error": found.error or None,
        "pods_unknown": found.pods_unknown or None,
        "resources": [
            {
                "name": resource.name,
                "consumer": resource.consumer,
                "registered": resource.is_registered,
                "devices": [_device_document(device) for device in resource.devices],
            }
            for resource in found.resources
        ],
        "dra": found.is_dra_registered,
        "claims": [_claim_document(each) for each in found.claims],
        "on_demand": [_device_document(device) for device in found.on_demand],
        "not_offered": list(map(diagnostic_document, found.notes)),
    }


def _claim_document(found: ClaimStatus) -> dict[str, object]:
    return {
        "device": found.device,
        "claim": found.claim,
        "driver": found.driver,
        "since": None if found.since is None else time_text(found.since),
        "returns": found.returns,
    }


def _device_document(device: DeviceStatus) -> dict[str, object]:
    return {
        "id": device.id,
        "addresses": device.addresses,
        "numa_nodes": device.numa_nodes,
        "healthy": device.is_healthy,
        "used_by": device.used_by or None,
        "allocated_ago": device.allocated_ago,
        "reasons": list(map(diagnostic_document, device.reasons)),
    }


def _socket(session: Session) -> str:
    return session.files.locate(CONTROL)


def _devices(found: NodeStatus) -> Iterator[tuple[ResourceStatus, DeviceStatus]]:
    for resource in found.resources:
        for device in resource.devices:
            yield resource, device


def _cells(resource: str, device: DeviceStatus) -> tuple[str, ...]:
    numa = ",".join(map(str, device.numa_nodes))
    health = "healthy" if device.is_healthy else "unhealthy"
    return (resource, device.id, or_dash(numa), health, or_dash(device.used_by))


def _bound(claims: Iterable[ClaimStatus]) -> Iterator[str]:
    """The devices that were bound for claims, and what the end of the claim does."""
    for each in claims:
        if each.origin:
            yield f"{each.device}: claim {each.claim}, {each.origin}"


def _notes(found: NodeStatus) -> Iterator[str]:
    """What needs attention: errors first."""
    if found.error:
        yield f"cannot scan the host: {found.error}"
    if not found.has_kubelet:
        yield f"no kubelet found in {found.plugin_directory}"
    if found.has_kubelet and found.is_dra_registered is False:
        yield "the DRA driver is not registered with the kubelet"
    if found.pods_unknown:
        yield f"cannot tell which pods have devices: {found.pods_unknown}"
    for resource in found.resources:
        if found.has_kubelet and not resource.is_registered:
            yield f"{resource.name}: not registered with the kubelet"
    yield from _bound(found.claims)
    warnings = (each for each in found.notes if each.severity == "warning")
    devices = (*(device for _, device in _devices(found)), *found.on_demand)
    for each in (*(reason for device in devices for reason in device.reasons), *warnings):
        yield each.summary
        if each.hint:
            yield f"  remedy: {each.hint}"
    if not (found.resources or found.claims or found.on_demand):
        yield "no devices are offered; bind some with: vfiomgr bind ADDRESS"
