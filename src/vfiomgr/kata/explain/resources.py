"""How Kata learns which devices a pod has: from the kubelet, annotations or the container."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from vfiomgr.containers.cdi.grammar import is_qualified
from vfiomgr.kata.explain import offered
from vfiomgr.kata.explain.model import chain_break, judged
from vfiomgr.kata.settings import NO_PORT
from vfiomgr.units import Version
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.diagnostic import Diagnostic
    from vfiomgr.kata.explain.context import PodContext
    from vfiomgr.kata.explain.model import StepState, TraceStep

_SOCKET = "pod_resource_api_sock"
_GATE_OPEN = Version(1, 34)
_NOTHING = "the pod requests no device, neither by a resource nor by a CDI annotation"
Channel = Literal["kubelet", "annotations", "container", "none", "unknown"]
"""PodResources, cdi.k8s.io annotations, device nodes of the container (hot plug)."""


class Request(Value):
    """Devices of one kind that a pod requests, with their names."""

    kind: str
    count: int
    names: tuple[str, ...] = ()
    """The names from annotations; the kubelet chooses the others."""


def channel(situation: PodContext) -> Channel:
    """Where Kata looks for devices."""
    settings = situation.settings
    if settings is None:
        return "annotations" if situation.pod.cdi_names else "unknown"
    is_annotated_alone = bool(situation.pod.cdi_names) and not situation.pod.resources
    if settings.cold_plug != NO_PORT and _asks_kubelet(situation) and not is_annotated_alone:
        return "kubelet"
    if settings.cold_plug != NO_PORT and situation.pod.cdi_names:
        return "annotations"
    return "container" if situation.is_hot else "none"


def _asks_kubelet(situation: PodContext) -> bool:
    settings = situation.settings
    has_socket = settings is not None and bool(settings.pod_resource_api_sock)
    return has_socket and situation.knows("runtime", _SOCKET)


def requests(situation: PodContext) -> tuple[Request, ...]:
    """The requested devices by kind, in the order of the pod."""
    found = {name: Request(name, count) for name, count in situation.pod.resources}
    if channel(situation) != "kubelet":
        for text in filter(is_qualified, situation.pod.cdi_names):
            kind, _, name = text.partition("=")
            before = found.get(kind)
            names = (*(before.names if before else ()), name)
            found[kind] = Request(kind, max(len(names), before.count if before else 0), names)
    return tuple(found.values())


def request(situation: PodContext) -> TraceStep:
    """The step from a resource to a CDI name."""
    how = channel(situation)
    pod = situation.pod
    what = _told(situation) if pod.resources or pod.cdi_names else _NOTHING
    state: StepState = "unknown" if how in ("unknown", "none") else "ok"
    return judged("request", what, _looked_at(situation), _breaks(situation), state)


def _told(situation: PodContext) -> str:
    asked = ", ".join(f"{item.kind} ({item.count})" for item in requests(situation))
    asked = asked or "the annotated devices"
    match channel(situation):
        case "kubelet":
            return (
                f"Kata asks the kubelet which devices of {asked} the pod has (PodResources; "
                "before Kubernetes 1.34 with the feature gate KubeletPodResourcesGet); "
                f"{_supply(situation)}"
            )
        case "annotations":
            return f"annotations of the pod name devices: {', '.join(situation.pod.cdi_names)}"
        case "container":
            return (
                f"the container has device nodes of {asked} from its device plugin, which are "
                "hot-plugged"
            )
        case "unknown":
            return (
                f"the pod requests {asked}; Kata finds devices by its configuration (vfio_mode, "
                "cold_plug_vfio)"
            )
    settings = situation.settings
    if settings is not None and settings.cold_plug == NO_PORT:
        return f"Kata does not look for devices of {asked}: cold_plug_vfio is {NO_PORT}"
    return f"Kata cannot find out which devices of {asked} the pod has"


def _supply(situation: PodContext) -> str:
    """How many devices the node's agent has; nothing is known of other device plugins."""
    known = offered.numbers(situation)
    if known:
        return f"the node agent offers {known}"
    return "not checked: whether a device plugin offers the resource (kubectl describe node)"


def _looked_at(situation: PodContext) -> tuple[str, ...]:
    settings = situation.settings
    if settings is None:
        return ()
    return (f"{settings.path}: {_SOCKET} = {settings.pod_resource_api_sock!r}",)


def _breaks(situation: PodContext) -> Iterator[Diagnostic]:
    yield from offered.breaks(situation)
    yield from _claims(situation)
    yield from _no_socket(situation)
    yield from _closed_gate(situation)
    yield from _nobody_tells(situation)
    yield from _unresolvable(situation)
    yield from _twice(situation)


