"""Pods and RuntimeClasses as their YAML has them, as far as devices are concerned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vfiomgr.model.kubernetes import is_extended_resource

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
    claims: tuple[str, ...]
    """Names of its claims (dynamic resource allocation)."""
    source: str
    line: int
    runtime_class_line: int

    def annotation(self, name: str) -> str | None:
        """The value of an annotation."""
        return dict(self.annotations).get(name)

    @property
    def cdi_names(self) -> tuple[str, ...]:
        """What its annotations name, in their order."""
        values = (text for key, text in self.annotations if key.startswith(CDI_ANNOTATION))
        return tuple(name.strip() for text in values for name in text.split(",") if name.strip())

    @property
    def resources(self) -> tuple[tuple[str, int], ...]:
        """The resources of device plugins, in the order of the containers."""
        found: dict[str, int] = {}
        for container in self.containers:
            for name, count in container.devices:
                found[name] = found.get(name, 0) + count
        return tuple(found.items())

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
