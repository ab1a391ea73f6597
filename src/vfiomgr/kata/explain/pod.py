"""Pods and RuntimeClasses from YAML, as far as devices are concerned."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct, field

from vfiomgr.diagnostic import Diagnostic, flaw, invalid_document
from vfiomgr.documents.reader import Unreadable, Wording, read_all_located
from vfiomgr.documents.text import Path, shown_path
from vfiomgr.errors import InvalidDocument
from vfiomgr.kata.kubernetes import CLASS_RESOURCE, is_extended_resource
from vfiomgr.units import parse_quantity, whole
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from vfiomgr.diagnostic import Position
    from vfiomgr.documents.text import Located


CDI_ANNOTATION = "cdi.k8s.io/"
"""Container runtimes read annotations with this prefix as CDI names, separated by commas."""
KATA_ANNOTATION = "io.katacontainers.config."
"""The prefix of keys of Kata's configuration, for one pod."""

ContainerRole = Literal["container", "init container"]


def _is_of_devices(name: str) -> bool:
    """Whether a resource is of a device plugin, or of a DeviceClass."""
    return is_extended_resource(name) or name.startswith(CLASS_RESOURCE)


class PodContainer(Value):
    """A container of a pod."""

    name: str
    role: ContainerRole
    limits: tuple[tuple[str, str], ...]
    """Resources and quantities, as written."""
    is_privileged: bool
    claims: tuple[str, ...]
    """The pod's claims that it uses (dynamic resource allocation)."""
    line: int
    is_sidecar: bool = False
    """An init container that keeps running beside the following ones (restartPolicy: Always)."""
    environment: tuple[tuple[str, str | None], ...] = ()
    """Its variables; None for a value that is not written there."""
    image: str = ""
    words: tuple[str, ...] = ()
    """Its command and arguments."""
    block_volumes: tuple[str, ...] = ()
    """The volumes that it gets as block devices (volumeDevices)."""

    @property
    def devices(self) -> tuple[tuple[str, int], ...]:
        """The resources of device plugins, with their counts."""
        found = ((name, int(text)) for name, text in self.limits if _is_of_devices(name))
        return tuple((name, count) for name, count in found if count)

    def option(self, name: str, default: str) -> str | None:
        """A variable, or the flag of the same name, which precedes it; None if unknown."""
        flag = f"--{name.lower().replace('_', '-')}"
        for word, following in zip(self.words, (*self.words[1:], ""), strict=False):
            if word.partition("=")[0] == flag:
                return word.partition("=")[2] or following
        return dict(self.environment).get(name, default)

    def limit(self, name: str) -> str | None:
        """Its limit of a resource."""
        return dict(self.limits).get(name)


class PodSpec(Value):
    """A pod, or its template in another object."""

    kind: str
    """The kind of the object: `Pod`, `Deployment`."""
    name: str
    runtime_class: str | None
    annotations: tuple[tuple[str, str], ...]
    containers: tuple[PodContainer, ...]
    """Init containers first, in order."""
    claims: tuple[str, ...]
    """Names of its claims (dynamic resource allocation)."""
    source: str
    line: int
    runtime_class_line: int
    limits: tuple[tuple[str, str], ...] = ()
    """The limits of the entire pod (spec.resources), which precede those of its containers."""
    namespace: str = ""
    """The namespace of the object; empty for a pod that is only assumed."""

    def annotation(self, name: str) -> str | None:
        """The value of an annotation."""
        return dict(self.annotations).get(name)

    @property
    def cdi_annotations(self) -> tuple[tuple[str, str], ...]:
        """Each annotation that names devices, with each of its names, as written."""
        found = ((key, text) for key, text in self.annotations if key.startswith(CDI_ANNOTATION))
        return tuple((key, name) for key, text in found for name in text.split(","))

    @property
    def cdi_names(self) -> tuple[str, ...]:
        """The names in its annotations, in order."""
        return tuple(name.strip() for _, name in self.cdi_annotations if name.strip())

    @property
    def all_claims(self) -> tuple[str, ...]:
        """Its claims, and those that only its containers name."""
        used = (name for container in self.containers for name in container.claims)
        return tuple(dict.fromkeys((*self.claims, *used)))

    @property
    def resources(self) -> tuple[tuple[str, int], ...]:
        """The resources of device plugins, in container order."""
        uses: dict[str, list[tuple[PodContainer, Fraction]]] = {}
        for each in self.containers:
            for name, count in each.devices:
                uses.setdefault(name, []).append((each, Fraction(count)))
        return tuple((name, _most(used)) for name, used in uses.items())

    @property
    def memory_bytes(self) -> int:
        """The memory limit, if there is one."""
        of_pod = parse_quantity(dict(self.limits).get("memory", ""))
        if of_pod is not None:
            return whole(of_pod)
        limits = ((each, parse_quantity(each.limit("memory") or "")) for each in self.containers)
        return _most((each, limit) for each, limit in limits if limit is not None)

    def __str__(self) -> str:
        """`Pod cuda`."""
        return f"{self.kind} {self.name}"


