"""Reads pods, claims, classes and labels of nodes from YAML, and collects errors with places."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from difflib import get_close_matches
from typing import Literal, cast

from msgspec import Struct, field

from vfiomgr.diagnostic import Diagnostic, flaw, invalid_document
from vfiomgr.documents.reader import Unreadable, Wording, read_all_located
from vfiomgr.documents.text import Located, Path, shown_path
from vfiomgr.errors import InvalidDocument, UsageError
from vfiomgr.kata.explain.pod import POD_TEMPLATES, PodSpec, read_objects
from vfiomgr.kata.kubernetes import CLASS_RESOURCE
from vfiomgr.node.dra.claims import read_parameters
from vfiomgr.node.dra.model import DRIVER
from vfiomgr.node.simulation.model import (
    ClaimSpec,
    Constraint,
    DeviceRequest,
    PodClaim,
    Toleration,
    Workload,
)
from vfiomgr.node.simulation.selectors import SelectorError, Selectors
from vfiomgr.units import parse_quantity, whole
from vfiomgr.value import Value

RULE = "simulation-invalid"
UNKNOWN_CLASS = "device-class-unknown"
"""A DeviceClass that is not in the file, and perhaps for another driver."""
PARAMETERS = "claim-parameters"
"""Parameters that the API server accepts, and the driver does not."""
_MOST_GUESSED = 100
"""Maximum number of errors of a file for which a similar name is suggested."""


class Part(Struct):
    """A part of an object, where it is in the object, and the errors of the file."""

    located: Located
    path: Path = ()
    flaws: list[Diagnostic] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Whether there is a value."""
        return not self.located.is_empty

    def at(self, *keys: str | int) -> Part:
        """The part below; without a value if it is absent."""
        found = self.located.at(keys) or Located(self.located.place_of(keys))
        return Part(found, (*self.path, *keys), self.flaws)

    def text(self, *keys: str) -> str:
        """A string below; empty if it is absent."""
        part = self.at(*keys)
        if not part:
            return ""
        if not isinstance(part.located.scalar, str):
            part.reject(f"{keys[-1]} is not a string", "write a string, in quotes if needed")
        return part.located.text

    def choice(self, key: str, choices: Collection[str], default: str) -> str:
        """One of some words below."""
        found = self.text(key) or default
        if found not in choices:
            part = self.at(key)
            part.reject(f"{key} {found!r} is not one of {', '.join(filter(None, choices))}")
            return default
        return found

    def number(self, key: str, default: int, most: int = 1_000_000) -> int:
        """A whole number below that is not negative."""
        part = self.at(key)
        if not part:
            return default
        found = part.located.scalar
        if isinstance(found, bool) or not isinstance(found, int) or not 0 <= found <= most:
            part.reject(f"{key} is not a whole number from 0 to {most}", "write such a number")
            return default
        return found

    def flag(self, key: str) -> bool:
        """Whether a value below is true."""
        part = self.at(key)
        if part and not isinstance(part.located.scalar, bool):
            part.reject(f"{key} is not true or false", "write true or false")
        return part.located.scalar is True

    def items(self, *keys: str) -> list[Part]:
        """The items of a list below."""
        part = self.at(*keys)
        if part and part.located.items is None:
            part.reject(f"{keys[-1]} is not a list", "start items with -")
        return [part.at(number) for number in range(len(part.located.items or ()))]

    def members(self, *keys: str) -> dict[str, Part]:
        """The members of a mapping below."""
        part = self.at(*keys)
        if part and part.located.members is None:
            part.reject("not a mapping", "write keys with values")
        return {key: part.at(key) for key in part.located.members or {}}

    def texts(self, *keys: str) -> dict[str, str]:
        """The members of a mapping below, as texts."""
        return {key: part.located.text for key, part in self.members(*keys).items()}

    def require_known(self, keys: Collection[str]) -> None:
        """Reject members with other keys."""
        for key, part in self.members().items():
            if key not in keys:
                place = self.located.keys.get(key, part.located.place)
                what = f"unknown key {key!r}"
                remedy = self.guess(key, keys, f"use {', '.join(keys)}")
                self.flaws.append(flaw(RULE, place, shown_path(self.path), what, remedy))

    def guess(self, name: str, known: Iterable[str], otherwise: str) -> str:
        """The remedy for an unknown name; later errors of a file are not printed."""
        is_early = len(self.flaws) < _MOST_GUESSED
        near = get_close_matches(name, list(known), 1) if is_early else []
        return f"did you mean {near[0]}?" if near else otherwise

    def reject(self, what: str, remedy: str = "correct it", rule: str = RULE) -> None:
        """Report an error here."""
        where = shown_path(self.path)
        self.flaws.append(flaw(rule, self.located.place, where, what, remedy))


