"""Reads pods, claims, classes and labels of nodes from YAML."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct, field

from vfiomgr.diagnostic import Diagnostic, invalid_document
from vfiomgr.documents.reader import Unreadable, Wording, read_all_located
from vfiomgr.documents.text import shown_path
from vfiomgr.errors import InvalidDocument
from vfiomgr.kata.explain.pod import POD_TEMPLATES, read_objects
from vfiomgr.node.simulation.claims import CLASSES, ClaimReader
from vfiomgr.node.simulation.model import ClaimSpec, PodClaim, Workload
from vfiomgr.node.simulation.reading import Part
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vfiomgr.documents.text import Located
    from vfiomgr.kata.explain.pod import PodSpec
    from vfiomgr.node.simulation.selectors import Selectors

_VERSIONS = ("resource.k8s.io/v1", "resource.k8s.io/v1beta2")
_HINT = "validate it with kubectl apply --dry-run=server -f FILE"
_WORDING = Wording(
    "an object", "objects", shown_path, "write a Pod or a Deployment", merges="taken"
)
_NAMESPACE = "default"
_IGNORED = ("affinity", "topologySpreadConstraints")
"""Parts of a pod that move it to other nodes, and are not simulated."""
_REPLICAS = {
    "Deployment": "replicas",
    "ReplicaSet": "replicas",
    "ReplicationController": "replicas",
    "StatefulSet": "replicas",
    "Job": "parallelism",
}
"""The number of pods in the spec of an object; others have one."""


class Objects(Value):
    """What is simulated."""

    workloads: tuple[Workload, ...]
    labels: dict[str, dict[str, str]]
    """The labels of Node objects by name."""
    notes: tuple[str, ...] = ()
    """What is read but not simulated."""


def read_simulation(text: str, source: str, selectors: Selectors) -> Objects:
    """Read a stream of YAML or JSON documents; `source` names it in errors.

    Raises:
        InvalidDocument: lists every error with line and column; or the file has no pod.

    """
    pods = read_objects(text, source).pods
    try:
        documents, flaws = read_all_located(text, _WORDING)
    except Unreadable as error:
        message = f"{source}:{error}"
        raise InvalidDocument(message, _HINT) from None
    reader = _Reader(ClaimReader(selectors, dict(CLASSES)), flaws)
    everything = [Part(each, (), flaws) for each in _objects(documents)]
    for take in (reader.take_class, reader.take_claim):  # claims name classes
        for part in everything:
            take(part)
    with_pods = [part for part in everything if _kind(part.located) in POD_TEMPLATES]
    workloads = tuple(map(reader.workload, with_pods, pods))
    if flaws:
        raise invalid_document(source, flaws, _HINT)
    return Objects(workloads, reader.labels, tuple(dict.fromkeys(reader.notes)))


def _objects(documents: Sequence[Located]) -> Iterator[Located]:
    """All objects, also those of Lists."""
    for document in documents:
        items = document.at(("items",))
        if _kind(document) == "List" and items is not None:
            yield from _objects(items.items or ())
        else:
            yield document


def _kind(document: Located) -> str:
    kind = document.at(("kind",))
    return "" if kind is None else kind.text


class _Reader(Struct):
    """Collects objects; those that name others are read after them."""

    claims: ClaimReader
    flaws: list[Diagnostic]
    labels: dict[str, dict[str, str]] = field(default_factory=dict)
    found: dict[tuple[str, str, str], ClaimSpec] = field(default_factory=dict)
    """Claims and templates by kind, namespace and name."""
    extended: dict[str, str] = field(default_factory=dict)
    """DeviceClasses by the extended resource that they are offered as."""
    notes: list[str] = field(default_factory=list)

    def take_class(self, part: Part) -> None:
        """Read a DeviceClass, or the labels of a Node."""
        kind, name = _kind(part.located), part.text("metadata", "name")
        if kind == "Node":
            self.labels[name] = part.texts("metadata", "labels")
        elif kind == "DeviceClass" and _is_valid(part):
            spec = part.at("spec")
            self.claims.classes[name] = tuple(self.claims.expressions(spec))
            self.extended[spec.text("extendedResourceName")] = name

    def take_claim(self, part: Part) -> None:
        """Read a claim or a template of claims."""
        kind = _kind(part.located)
        if kind not in ("ResourceClaim", "ResourceClaimTemplate") or not _is_valid(part):
            return
        spec = part.at("spec", "spec") if kind == "ResourceClaimTemplate" else part.at("spec")
        key = (kind, _namespace(part), part.text("metadata", "name"))
        self.found[key] = self.claims.claim(spec.at("devices"))

    def workload(self, part: Part, pod: PodSpec) -> Workload:
        """The pods of an object, with their claims."""
        spec = part.at(*POD_TEMPLATES[pod.kind], "spec")
        if pod.kind == "DaemonSet":
            part.reject("DaemonSets are not simulated", "write a Deployment instead")
        if spec.text("nodeName"):
            remedy = "use a nodeSelector with kubernetes.io/hostname"
            spec.at("nodeName").reject("a pod with nodeName bypasses the scheduler", remedy)
        self.notes += [f"{pod}: {key} is not simulated" for key in _IGNORED if spec.at(key)]
        for name, _ in pod.resources:
            if name in self.extended:
                what = f"extendedResourceName of DeviceClass {self.extended[name]}"
                self.notes.append(f"{pod}: {what} is not simulated")
        return Workload(
            kind=pod.kind,
            namespace=pod.namespace,
            name=pod.name,
            replicas=part.at("spec").number(_REPLICAS[pod.kind], 1) if pod.kind in _REPLICAS else 1,
            node_selector=tuple(sorted(spec.texts("nodeSelector").items())),
            limits=pod.resources,
            claims=tuple(self._pod_claims(spec, pod.namespace)),
        )

    def _pod_claims(self, spec: Part, namespace: str) -> Iterator[PodClaim]:
        for part in spec.items("resourceClaims"):
            shared = part.text("resourceClaimName")
            name = shared or part.text("resourceClaimTemplateName")
            if not name or bool(shared) == bool(part.at("resourceClaimTemplateName")):
                remedy = "set either resourceClaimName or resourceClaimTemplateName"
                part.reject("not a claim of a pod", remedy)
                continue
            kind = "ResourceClaim" if shared else "ResourceClaimTemplate"
            found = self.found.get((kind, namespace, name))
            if found is None:
                known = (n for k, space, n in self.found if (k, space) == (kind, namespace))
                what = f"no {kind} {name!r} in namespace {namespace}"
                part.reject(what, part.guess(name, known, "add it to the file"))
                continue
            own = f"{namespace}/{shared}" if shared else ""
            yield PodClaim(part.text("name"), found, own)


def _is_valid(part: Part) -> bool:
    """Whether an object of resource.k8s.io has a name and a version that can be read."""
    version = part.text("apiVersion")
    if version not in _VERSIONS:
        what = f"unsupported version {version!r}" if version else "the object has no version"
        part.at("apiVersion").reject(what, f"use {_VERSIONS[0]}")
        return False
    if not part.text("metadata", "name"):
        part.reject(f"the {_kind(part.located)} has no name", "add metadata.name")
        return False
    return True


def _namespace(part: Part) -> str:
    return part.text("metadata", "namespace") or _NAMESPACE