def _most(uses: Iterable[tuple[PodContainer, Fraction]]) -> int:
    """The maximum in use at once (AggregateContainerLimits, k8s.io/component-helpers/resource).

    Init containers run one after the other, before the others; sidecars keep running.
    """
    running, highest = Fraction(0), Fraction(0)
    for container, amount in uses:
        if container.role == "init container" and not container.is_sidecar:
            highest = max(highest, running + amount)
        else:
            running += amount
    return whole(max(running, highest))


class RuntimeClassSpec(Value):
    """A RuntimeClass."""

    name: str
    handler: str
    overhead_bytes: int | None
    """The memory overhead; None without one."""
    source: str
    line: int


POOL = "pool"
"""The kind of a pool of the SR-IOV network device plugin, which states none."""


class OtherObject(Value, eq=False):
    """An object without a pod."""

    kind: str
    name: str
    api_version: str
    data: Any
    source: str
    line: int

    def at(self, *path: str) -> Any:  # noqa: ANN401 - as YAML has it
        """The value at a path of keys; None if it is absent."""
        found = self.data
        for key in path:
            found = found.get(key) if isinstance(found, dict) else None
        return found


class Objects(Value):
    """The objects of a file that affect how pods get devices."""

    pods: tuple[PodSpec, ...]
    runtime_classes: tuple[RuntimeClassSpec, ...]
    others: tuple[OtherObject, ...]


_WORDING = Wording(
    "an object",
    "objects",
    shown_path,
    "write a Pod, a Deployment or another object with pods; vfiomgr kata pod prints one",
    merges="taken",
)
_HINT = (
    "validate it with kubectl apply --dry-run=server -f FILE; vfiomgr kata pod prints a valid one"
)
POD_TEMPLATES: dict[str, Path] = {
    "Pod": (),
    "PodTemplate": ("template",),
    "Deployment": ("spec", "template"),
    "ReplicaSet": ("spec", "template"),
    "ReplicationController": ("spec", "template"),
    "StatefulSet": ("spec", "template"),
    "DaemonSet": ("spec", "template"),
    "Job": ("spec", "template"),
    "CronJob": ("spec", "jobTemplate", "spec", "template"),
}
"""The place of the pod template in objects that have one."""
_NAMESPACE = "default"
"""The namespace of objects whose manifest has none."""
_ROLES: tuple[tuple[str, ContainerRole], ...] = (
    ("initContainers", "init container"),
    ("containers", "container"),
)
_RESOURCES = ("limits", "requests", "claims")
"""The fields of ResourceRequirements (staging/src/k8s.io/api/core/v1/types.go)."""
_TRUE = ("true", "yes", "on", "y")
"""Values for true in kubectl's YAML 1.1."""


def read_objects(text: str, source: str, *, needs_pod: bool = True) -> Objects:
    """Read a stream of YAML or JSON documents; `source` names it in errors.

    Raises:
        InvalidDocument: lists every error with line and column; or the file has no pod.
    """
    try:
        documents, flaws = read_all_located(text, _WORDING)
    except Unreadable as error:
        message = f"{source}:{error}"
        raise InvalidDocument(message, _HINT) from None
    reader = _Reader(source, flaws)
    for document in documents:
        reader.take(document)
    if reader.flaws:
        raise invalid_document(source, reader.flaws, _HINT)
    objects = Objects(tuple(reader.pods), tuple(reader.classes), tuple(reader.others))
    if needs_pod and not objects.pods:
        raise no_pod(objects, source)
    return objects


def _without_kind(document: Located) -> tuple[str, str]:
    """What is wrong with an object without a kind, which may be a file of Docker Compose."""
    data = document.value
    services = data.get("services") if isinstance(data, dict) else None
    if not isinstance(services, dict):
        return "the object has no kind", "add kind: Pod"
    texts = map(str, services.values())
    has_gpus = any("capabilities" in text or "gpus" in text for text in texts)
    what = "a Compose file, not an object of Kubernetes"
    remedy = (
        "a service gets GPUs by deploy.resources.reservations.devices (driver: nvidia, count: all, "
        "capabilities: [gpu]); check the CDI specifications with: vfiomgr check cdi"
    )
    return what if has_gpus else f"{what}; no service of it reserves a GPU", remedy