_OWN = 'device.driver == "vfiomgr.io"'
_FAMILY = 'device.attributes["vfiomgr.io"].family'
CLASSES: dict[str, tuple[str, ...]] = {
    "vfio.vfiomgr.io": (f'{_OWN} && {_FAMILY} == "function"',),
    "vgpu.vfiomgr.io": (f'{_OWN} && {_FAMILY} != "function"',),
}
"""The selectors of vfiomgr's own DeviceClasses."""
_DEVICES = ("requests", "constraints", "config")
_EXACT = (
    *("name", "deviceClassName", "selectors", "allocationMode", "count"),
    *("tolerations", "capacity", "adminAccess"),
)
_CONSTRAINT = ("requests", "matchAttribute", "distinctAttribute")
_TOLERATION = ("key", "operator", "value", "effect", "tolerationSeconds")


class _Reader(Struct):
    """Collects objects; those that name others are read after them."""

    selectors: Selectors
    flaws: list[Diagnostic]
    is_placed: bool = True
    """Whether the pods are placed on nodes, and are not for a known node."""
    classes: dict[str, tuple[str, ...]] = field(default_factory=lambda: dict(CLASSES))
    """The selectors of DeviceClasses by name."""
    labels: dict[str, dict[str, str]] = field(default_factory=dict)
    found: dict[tuple[str, str, str], ClaimSpec] = field(default_factory=dict)
    """Claims and templates by kind, namespace and name."""
    extended: dict[str, str] = field(default_factory=dict)
    """DeviceClasses by the extended resource that they are offered as."""
    notes: list[str] = field(default_factory=list)

    def take_class(self, part: Part) -> None:
        """Read a DeviceClass, or the labels of a Node; note what is not simulated."""
        kind, name = _kind(part.located), part.text("metadata", "name")
        if part.text("apiVersion").startswith(_GROUP) and kind not in _KINDS:
            self.notes.append(f"{kind} {name} is not simulated")
        if kind == "Node":
            self.labels[name] = part.texts("metadata", "labels")
            if part.at("spec", "taints"):
                self.notes.append("taints of nodes are not simulated")
        elif kind == "DeviceClass" and _is_valid(part):
            spec = part.at("spec")
            self.classes[name] = tuple(self.expressions(spec))
            _require_parameters(spec)
            self.extended[spec.text("extendedResourceName")] = name
            self.extended[f"{CLASS_RESOURCE}{name}"] = name

    def take_claim(self, part: Part) -> None:
        """Read a claim or a template of claims."""
        kind = _kind(part.located)
        if kind not in ("ResourceClaim", "ResourceClaimTemplate") or not _is_valid(part):
            return
        spec = part.at("spec", "spec") if kind == "ResourceClaimTemplate" else part.at("spec")
        key = (kind, _namespace(part), part.text("metadata", "name"))
        if part.at("status", "allocation"):
            self.notes.append(f"{kind} {key[1]}/{key[2]}: its allocation is not simulated")
        self.found[key] = self.claim(spec.at("devices"))

    def workload(self, part: Part, pod: PodSpec) -> Workload:
        """The pods of an object, with their claims."""
        spec = part.at(*POD_TEMPLATES[pod.kind], "spec")
        if pod.kind == "DaemonSet" and self.is_placed:
            part.reject("DaemonSets are not simulated", "write a Deployment instead")
        if spec.text("nodeName") and self.is_placed:
            remedy = "use a nodeSelector with kubernetes.io/hostname"
            spec.at("nodeName").reject("a pod with nodeName bypasses the scheduler", remedy)
        self.notes += [f"{pod}: {key} is not simulated" for key in _IGNORED if spec.at(key)]
        extended = [each for each in pod.resources if each[0] in self.extended]
        return Workload(
            kind=pod.kind,
            namespace=pod.namespace,
            name=pod.name,
            replicas=part.at("spec").number(_REPLICAS[pod.kind], 1) if pod.kind in _REPLICAS else 1,
            node_selector=tuple(sorted(spec.texts("nodeSelector").items())),
            limits=tuple(each for each in pod.resources if each not in extended),
            claims=(
                *self._pod_claims(spec, pod.namespace),
                *(self._extended_claim(*each) for each in extended),
            ),
        )

    def _extended_claim(self, name: str, count: int) -> PodClaim:
        """The claim that the scheduler makes for an extended resource of a DeviceClass."""
        own = self.extended[name]
        request = DeviceRequest(name, own, self.classes[own], count)
        return PodClaim(name, ClaimSpec(((request,),)))

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

    def expressions(self, part: Part) -> Iterator[str]:
        """The CEL expressions of a class or a request."""
        for item in part.items("selectors"):
            expression = item.text("cel", "expression")
            if not expression:
                item.reject("the selector has no CEL expression", "add cel: {expression: …}")
                continue
            try:
                self.selectors.compile(expression)
            except SelectorError as error:
                item.at("cel", "expression").reject(f"invalid CEL expression: {error}")
            else:
                yield expression

    def claim(self, devices: Part) -> ClaimSpec:
        """The requests and constraints of a claim."""
        devices.require_known(_DEVICES)
        parts = devices.items("requests")
        if not parts:
            devices.reject("the claim has no requests", "add a request")
        requests = tuple(tuple(self._alternatives(part)) for part in parts)
        alternatives = [one.name for each in requests for one in each]
        names = [text for name in alternatives for text in (name.partition("/")[0], name)]
        _require_parameters(devices)
        parts = devices.items("constraints")
        found = [constraint for part in parts for constraint in _constraints(part, names)]
        return ClaimSpec(requests, tuple(found))

    def _alternatives(self, part: Part) -> Iterator[DeviceRequest]:
        """The alternatives of a request, in order of preference."""
        name = part.text("name")
        if not name:
            part.reject("the request has no name", "add name")
        part.require_known(("name", "exactly", "firstAvailable"))
        exactly, others = part.at("exactly"), part.items("firstAvailable")
        if bool(exactly) == bool(others):
            part.reject("not a request", "set either exactly or firstAvailable")
        elif exactly:
            yield self._request(exactly, name)
        for other in others:
            own = other.text("name")
            if not own:
                other.reject("the alternative has no name", "add name")
            yield self._request(other, f"{name}/{own}")

    def _request(self, part: Part, name: str) -> DeviceRequest:
        part.require_known(_EXACT)
        admin = part.flag("adminAccess")
        if admin:
            self.notes.append(f"request {name}: vfiomgr refuses to prepare claims with adminAccess")
        device_class = part.text("deviceClassName")
        own = self.classes.get(device_class)
        if own is None:
            what = f"unknown DeviceClass {device_class!r}" if device_class else "no deviceClassName"
            remedy = f"add the DeviceClass to the file, or use {' or '.join(CLASSES)}"
            remedy = part.guess(device_class, self.classes, remedy)
            part.at("deviceClassName").reject(what, remedy, UNKNOWN_CLASS)
        return DeviceRequest(
            name,
            device_class,
            (*(own or ()), *self.expressions(part)),
            _count(part),
            tuple(map(_toleration, part.items("tolerations"))),
            tuple(_capacity(part)),
            admin,
        )


