"""Pods and RuntimeClasses as their YAML has them, as far as devices are concerned."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from vfiomgr.model.kubernetes import is_extended_resource
from vfiomgr.model.quantity import parse_quantity, whole

CDI_ANNOTATION = "cdi.k8s.io/"
"""Container runtimes take annotations that begin so for CDI names, with commas between them."""
KATA_ANNOTATION = "io.katacontainers.config."
"""What begins so is a key of Kata's configuration, for this pod alone."""

ContainerRole = Literal["container", "init container"]


@dataclass(frozen=True, slots=True)
class PodContainer:
    """A container of a pod."""

    name: str
    role: ContainerRole
    limits: tuple[tuple[str, str], ...]
    """Resources and quantities, as they are written."""
    is_privileged: bool
    claims: tuple[str, ...]
    """Which of the pod's claims it uses (dynamic resource allocation)."""
    line: int
    is_sidecar: bool = False
    """An init container that runs on beside those after it (restartPolicy: Always)."""

    @property
    def devices(self) -> tuple[tuple[str, int], ...]:
        """The resources of device plugins and how many of each."""
        found = ((name, int(text)) for name, text in self.limits if is_extended_resource(name))
        return tuple((name, count) for name, count in found if count)

    def limit(self, name: str) -> str | None:
        """How much of a resource it may use."""
        return dict(self.limits).get(name)


@dataclass(frozen=True, slots=True)
class PodSpec:
    """A pod, or the template of one."""

    kind: str
    """Of the object that it is in: `Pod`, `Deployment`."""
    name: str
    runtime_class: str | None
    annotations: tuple[tuple[str, str], ...]
    containers: tuple[PodContainer, ...]
    """Init containers first, in their order."""
    claims: tuple[str, ...]
    """Names of its claims (dynamic resource allocation)."""
    source: str
    line: int
    runtime_class_line: int
    limits: tuple[tuple[str, str], ...] = ()
    """Of the pod as a whole (spec.resources), which go before those of its containers."""

    def annotation(self, name: str) -> str | None:
        """The value of an annotation."""
        return dict(self.annotations).get(name)

    @property
    def cdi_annotations(self) -> tuple[tuple[str, str], ...]:
        """Each annotation that names devices, with each of its names, as they are written."""
        found = ((key, text) for key, text in self.annotations if key.startswith(CDI_ANNOTATION))
        return tuple((key, name) for key, text in found for name in text.split(","))

    @property
    def cdi_names(self) -> tuple[str, ...]:
        """What its annotations name, in their order."""
        return tuple(name.strip() for _, name in self.cdi_annotations if name.strip())

    @property
    def resources(self) -> tuple[tuple[str, int], ...]:
        """The resources of device plugins, in the order of the containers."""
        names = dict.fromkeys(name for each in self.containers for name, _ in each.devices)
        return tuple((name, self._most(name)) for name in names)

    @property
    def memory_bytes(self) -> int:
        """The limit of its memory, as far as there is one."""
        of_pod = parse_quantity(dict(self.limits).get("memory", ""))
        return self._most("memory") if of_pod is None else whole(of_pod)

    def _most(self, resource: str) -> int:
        """How much it uses at once (AggregateContainerLimits of k8s.io/component-helpers/resource).

        Init containers run one after the other, before the rest; sidecars stay.
        """
        running, highest = Fraction(0), Fraction(0)
        for container in self.containers:
            amount = parse_quantity(container.limit(resource) or "") or Fraction(0)
            if container.role == "init container" and not container.is_sidecar:
                highest = max(highest, running + amount)
            else:
                running += amount
        return whole(max(running, highest))

    def __str__(self) -> str:
        """`Pod cuda`."""
        return f"{self.kind} {self.name}"


@dataclass(frozen=True, slots=True)
class RuntimeClassSpec:
    """A RuntimeClass."""

    name: str
    handler: str
    overhead_bytes: int | None
    """Memory; None where it has no overhead of it."""
    source: str
    line: int


@dataclass(frozen=True, slots=True)
class Objects:
    """What a file of objects holds that says how devices reach pods."""

    pods: tuple[PodSpec, ...]
    runtime_classes: tuple[RuntimeClassSpec, ...]
    others: tuple[str, ...]
    """Kinds of all else."""