def no_pod(objects: Objects, source: str) -> InvalidDocument:
    """The error about a file without pods."""
    kinds = ["RuntimeClass"] if objects.runtime_classes else []
    kinds += [other.kind for other in objects.others]
    message = f"{source}:1:1: no pod found, only {', '.join(dict.fromkeys(kinds))}"
    return InvalidDocument(message, _WORDING.start)


def _pools_of(value: object) -> list[dict[str, Any]]:
    """The pools of a configuration of the SR-IOV device plugin; empty for other documents."""
    found = value.get("resourceList") if isinstance(value, dict) else None
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


class _Reader(Struct):
    """Collects the pods and RuntimeClasses, and the errors."""

    source: str
    flaws: list[Diagnostic]
    pods: list[PodSpec] = field(default_factory=list)
    classes: list[RuntimeClassSpec] = field(default_factory=list)
    others: list[OtherObject] = field(default_factory=list)

    def take(self, document: Located) -> None:
        """Add an object, or those of a List."""
        kind = self._text(document, ("kind",))
        if document.members is None:
            self._add(
                document.place, (), "not an object", "add apiVersion, kind and the other keys"
            )
        elif pools := _pools_of(document.value):
            line = document.place.line
            self.others += [
                OtherObject(POOL, str(p.get("resourceName", "")), "", p, self.source, line)
                for p in pools
            ]
        elif not kind:
            self._add(document.place, (), *_without_kind(document))
        elif kind == "List":
            for item in self._items(document, ("items",)):
                self.take(item)
        elif kind == "RuntimeClass":
            self._take_class(document)
        elif kind in POD_TEMPLATES:
            self._take_pod(document, kind)
        else:
            self.others.append(
                OtherObject(
                    kind=kind,
                    name=self._text(document, ("metadata", "name")),
                    api_version=self._text(document, ("apiVersion",)),
                    data=document.value,
                    source=self.source,
                    line=document.place.line,
                )
            )

    def _take_class(self, document: Located) -> None:
        name = self._text(document, ("metadata", "name"))
        handler = self._text(document, ("handler",))
        if not name or not handler:
            what = f"the RuntimeClass has no {'handler' if name else 'name'}"
            self._add(
                document.place, (), what, "vfiomgr kata pod --runtimeclass prints a valid one"
            )
            return
        path = ("overhead", "podFixed", "memory")
        memory = document.at(path)
        quantity = None if memory is None else self._quantity(memory, path)
        overhead = None if quantity is None else whole(quantity)
        line = document.place.line
        self.classes.append(RuntimeClassSpec(name, handler, overhead, self.source, line))

    def _take_pod(self, document: Located, kind: str) -> None:
        path = POD_TEMPLATES[kind]
        template = document.at(path)
        spec = None if template is None else template.at(("spec",))
        if template is None or spec is None or spec.members is None:
            where = shown_path((*path, "spec"))
            self._add(document.place, (), f"{kind} has no {where}", "add the pod's spec there")
            return
        base = (*path, "spec")
        if spec.at(("containers",)) is None:
            self._add(spec.place, base, "the pod has no containers", "add containers")
        runtime = spec.members.get("runtimeClassName")
        line = spec.place.line if runtime is None else runtime.place.line
        name = self._text(document, ("metadata", "name"))
        name = name or self._text(document, ("metadata", "generateName")) or "without a name"
        claims = tuple(self._names(spec, ("resourceClaims",), base))
        self.pods.append(
            PodSpec(
                kind=kind,
                name=name,
                runtime_class=self._text(spec, ("runtimeClassName",), base) or None,
                annotations=tuple(self._texts(template, ("metadata", "annotations"), path)),
                containers=tuple(self._containers(spec, base, claims)),
                claims=claims,
                source=self.source,
                line=document.place.line,
                runtime_class_line=line,
                limits=tuple(self._limits(spec, base)),
                namespace=self._text(document, ("metadata", "namespace")) or _NAMESPACE,
            )
        )

    def _containers(
        self, spec: Located, base: Path, claims: Collection[str]
    ) -> Iterator[PodContainer]:
        privileged = ("securityContext", "privileged")
        for key, role in _ROLES:
            for number, item in enumerate(self._items(spec, (key,), base)):
                path = (*base, key, number)
                if item.members is None:
                    self._add(item.place, path, "not a container", "add name and image")
                    continue
                used = tuple(self._names(item, ("resources", "claims"), path))
                for name in used:
                    if name not in claims:  # ValidateResourceRequirements of pkg/apis/core
                        what = f"{name!r} is not a claim in spec.resourceClaims"
                        here = (*path, "resources", "claims")
                        self._add(item.place, here, what, "add it there, or correct its name")
                flag = item.at(privileged)
                yield PodContainer(
                    name=self._text(item, ("name",), path) or f"number {number + 1}",
                    role=role,
                    limits=tuple(self._limits(item, path)),
                    is_privileged=flag is not None and flag.text.lower() in _TRUE,
                    claims=used,
                    line=item.place.line,
                    is_sidecar=self._text(item, ("restartPolicy",)) == "Always",
                    environment=tuple(self._variables(item, path)),
                    image=self._text(item, ("image",)),
                    words=tuple(
                        each.text
                        for key in ("command", "args")
                        for each in self._items(item, (key,), path)
                    ),
                    block_volumes=tuple(self._names(item, ("volumeDevices",), path)),
                )

    def _limits(self, container: Located, base: Path) -> Iterator[tuple[str, str]]:
        for key, value in self._parts(container, ("resources",), base):
            if key not in _RESOURCES:
                here, what = (*base, "resources", key), f"unknown key {key!r}"
                self._add(value.place, here, what, f"use {', '.join(_RESOURCES)}")
        path = ("resources", "limits")
        found = dict(self._parts(container, path, base))
        for name, value in found.items():
            here = (*base, *path, name)
            quantity = self._quantity(value, here)
            if quantity is None:
                continue
            if _is_of_devices(name) and (quantity.denominator != 1 or quantity < 0):
                what = f"invalid number of devices: {value.text}"
                self._add(value.place, here, what, "use whole numbers for devices")
                continue
            text = str(quantity) if _is_of_devices(name) else value.text
            yield name, text
        for name, value in self._parts(container, ("resources", "requests"), base):
            if _is_of_devices(name) and name not in found:
                here = (*base, "resources", "requests", name)
                remedy = "add it to limits: a device cannot be shared by several pods"
                self._add(value.place, here, "a device is requested without a limit", remedy)

    def _quantity(self, value: Located, path: Path) -> Fraction | None:
        quantity = parse_quantity(value.text)
        if quantity is None:
            what = f"invalid quantity: {value.text or 'this'!r}"
            self._add(value.place, path, what, 'write it like "1", 500m or 16Gi')
        return quantity

    def _names(self, part: Located, path: Path, base: Path) -> Iterator[str]:
        for item in self._items(part, path, base):
            yield self._text(item, ("name",)) or "without a name"

    def _variables(self, part: Located, base: Path) -> Iterator[tuple[str, str | None]]:
        for item in self._items(part, ("env",), base):
            value = item.at(("value",))
            text = "" if value is None else value.text
            yield self._text(item, ("name",)), None if item.at(("valueFrom",)) else text

    def _texts(self, part: Located, path: Path, base: Path) -> Iterator[tuple[str, str]]:
        for key, value in self._parts(part, path, base):
            if isinstance(value.scalar, str):
                yield key, value.scalar
            else:
                remedy = f'quote it: "{value.text}"'
                self._add(
                    value.place, (*base, *path, key), "the annotation is not a string", remedy
                )

    def _parts(self, part: Located, path: Path, base: Path) -> Iterator[tuple[str, Located]]:
        found = part.at(path)
        if found is None or found.is_empty:
            return
        if found.members is None:
            what = f"{path[-1]} is not a mapping"
            self._add(found.place, (*base, *path), what, "write keys with values")
        yield from (found.members or {}).items()

    def _items(self, part: Located, path: Path, base: Path = ()) -> tuple[Located, ...]:
        found = part.at(path)
        if found is not None and found.items is None and not found.is_empty:
            self._add(
                found.place, (*base, *path), f"{path[-1]} is not a list", "start items with -"
            )
        return () if found is None else found.items or ()

    def _text(self, part: Located, path: Path, base: Path = ()) -> str:
        found = part.at(path)
        if found is None or found.is_empty:
            return ""
        if not isinstance(found.scalar, str):
            what = f"{path[-1]} is not a string"
            remedy = f'quote it: "{found.text}"' if found.text else "write a string"
            self._add(found.place, (*base, *path), what, remedy)
        return found.text

    def _add(self, place: Position, path: Path, what: str, remedy: str) -> None:
        self.flaws.append(flaw("pod-invalid", place, shown_path(path), what, remedy))