def _require_parameters(part: Part) -> None:
    """Require that the driver can read its parameters in a class or a claim."""
    for item in part.items("config"):
        own = item.at("opaque", "parameters")
        if item.text("opaque", "driver") == DRIVER:
            try:
                read_parameters(own.located.value, "")
            except UsageError as error:
                what = f"{DRIVER} refuses the parameters: {error.message.partition(': ')[2]}"
                own.reject(what, error.hint, PARAMETERS)


def _count(part: Part) -> int | None:
    """The number of devices; None for all."""
    mode = part.choice("allocationMode", ("ExactCount", "All"), "ExactCount")
    if mode == "ExactCount":
        count = part.number("count", 1)
        if not count:
            part.at("count").reject("a request needs at least one device", "leave count out")
        return count
    if part.at("count"):
        part.at("count").reject("allocationMode All has no count", "leave count out")
    return None


def _toleration(part: Part) -> Toleration:
    part.require_known(_TOLERATION)
    operator = part.choice("operator", ("Exists", "Equal"), "Equal")
    key, value = part.text("key"), part.text("value")
    effect = part.choice("effect", ("", "NoSchedule", "NoExecute"), "")
    if operator == "Equal" and not key:
        part.reject("a toleration without a key", "add key, or operator: Exists")
    if operator == "Exists" and value:
        part.at("value").reject("a value with the operator Exists", "leave it out")
    return Toleration(key, cast("Literal['Equal', 'Exists']", operator), value, effect)


