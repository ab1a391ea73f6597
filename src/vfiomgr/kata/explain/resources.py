"""How Kata learns which devices a pod has: the kubelet, annotations or the container tell."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from vfiomgr.containers.cdi.names import is_qualified
from vfiomgr.kata.explain.model import chain_break, judged
from vfiomgr.kata.settings import NO_PORT
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.diagnostic import Diagnostic
    from vfiomgr.kata.explain.context import PodContext
    from vfiomgr.kata.explain.model import StepState, TraceStep

_SOCKET = "pod_resource_api_sock"
_NOTHING = "the pod asks for no device of a device plugin and names none: there is none to tell of"
Channel = Literal["kubelet", "annotations", "container", "none", "unknown"]
"""PodResources, cdi.k8s.io annotations, device nodes of the container (hot plug)."""


class Request(Value):
    """Devices of one kind that a pod asks for, with the names that it has for them."""

    kind: str
    count: int
    names: tuple[str, ...] = ()
    """Where annotations name them; the kubelet chooses the others."""


def channel(situation: PodContext) -> Channel:
    """Where Kata looks."""
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
    """What is asked for, by kind, in the order of the pod."""
    found = {name: Request(name, count) for name, count in situation.pod.resources}
    if channel(situation) != "kubelet":
        for text in filter(is_qualified, situation.pod.cdi_names):
            kind, _, name = text.partition("=")
            before = found.get(kind)
            names = (*(before.names if before else ()), name)
            found[kind] = Request(kind, max(len(names), before.count if before else 0), names)
    return tuple(found.values())


def request(situation: PodContext) -> TraceStep:
    """The step in which a resource becomes a name of CDI."""
    how = channel(situation)
    pod = situation.pod
    what = _told(situation) if pod.resources or pod.cdi_names else _NOTHING
    state: StepState = "unknown" if how in ("unknown", "none") else "ok"
    return judged("request", what, _looked_at(situation), _breaks(situation), state)


def _told(situation: PodContext) -> str:
    asked = ", ".join(f"{item.kind} ({item.count})" for item in requests(situation))
    asked = asked or "what is annotated"
    match channel(situation):
        case "kubelet":
            return (
                f"the kubelet tells Kata which devices of {asked} the pod has (PodResources; "
                "before Kubernetes 1.34 behind the feature gate KubeletPodResourcesGet); not "
                "checked: whether a device plugin offers it (kubectl describe node)"
            )
        case "annotations":
            return f"annotations of the pod name devices: {', '.join(situation.pod.cdi_names)}"
        case "container":
            return f"the container has nodes of {asked} by its device plugin, which are hot-plugged"
        case "unknown":
            return f"the pod asks for {asked}; how Kata learns which ones is in its configuration"
    settings = situation.settings
    if settings is not None and settings.cold_plug == NO_PORT:
        return f"Kata does not look which devices of {asked} the pod has, since it plugs none"
    return f"nothing tells Kata which devices of {asked} the pod has"


def _looked_at(situation: PodContext) -> tuple[str, ...]:
    settings = situation.settings
    if settings is None:
        return ()
    return (f"{settings.path}: {_SOCKET} = {settings.pod_resource_api_sock!r}",)


def _breaks(situation: PodContext) -> Iterator[Diagnostic]:
    yield from _claims(situation)
    yield from _no_socket(situation)
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
            f"the claim {', '.join(claims)} is dynamic resource allocation (DRA): both runtimes of "
            "Kata read the devices of device plugins alone, and ignore it",
            "ask for the resource of a device plugin in resources.limits instead: vfiomgr kata pod",
            evidence=("kata-containers/kata-containers#13322",),
        )


def _nobody_tells(situation: PodContext) -> Iterator[Diagnostic]:
    settings = situation.settings
    if settings is None or settings.cold_plug == "no-port":
        return
    wants = f'set {_SOCKET} = "/var/lib/kubelet/pod-resources/kubelet.sock": vfiomgr kata config'
    if settings.pod_resource_api_sock and not situation.knows("runtime", _SOCKET):
        first = situation.keys.first(situation.release.runtime, "runtime", _SOCKET)
        what = f"{situation.release} has no {_SOCKET}: it came with {first}"
        is_certain = not situation.pod.cdi_names
        remedy = (
            "name the device in an annotation (cdi.k8s.io/gpu: KIND=NAME), or take a later Kata"
        )
        yield chain_break("kata-no-pod-resources", _SOCKET, what, remedy, is_certain=is_certain)
    elif channel(situation) == "annotations" and _asks_kubelet(situation):
        yield _overruled(situation, settings.pod_resource_api_sock)
    elif channel(situation) == "annotations" and situation.is_rs:
        yield chain_break(
            "kata-annotations-unread",
            situation.pod.name,
            "runtime-rs takes devices from the kubelet's socket and from nodes of the sandbox "
            "itself (prepare_coldplug_cdi_devices); its sources show no reading of CDI annotations",
            wants,
            is_certain=False,
        )
    elif channel(situation) == "none" and situation.pod.resources:
        yield chain_break(
            "kata-devices-unnamed",
            _SOCKET,
            f"{_SOCKET} is not set, and no annotation names a device: the guest starts without any",
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
            f"{settings.pod_resource_api_sock}, on which Kata asks the kubelet, is not there",
            "start the kubelet; if its directory is another one, set "
            f"{_SOCKET} in {settings.path}: vfiomgr kata config",
            is_certain=situation.is_machine,
        )


def _overruled(situation: PodContext, socket: str) -> Diagnostic:
    """Annotations are for pods without a kubelet (coldPlugDevices, create.go of the Go shim)."""
    names = filter(is_qualified, situation.pod.cdi_names)
    kinds = dict.fromkeys(name.partition("=")[0] for name in names)
    limits = ", ".join(f"{kind}: 1" for kind in kinds)
    otherwise = "" if situation.is_rs else "; annotations are read where there is no socket"
    return chain_break(
        "kata-annotations-overruled",
        _SOCKET,
        f"{_SOCKET} is {socket}: where a kubelet answers there, Kata takes the devices from it "
        f"alone, and to a pod that asks for no resource it has given none{otherwise}",
        f"ask for the resource in resources.limits{f' ({limits})' if limits else ''}, or "
        "name a handler whose configuration sets no socket: vfiomgr kata config "
        "--no-pod-resources",
        is_certain=False,
    )


def _unresolvable(situation: PodContext) -> Iterator[Diagnostic]:
    """Number 3: one resource that no specification has fails the pod."""
    if channel(situation) != "kubelet":
        return
    known = [item for item in requests(situation) if item.kind in situation.kinds]
    for item in requests(situation):
        if item.kind in situation.kinds or not known:
            continue
        yield chain_break(
            "kata-foreign-resource",
            item.kind,
            f"{item.kind} is another device plugin's, and no CDI specification is of that kind: "
            "the pod fails with 'unresolvable CDI devices', since Kata looks up every device of it",
            f"write a specification of the kind {item.kind} with the plugin's device ids, or ask "
            f"for {item.kind} in another pod",
        )


def _twice(situation: PodContext) -> Iterator[Diagnostic]:
    if channel(situation) == "kubelet" and situation.pod.cdi_names:
        yield chain_break(
            "kata-named-twice",
            situation.pod.name,
            "annotations name devices, and the kubelet tells of some too: a device that both name "
            "is injected twice",
            "take the cdi.k8s.io annotations out: the kubelet's answer is enough",
            is_certain=False,
            evidence=("kata-containers/kata-containers#11125",),
        )