def _claims(situation: PodContext) -> Iterator[Diagnostic]:
    """Number 2."""
    spec = situation.pod
    used = [name for container in spec.containers for name in container.claims]
    claims = tuple(dict.fromkeys((*spec.claims, *used)))
    if claims:
        yield chain_break(
            "kata-claim",
            situation.pod.name,
            f"claim {', '.join(claims)} uses dynamic resource allocation (DRA), which both "
            "runtimes of Kata ignore: they only read devices of device plugins",
            "request the resource of a device plugin in resources.limits instead: vfiomgr kata pod",
            evidence=("kata-containers/kata-containers#13322",),
        )


def _nobody_tells(situation: PodContext) -> Iterator[Diagnostic]:
    settings = situation.settings
    if settings is None or settings.cold_plug == "no-port":
        return
    wants = f'set {_SOCKET} = "/var/lib/kubelet/pod-resources/kubelet.sock": vfiomgr kata config'
    if settings.pod_resource_api_sock and not situation.knows("runtime", _SOCKET):
        first = situation.keys.first(situation.release.runtime, "runtime", _SOCKET)
        what = f"{situation.release} does not support {_SOCKET} (added in {first})"
        is_certain = not situation.pod.cdi_names
        remedy = "name the device in an annotation (cdi.k8s.io/gpu: KIND=NAME), or use a later Kata"
        yield chain_break("kata-no-pod-resources", _SOCKET, what, remedy, is_certain=is_certain)
    elif channel(situation) == "annotations" and _asks_kubelet(situation):
        yield _overruled(situation, settings.pod_resource_api_sock)
    elif channel(situation) == "annotations" and situation.is_rs:
        yield chain_break(
            "kata-annotations-unread",
            situation.pod.name,
            "runtime-rs gets devices from the kubelet's socket and from nodes of the sandbox "
            "(prepare_coldplug_cdi_devices); its sources do not seem to read CDI annotations",
            wants,
            is_certain=False,
        )
    elif channel(situation) == "none" and situation.pod.resources:
        yield chain_break(
            "kata-devices-unnamed",
            _SOCKET,
            f"{_SOCKET} is not set, and no annotation names a device: the guest starts without "
            "devices",
            wants,
        )


def _no_socket(situation: PodContext) -> Iterator[Diagnostic]:
    settings = situation.settings
    if settings is None or channel(situation) != "kubelet":
        return
    if situation.has_kubelet_socket is False:
        yield chain_break(
            "kata-kubelet-socket",
            settings.pod_resource_api_sock,
            "the kubelet socket of Kata's configuration does not exist: "
            f"{settings.pod_resource_api_sock}",
            f"start the kubelet; if its directory is different, set {_SOCKET} in "
            f"{settings.path}: vfiomgr kata config",
            is_certain=situation.is_machine,
        )


def _closed_gate(situation: PodContext) -> Iterator[Diagnostic]:
    """Whether the kubelet answers Get of PodResources (on by default since Kubernetes 1.34)."""
    kubelet = situation.kubelet
    if kubelet is None or kubelet.problem or channel(situation) != "kubelet":
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


def _overruled(situation: PodContext, socket: str) -> Diagnostic:
    """Annotations only work without a kubelet (coldPlugDevices, create.go of the Go shim)."""
    names = filter(is_qualified, situation.pod.cdi_names)
    kinds = dict.fromkeys(name.partition("=")[0] for name in names)
    limits = ", ".join(f"{kind}: 1" for kind in kinds)
    otherwise = "" if situation.is_rs else "; without a socket, annotations are used"
    return chain_break(
        "kata-annotations-overruled",
        _SOCKET,
        f"{_SOCKET} is {socket}: if a kubelet answers there, Kata uses only its devices, and a "
        f"pod that requests no resource has none{otherwise}",
        f"request the resource in resources.limits{f' ({limits})' if limits else ''}, or use a "
        "handler without a socket in its configuration: vfiomgr kata config --no-pod-resources",
        is_certain=False,
    )


def _unresolvable(situation: PodContext) -> Iterator[Diagnostic]:
    """Number 3: one resource without a specification makes the pod fail."""
    if channel(situation) != "kubelet":
        return
    known = [item for item in requests(situation) if item.kind in situation.kinds]
    for item in requests(situation):
        if item.kind in situation.kinds or not known:
            continue
        yield chain_break(
            "kata-foreign-resource",
            item.kind,
            f"{item.kind} belongs to another device plugin and has no CDI specification: the pod "
            "fails with 'unresolvable CDI devices', because Kata looks up each of its devices",
            f"write a specification of kind {item.kind} with the plugin's device IDs, or request "
            f"{item.kind} in another pod",
        )


def _twice(situation: PodContext) -> Iterator[Diagnostic]:
    if channel(situation) == "kubelet" and situation.pod.cdi_names:
        yield chain_break(
            "kata-named-twice",
            situation.pod.name,
            "devices come from annotations and from the kubelet: a device in both is injected "
            "twice",
            "remove the cdi.k8s.io annotations: the kubelet's answer is enough",
            is_certain=False,
            evidence=("kata-containers/kata-containers#11125",),
        )