def _capacity(part: Part) -> Iterator[tuple[str, int]]:
    for name, least in part.members("capacity", "requests").items():
        quantity = parse_quantity(least.located.text)
        if quantity is None:
            least.reject(f"invalid quantity: {least.located.text!r}", "write it like 16Gi")
        else:
            yield name, whole(quantity)


def _constraints(part: Part, names: list[str]) -> Iterator[Constraint]:
    part.require_known(_CONSTRAINT)
    match, distinct = part.text("matchAttribute"), part.text("distinctAttribute")
    if bool(match) == bool(distinct):
        part.reject("not a constraint", "set either matchAttribute or distinctAttribute")
        return
    attribute = match or distinct
    key = "matchAttribute" if match else "distinctAttribute"
    if "/" not in attribute:
        part.at(key).reject(f"{attribute!r} has no domain", f"write vfiomgr.io/{attribute}")
    requests = part.items("requests")
    for each in requests:
        if each.located.text not in names:
            what = f"no request {each.located.text!r} in the claim"
            each.reject(what, each.guess(each.located.text, names, f"use {', '.join(names)}"))
    concerned = tuple(each.located.text for each in requests)
    yield Constraint("matchAttribute" if match else "distinctAttribute", attribute, concerned)


_GROUP = "resource.k8s.io/"
_VERSIONS = (f"{_GROUP}v1", f"{_GROUP}v1beta2")
_KINDS = frozenset({"DeviceClass", "ResourceClaim", "ResourceClaimTemplate"})
_HINT = "validate it with kubectl apply --dry-run=server -f FILE"
_WORDING = Wording(
    "an object", "objects", shown_path, "write a Pod or a Deployment", merges="taken"
)
_NAMESPACE = "default"
_IGNORED = (
    *("affinity", "topologySpreadConstraints", "schedulingGates"),
    *("priorityClassName", "priority"),
)
"""Parts of a pod that change where it runs, or whether it does, and are not simulated."""
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
    objects, flaws = read_workloads(text, source, selectors)
    if flaws:
        raise invalid_document(source, flaws, _HINT)
    return objects


def read_workloads(
    text: str, source: str, selectors: Selectors, *, is_placed: bool = True
) -> tuple[Objects, list[Diagnostic]]:
    """The objects of a stream as far as they can be read, its pods in their order, and the errors.

    Raises:
        InvalidDocument: the text is malformed, or has no pod.
    """
    pods = read_objects(text, source).pods
    try:
        documents, flaws = read_all_located(text, _WORDING)
    except Unreadable as error:
        message = f"{source}:{error}"
        raise InvalidDocument(message, _HINT) from None
    reader = _Reader(selectors, flaws, is_placed)
    everything = [Part(each, (), flaws) for each in _objects(documents)]
    for take in (reader.take_class, reader.take_claim):  # claims name classes
        for part in everything:
            take(part)
    with_pods = [part for part in everything if _kind(part.located) in POD_TEMPLATES]
    workloads = tuple(map(reader.workload, with_pods, pods))
    objects = Objects(workloads, reader.labels, tuple(dict.fromkeys(reader.notes)))
    return objects, flaws


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
