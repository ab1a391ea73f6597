"""How Kata learns which devices a pod has: from the kubelet, annotations or the container.

Whether the kubelet could give a pod its devices now is known from the running agent of the node;
without it, and for resources of other device plugins, nothing is known.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from vfiomgr.containers.cdi.document import is_qualified
from vfiomgr.diagnostic import Diagnostic, Remedy
from vfiomgr.kata.explain.context import SETTINGS, SOCKET, chain_break, judged
from vfiomgr.kata.facts import NO_PORT, KataSettings
from vfiomgr.rules.runner import RuleSet, reading, register, rule
from vfiomgr.units import Version, counted
from vfiomgr.users.node_agent import RECORD, DeviceStatus, NodeStatus, ResourceStatus

if TYPE_CHECKING:
    from vfiomgr.kata.explain.context import PodContext, StepState, TraceStep
    from vfiomgr.kata.model import KataRelease
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot

_OWN = "vfiomgr.io"
"""The usual domain of the agent's resources."""
_STATUS = "vfiomgr node status"
_BIND = "bind a device for it: vfiomgr bind ADDRESS"
_ANOTHER_NODE = "use another node"
AGENT_LOG = (
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


def _offer(context: PodContext) -> str:
    """How many devices the node's agent has; nothing is known of other device plugins."""
    agent = context.host.users.running_agent
    known = {} if agent is None else {resource.name: resource for resource in agent.resources}
    texts = []
    for name, _ in context.pod.resources:
        if name in known:
            devices = _devices(context, known[name])
            available = len(_available(context, devices))
            texts.append(f"{name}: {counted(len(devices), 'device')}, {available} available")
    if texts:
        return f"the node agent offers {', '.join(texts)}"
    return "not checked: whether a device plugin offers the resource (kubectl describe node)"


def _pending(context: PodContext) -> Iterator[Diagnostic]:
    """Why the pod would stay Pending on this node."""
    agent = context.host.users.running_agent
    if agent is None:
        return
    known = {resource.name: resource for resource in agent.resources}
    domains = {_OWN, *(name.partition("/")[0] for name in known)}
    of_classes = () if context.claims is None else context.claims.names
    for name, count in context.pod.resources:
        if name in of_classes:
            continue
        if name in known:
            yield from _not_registered(known[name])
            yield from _too_few(context, known[name], count)
        elif name.partition("/")[0] in domains:
            yield _not_offered(agent, name)


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
            Remedy(AGENT_LOG, joint="; "),
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
    belong = "belongs" if len(taken) == 1 else "belong"
    others = f"{len(taken)} {belong} to {'pod' if is_one else 'pods'} {names}"
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


_PLUGIN = "nvidia/k8s-device-plugin"
_NO_REQUEST = "the pod requests no device, neither by a resource nor by a CDI annotation"
_GATE_OPEN = Version(1, 34)
_LOSES_DRIVERS, _KEEPS_DRIVERS = Version(1, 34), Version(1, 34, 2)


def request(context: PodContext) -> TraceStep:
    """The step from a resource to a CDI name."""
    settings = context.settings
    what, looked = _NO_REQUEST, tuple[str, ...]()
    if context.pod.resources or context.pod.cdi_names:
        what = _describe_request(context)
    elif context.pod.all_claims:
        names = ", ".join(context.pod.all_claims)
        what = "; ".join(context.claims.parts if context.claims else (f"claim {names}",))
    if settings is not None:
        looked = (f"{settings.path}: {SOCKET} = {settings.pod_resource_api_sock!r}",)
    is_unknown = context.channel in ("unknown", "none") and context.requests_devices
    state: StepState = "unknown" if is_unknown else "ok"
    breaks = (*OFFER_RULES.find(context), *RULES.find(context))
    return judged("request", what, looked, breaks, state)


def request_of_others(context: PodContext) -> TraceStep:
    """The request of a pod that Kata does not run: the kubelet and a plugin or driver serve it."""
    spec = context.pod
    claims = context.claims
    asked = [*spec.all_claims, *(name for name, _ in spec.resources)]
    known = () if claims is None else claims.names
    others = [name for name in asked if name not in known]
    parts = [_offer(context)] if any(name not in spec.all_claims for name in others) else []
    parts += () if claims is None else claims.parts
    if claims is None and spec.all_claims:
        names = ", ".join(spec.all_claims)
        parts.append(f"not checked: claim {names} (kubectl describe resourceclaim)")
    agent = context.host.users.running_agent
    offered = {resource.name for resource in agent.resources} if agent is not None else ()
    is_known = all(name in offered for name in others) and (claims is None or claims.is_known)
    state: StepState = "ok" if is_known else "unknown"
    return judged("request", parts or (_NO_REQUEST,), (), OFFER_RULES.find(context), state)


def _describe_request(context: PodContext) -> str:
    asked = ", ".join(f"{item.kind} ({item.count})" for item in context.requests)
    asked = asked or "the annotated devices"
    match context.channel:
        case "kubelet":
            return (
                f"Kata asks the kubelet which devices of {asked} the pod has (PodResources; "
                "before Kubernetes 1.34 with the feature gate KubeletPodResourcesGet), and takes "
                f"the plugin's device ID for the name of a CDI device; {_offer(context)}"
            )
        case "annotations":
            return f"annotations of the pod name devices: {', '.join(context.pod.cdi_names)}"
        case "container":
            has = f"the container has device nodes of {asked} from its device plugin, which are "
            if not context.pod.resources:
                has = f"annotations of the pod name {asked}, but only nodes of a container are "
            return f"{has}hot-plugged"
        case "unknown":
            return (
                f"the pod requests {asked}; Kata finds devices by its configuration (vfio_mode, "
                "cold_plug_vfio)"
            )
    settings = context.settings
    if settings is not None and context.cold_plug == NO_PORT:
        return f"Kata does not look for devices of {asked}: cold_plug_vfio is {NO_PORT}"
    return f"Kata cannot find out which devices of {asked} the pod has"


def _unallocated(context: PodContext) -> Iterator[Diagnostic]:
    """Why a claim gets no device of this host."""
    if context.claims is not None:
        yield from context.claims.breaks


def _claims(context: PodContext) -> Iterator[Diagnostic]:
    """Number 2."""
    claims = context.pod.all_claims
    if claims:
        yield chain_break(
            "kata-claim",
            context.pod.name,
            f"claim {', '.join(claims)} uses dynamic resource allocation (DRA), which both "
            "runtimes of Kata ignore: they only read devices of device plugins",
            "request the resource of a device plugin in resources.limits instead: vfiomgr kata pod",
            evidence=("kata-containers/kata-containers#13322",),
        )


def _ways_to_name(release: KataRelease) -> str:
    """How a release learns the devices of a pod that are plugged before its guest starts."""
    if release.knows("runtime", SOCKET):
        return f'set {SOCKET} = "/var/lib/kubelet/pod-resources/kubelet.sock": vfiomgr kata config'
    first = release.first("runtime", SOCKET)
    return (
        "name the device in an annotation of the pod (cdi.k8s.io/gpu: KIND=NAME), or use Kata "
        f"{first} or later, which asks the kubelet ({SOCKET})"
    )


def _annotated_in_vain(context: PodContext) -> Iterator[Diagnostic]:
    """CDI names of a pod without Kata, or with a release that plugs what its containers have.

    The CRI of containerd and CRI-O take devices from the annotations of a container and its
    CDIDevices, which the kubelet fills, not from those of a pod (containerd/containerd#7329).
    """
    if not context.pod.cdi_names:
        return
    if context.is_kata and (context.settings is None or context.release.has_plug_keys):
        return
    who, or_else, gets = "no container runtime", "", "they get"
    if context.is_kata:
        who = f"neither the container runtime nor {context.release}"
        first = context.release.first("hypervisor", "cold_plug_vfio")
        or_else, gets = f", or use Kata {first} or later", "its guest gets"
    only = "" if context.pod.resources else f": {gets} no device"
    yield chain_break(
        "kata-annotations-unread",
        context.pod.name,
        f"{who} reads CDI annotations of a pod{only}",
        f"request the resource of a device plugin in resources.limits{or_else}",
        is_certain=not context.pod.resources,
    )


def _not_recorded(context: PodContext) -> Iterator[Diagnostic]:
    """A kubelet to which no plugin has registered since its record was removed.

    It then takes no resource for one of a device plugin, and starts pods without devices
    (pkg/kubelet/cm/devicemanager/manager.go; kubernetes/kubernetes#116125).
    """
    if context.lacks_checkpoint and context.pod.resources:
        names = ", ".join(name for name, _ in context.pod.resources)
        yield chain_break(
            "pod-no-checkpoint",
            RECORD,
            f"the kubelet has no record of devices ({RECORD}): no device plugin has registered "
            f"with it since, and pods that it started meanwhile run without {names}",
            "start the device plugin, then delete pods that run without their devices, so that "
            "they are created again",
            is_certain=False,
        )
    empty = [name for name, _ in context.pod.resources if name in context.empty_resources]
    if empty:
        yield chain_break(
            "pod-no-healthy-device",
            RECORD,
            f"the device plugin of {empty[0]} has registered no healthy device with the kubelet",
            "restart the plugin's pod on this node, and read its log if it offers none again "
            "(config-manager of NVIDIA's plugin 0.18.2 may signal it while it starts)",
            is_certain=False,
            evidence=(f"{RECORD}: RegisteredDevices of {empty[0]} is empty",),
        )
    elif context.lacks_plugins and not context.lacks_checkpoint and context.pod.resources:
        names = ", ".join(name for name, _ in context.pod.resources)
        yield chain_break(
            "pod-no-plugin",
            RECORD.parent,
            f"no device plugin has a socket in {RECORD.parent}: none has registered since the "
            f"kubelet started, and it refuses pods with {names} (UnexpectedAdmissionError)",
            "start the device plugin; a controller (Deployment) creates refused pods again, others "
            "must be deleted and created",
            is_certain=False,
        )


def _unnamed(context: PodContext, settings: KataSettings) -> Iterator[Diagnostic]:
    if context.cold_plug == NO_PORT:
        return
    wants = _ways_to_name(context.release)
    if settings.pod_resource_api_sock and not context.release.knows("runtime", SOCKET):
        first = context.release.first("runtime", SOCKET)
        what = f"{context.release} does not support {SOCKET} (added in {first})"
        is_certain = not context.pod.cdi_names
        yield chain_break("kata-no-pod-resources", SOCKET, what, wants, is_certain=is_certain)
    elif context.channel == "annotations" and context.asks_kubelet:
        yield _overruled(context, settings.pod_resource_api_sock)
    elif context.channel == "annotations" and context.is_rs:
        yield chain_break(
            "kata-annotations-unread",
            context.pod.name,
            "runtime-rs gets devices from the kubelet's socket and from nodes of the sandbox "
            "(prepare_coldplug_cdi_devices); its sources do not seem to read CDI annotations",
            wants,
            is_certain=False,
        )
    elif context.channel == "none" and context.pod.resources:
        has_key = context.release.knows("runtime", SOCKET)
        missing = f"{SOCKET} is not set" if has_key else f"{context.release} asks no kubelet"
        yield chain_break(
            "kata-devices-unnamed",
            SOCKET,
            f"{missing}, and no annotation names a device: the guest starts without devices",
            wants,
            is_certain=has_key,
        )


def _no_socket(context: PodContext, settings: KataSettings) -> Iterator[Diagnostic]:
    if context.channel == "kubelet" and context.has_kubelet_socket is False:
        yield chain_break(
            "kata-kubelet-socket",
            settings.pod_resource_api_sock,
            "the kubelet socket of Kata's configuration does not exist: "
            f"{settings.pod_resource_api_sock}",
            f"start the kubelet; if its directory is different, set {SOCKET} in "
            f"{settings.path}: vfiomgr kata config",
            is_certain=context.is_machine,
        )


def _closed_gate(context: PodContext) -> Iterator[Diagnostic]:
    """Whether the kubelet answers Get of PodResources (on by default since Kubernetes 1.34)."""
    kubelet = context.kubelet
    if kubelet is None or kubelet.problem or context.channel != "kubelet":
        return
    gate, version = kubelet.pod_resources_get, kubelet.version
    if gate or (gate is None and version is not None and version >= _GATE_OPEN):
        return
    state = "does not enable" if gate is None else "disables"
    when = ", which Kubernetes before 1.34 needs" if gate is None else ""
    yield chain_break(
        "kata-kubelet-gate",
        kubelet.source,
        f"{kubelet.source} {state} the feature gate KubeletPodResourcesGet{when}: without it "
        "the kubelet does not report the devices of a pod",
        "set featureGates: {KubeletPodResourcesGet: true} in the kubelet's configuration, and "
        "restart the kubelet",
        is_certain=gate is False,
    )


def _overruled(context: PodContext, socket: str) -> Diagnostic:
    """Annotations only work without a kubelet (coldPlugDevices, create.go of the Go shim)."""
    names = filter(is_qualified, context.pod.cdi_names)
    kinds = dict.fromkeys(name.partition("=")[0] for name in names)
    limits = ", ".join(f"{kind}: 1" for kind in kinds)
    otherwise = "" if context.is_rs else "; without a socket, annotations are used"
    return chain_break(
        "kata-annotations-overruled",
        SOCKET,
        f"{SOCKET} is {socket}: if a kubelet answers there, Kata uses only its devices, and a "
        f"pod that requests no resource has none{otherwise}",
        f"request the resource in resources.limits{f' ({limits})' if limits else ''}, or use a "
        "handler without a socket in its configuration: vfiomgr kata config --no-pod-resources",
        is_certain=False,
    )


def _unresolvable(context: PodContext) -> Iterator[Diagnostic]:
    """Number 3: one resource without a specification makes the pod fail."""
    foreign = [item for item in context.requests if item.kind not in context.kinds]
    if context.channel != "kubelet" or len(foreign) == len(context.requests):
        return
    for item in foreign:
        yield chain_break(
            "kata-foreign-resource",
            item.kind,
            f"{item.kind} belongs to another device plugin and has no CDI specification: the pod "
            "fails with 'unresolvable CDI devices', because Kata looks up each of its devices",
            f"write a specification of kind {item.kind} with the plugin's device IDs, or request "
            f"{item.kind} in another pod",
        )


_NVIDIA = "10de"
_HOST_RESOURCES = {
    "nvidia.com/gpu": _NVIDIA,
    "nvidia.com/mig-": _NVIDIA,
    "amd.com/gpu": "1002",
    "gpu.intel.com/i915": "8086",
    "gpu.intel.com/xe": "8086",
    "habana.ai/gaudi": "1da3",
}
"""How resources of the device plugins for host drivers begin, and the vendor of their devices."""


def on_host_driver(host: HostSnapshot, name: str) -> list[PciDevice]:
    """The devices of a resource that a device plugin for their host drivers offers.

    Empty where a device of the vendor is on VFIO: a plugin may offer it by this name.
    """
    vendor = next((v for start, v in _HOST_RESOURCES.items() if name.startswith(start)), "")
    alike = [d for d in host.devices if d.vendor_id == vendor and d.is_graphics_or_accelerator]
    return [] if any(d.is_for_guests for d in alike) else [d for d in alike if d.driver]


def _of_host_driver(context: PodContext) -> Iterator[Diagnostic]:
    """A resource of devices that the host uses: the plugin has no VFIO node for the guest."""
    for name, _ in context.pod.resources:
        own = on_host_driver(context.host, name)
        if not own:
            continue
        plugin = (
            ", or nvidia.com/pgpu of NVIDIA's sandbox-device-plugin"
            if own[0].vendor_id == _NVIDIA
            else ""
        )
        yield chain_break(
            "pod-host-resource",
            name,
            f"{name} is the resource of a device plugin for the driver {own[0].driver}: it gives "
            "the container nodes of the host, and no VFIO device that Kata could pass to its guest",
            f"bind the device to vfio-pci (vfiomgr bind {own[0].address}) and request a resource "
            f"of VFIO devices: {_OWN}/NAME of vfiomgr's node agent{plugin}",
            "run the pod without Kata",
            evidence=tuple(f"{device} is on {device.driver}" for device in own[:_NOTES]),
        )


def _twice(context: PodContext) -> Iterator[Diagnostic]:
    if context.channel == "kubelet" and context.pod.cdi_names:
        yield chain_break(
            "kata-named-twice",
            context.pod.name,
            "devices come from annotations and from the kubelet: a device in both is injected "
            "twice",
            "remove the cdi.k8s.io annotations: the kubelet's answer is enough",
            is_certain=False,
            evidence=("kata-containers/kata-containers#11125",),
        )


def _unregistered(context: PodContext) -> Iterator[Diagnostic]:
    """Kubelets that lose the registration of DRA drivers (kubernetes/kubernetes#133920)."""
    version = None if context.kubelet is None else context.kubelet.version
    if (
        version is not None
        and _LOSES_DRIVERS <= version < _KEEPS_DRIVERS
        and context.pod.all_claims
    ):
        yield chain_break(
            "claim-kubelet",
            context.pod.name,
            f"kubelet {version} may lose the registration of DRA drivers (1.34.0 and 1.34.1): "
            "'DRA driver is not registered'",
            f"upgrade the kubelet to {_KEEPS_DRIVERS}",
            is_certain=False,
            evidence=("kubernetes/kubernetes#133920",),
        )


def _strategy(context: PodContext) -> str | None:
    """How NVIDIA's device plugin, if it is this pod, passes devices; None if unknown."""
    for each in context.pod.containers:
        if _PLUGIN in each.image and each.option("CONFIG_FILE", "") == "":
            return each.option("DEVICE_LIST_STRATEGY", "envvar")
    return None


def _refused(context: PodContext) -> Iterator[Diagnostic]:
    """A device list that NVIDIA's container runtime refuses (NVIDIA/nvidia-container-toolkit)."""
    toolkit, strategy = context.toolkit, _strategy(context)
    if toolkit is None or strategy is None:
        return
    refused = dict(toolkit.refused)
    if not all(one in refused for one in strategy.split(",")):
        return
    others = [one for one in ("volume-mounts", "envvar") if one not in refused]
    key = refused[strategy.partition(",")[0]]
    yield chain_break(
        "device-list-strategy",
        context.pod.name,
        f"the plugin passes devices as {strategy}, which {toolkit.source} refuses ({key}): pods "
        "that are not privileged start without their GPUs",
        f"set DEVICE_LIST_STRATEGY={others[0]} for the plugin (Helm: deviceListStrategy)"
        if others
        else "",
        f"set {key.partition(' ')[0]} = true in that file",
        is_certain=False,
    )


OFFER_RULES: RuleSet[PodContext] = register(
    RuleSet(
        "a pod: its requests",
        rules=(
            rule(
                _pending,
                "pod-resource-not-listed",
                "pod-resource-not-offered",
                "pod-too-few-devices",
                "pod-device-unhealthy",
                "pod-devices-taken",
            ),
            rule(_unallocated, "claim-no-device", "claim-not-served", "claim-refused"),
            rule(_not_recorded, "pod-no-checkpoint", "pod-no-plugin", "pod-no-healthy-device"),
            rule(_unregistered, "claim-kubelet"),
            rule(_annotated_in_vain, "kata-annotations-unread"),
            rule(_refused, "device-list-strategy"),
        ),
    )
)
RULES: RuleSet[PodContext] = register(
    RuleSet(
        "a pod with Kata: its requests",
        rules=(
            rule(_claims, "kata-claim"),
            reading(SETTINGS, _no_socket, "kata-kubelet-socket"),
            rule(_closed_gate, "kata-kubelet-gate"),
            reading(
                SETTINGS,
                _unnamed,
                "kata-no-pod-resources",
                "kata-annotations-overruled",
                "kata-annotations-unread",
                "kata-devices-unnamed",
            ),
            rule(_unresolvable, "kata-foreign-resource"),
            rule(_of_host_driver, "pod-host-resource"),
            rule(_twice, "kata-named-twice"),
        ),
    )
)
