"""Whether the kubelet could give a pod its devices now, as the running agent of the node reports.

Without an agent, and for resources of other device plugins, nothing is known.
"""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING

from vfiomgr.diagnostic import Remedy
from vfiomgr.kata.explain.model import chain_break
from vfiomgr.units import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vfiomgr.diagnostic import Diagnostic
    from vfiomgr.kata.explain.context import PodContext
    from vfiomgr.users.node_agent import DeviceStatus, NodeStatus, ResourceStatus

_OWN = "vfiomgr.io"
"""The usual domain of the agent's resources."""
_STATUS = "vfiomgr node status"
_BIND = "bind a device for it: vfiomgr bind ADDRESS"
_ANOTHER_NODE = "use another node"
_LOG = (
    "read the log of the agent: journalctl -u vfiomgr-node, or of its pod: "
    "kubectl --namespace vfiomgr logs daemonset/vfiomgr-node"
)
_NOTES = 3
_RANDOM = "-[a-z0-9]{5}"
_SUFFIXES = {
    "Pod": "",
    "Deployment": f"-[a-z0-9]+{_RANDOM}",
    "StatefulSet": r"-\d+",
    "Job": rf"(?:-\d+)?{_RANDOM}",
    "CronJob": rf"-\d+(?:-\d+)?{_RANDOM}",
}
"""What follows the name of an object in the names of its pods; _RANDOM for other kinds.

Pods of an indexed Job also have their index.
"""


def numbers(context: PodContext) -> str:
    """`vfiomgr.io/A40: 3 devices, 1 available`, of each resource that the agent offers."""
    found = (
        (resource, _devices(context, resource))
        for resource in _resources(context)
        if resource is not None
    )
    return ", ".join(
        f"{resource.name}: {counted(len(devices), 'device')}, "
        f"{len(_available(context, devices))} available"
        for resource, devices in found
    )


def breaks(context: PodContext) -> Iterator[Diagnostic]:
    """Why the pod would stay Pending on this node."""
    agent = context.host.users.running_agent
    if agent is None:
        return
    for name, count in context.pod.resources:
        resource = _named(agent, name)
        if resource is not None:
            yield from _not_registered(resource)
            yield from _too_few(context, resource, count)
        elif name.partition("/")[0] in {_OWN, *(r.name.partition("/")[0] for r in agent.resources)}:
            yield _not_offered(agent, name)


def _resources(context: PodContext) -> Iterator[ResourceStatus | None]:
    agent = context.host.users.running_agent
    for name, _ in context.pod.resources if agent is not None else ():
        yield None if agent is None else _named(agent, name)


def _named(agent: NodeStatus, name: str) -> ResourceStatus | None:
    return next((resource for resource in agent.resources if resource.name == name), None)


def _not_offered(agent: NodeStatus, name: str) -> Diagnostic:
    known = [resource.name for resource in agent.resources]
    near = difflib.get_close_matches(name, known, n=1)
    offers = f"this node offers {', '.join(known) or 'no resource'}"
    return chain_break(
        "pod-resource-not-offered",
        name,
        f"no such resource on this node: {name}",
        f"did you mean {near[0]}?" if near else "",
        Remedy(_BIND, joint=" "),
        _ANOTHER_NODE,
        evidence=(offers, *(note.summary for note in agent.notes[:_NOTES])),
    )


def _not_registered(resource: ResourceStatus) -> Iterator[Diagnostic]:
    if not resource.is_registered:
        yield chain_break(
            "pod-resource-not-listed",
            resource.name,
            f"the kubelet does not list {resource.name}",
            "start the kubelet",
            Remedy(_LOG, joint="; "),
        )


def _too_few(context: PodContext, resource: ResourceStatus, count: int) -> Iterator[Diagnostic]:
    devices = _devices(context, resource)
    available = _available(context, devices)
    requested = context.only_name or ", ".join(map(str, sorted(context.only)))
    if requested and not devices:
        yield _not_of(context, resource, requested)
    elif len(devices) < count:
        yield chain_break(
            "pod-too-few-devices",
            resource.name,
            f"the pod requests {counted(count, 'device')} of {resource.name}, and this node has "
            f"{len(devices) or 'none'}",
            f"request at most {len(devices)}" if devices else _BIND,
            "use a node with more",
        )
    elif len(available) < count:
        yield from map(_unhealthy, (device for device in devices if not device.is_healthy))
        taken = [d for d in devices if d.is_healthy and d not in available]
        if taken:
            yield _taken(
                resource, f"{count} of {counted(len(devices), 'device')}", available, taken
            )


def _not_of(context: PodContext, resource: ResourceStatus, requested: str) -> Diagnostic:
    return chain_break(
        "pod-resource-not-offered",
        requested,
        f"{requested} is not a device of {resource.name}",
        f"bind it: vfiomgr bind {requested}" if context.only else "",
        Remedy(f"{_STATUS} lists the devices of each resource", joint="; "),
    )


def _taken(
    resource: ResourceStatus,
    requested: str,
    available: Sequence[DeviceStatus],
    taken: Sequence[DeviceStatus],
) -> Diagnostic:
    pods = tuple(dict.fromkeys(device.pod.rpartition("/")[0] for device in taken))
    names, is_one = ", ".join(pods), len(pods) == 1
    left = f"{len(available) or 'none'} {'are' if len(available) > 1 else 'is'} available"
    others = (
        f"{len(taken)} belong{'s' if len(taken) == 1 else ''} to pod{'' if is_one else 's'} {names}"
    )
    end = f"pod {names} ends, delete it" if is_one else "one of these pods ends, delete one"
    return chain_break(
        "pod-devices-taken",
        resource.name,
        f"the pod requests {requested} of {resource.name}, and {left}: {others}",
        f"wait until {end}",
        _ANOTHER_NODE,
        evidence=tuple(f"{d.id}: pod {d.pod.rpartition('/')[0]}" for d in taken),
    )


def _unhealthy(device: DeviceStatus) -> Diagnostic:
    reasons = "; ".join(reason.summary for reason in device.reasons) or "no reason is known"
    remedies = dict.fromkeys(reason.hint for reason in device.reasons if reason.hint)
    return chain_break(
        "pod-device-unhealthy",
        device.id,
        f"{device.id} is unhealthy: {reasons}",
        "; ".join(remedies) or _STATUS,
    )


def _devices(context: PodContext, resource: ResourceStatus) -> list[DeviceStatus]:
    """The devices of a resource; of a requested device only that one."""
    wanted = {str(address) for address in context.only}
    return [
        device
        for device in resource.devices
        if (not wanted or wanted.intersection(device.addresses))
        and context.only_name in (None, device.id)
    ]


def _available(context: PodContext, devices: Sequence[DeviceStatus]) -> list[DeviceStatus]:
    """The devices that the pod could get, or has already."""
    return [d for d in devices if d.is_healthy and (not d.pod or _is_same_pod(context, d.pod))]


def _is_same_pod(context: PodContext, pod: str) -> bool:
    """Whether it is the pod of the file, or one that the object of the file creates."""
    spec = context.pod
    namespace, name, _ = pod.split("/")
    suffix = _SUFFIXES.get(spec.kind, _RANDOM)
    is_named_so = re.fullmatch(f"{re.escape(spec.name)}{suffix}", name) is not None
    return namespace == spec.namespace and is_named_so
