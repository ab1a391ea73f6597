"""Handlers of container runtimes: what a RuntimeClass names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vfiomgr.model.version import Version

CriName = Literal["containerd", "crio"]


@dataclass(frozen=True, slots=True)
class HandlerEntry:
    """What a container runtime knows of a handler."""

    name: str
    source: str
    """The file that says it last."""
    runtime_type: str = ""
    """`io.containerd.kata-vfio.v2`; `vm` for CRI-O."""
    runtime_path: str = ""
    """Of the shim; empty where it is looked for by the type's name."""
    config_path: str = ""
    """Of Kata's configuration; empty where the shim looks for it."""
    privileged_without_host_devices: bool = False
    pod_annotations: tuple[str, ...] = ()
    """Patterns of annotations of the pod that the shim is told; CRI-O: allowed_annotations."""

    def tells(self, annotation: str) -> bool:
        """Whether the shim is told of an annotation (a `*` at the end of a pattern is the rest)."""
        return any(
            annotation.startswith(pattern.removesuffix("*"))
            if pattern.endswith("*")
            else annotation == pattern
            for pattern in self.pod_annotations
        )

    @property
    def is_kata(self) -> bool:
        """Whether it runs a VM of Kata's."""
        is_named = "kata" in self.runtime_type or "kata" in self.runtime_path
        return is_named or self.runtime_type == "vm"

    @property
    def shim(self) -> str:
        """The program's name where no path is there: containerd-shim-NAME-VERSION; or nothing."""
        if not self.runtime_type:
            return ""
        *_, name, version = ("", "", *self.runtime_type.split("."))
        return f"containerd-shim-{name}-{version}"


@dataclass(frozen=True, slots=True)
class UnreadFile:
    """A file of a container runtime's configuration that cannot be read."""

    place: str
    """`FILE:LINE` where a place in it is wrong."""
    why: str
    is_wrong: bool = True
    """Whether the runtime can read it no better; else it is we who may not."""
    is_unsure: bool = False
    """Whether only some releases look at it: a drop-in that nothing imports."""

    def __str__(self) -> str:
        """`/etc/containerd/config.toml:3: …`."""
        return f"{self.place}: {self.why}"


MixtureEffect = Literal["stops", "hides", "ignored", "unknown"]
"""`hides` what was said of CRI before that file; `unknown` where it depends, or was not tried."""


@dataclass(frozen=True, slots=True)
class MixedVersions:
    """A file of containerd's configuration that is of another version than the main one."""

    file: str
    what: str
    remedy: str
    effect: MixtureEffect = "unknown"

    def __str__(self) -> str:
        """Both sentences."""
        return f"{self.what}. {self.remedy[:1].upper()}{self.remedy[1:]}"


@dataclass(frozen=True, slots=True)
class HandlerFacts:
    """The configuration of a container runtime, as far as handlers are concerned."""

    cri: CriName
    files: tuple[str, ...]
    """What was read, in this order."""
    handlers: tuple[HandlerEntry, ...]
    unreadable: tuple[UnreadFile, ...] = ()
    """Files that are no TOML, or that nobody here may read."""
    unsure: tuple[str, ...] = ()
    """Drop-ins that nothing imports: containerd 2.3 reads them all the same."""
    schemas: tuple[tuple[str, int], ...] = ()
    """containerd's `version` of each file that says one."""
    version: Version | None = None
    """Of containerd, where it tells."""
    with_cri: tuple[str, ...] = ()
    """The files that have something for containerd's CRI plugin."""
    mixed: tuple[MixedVersions, ...] = ()
    """Imports of another version than the main file."""
    disabling: tuple[str, ...] = ()
    """The files that turn containerd's CRI plugin off (disabled_plugins)."""

    @property
    def is_known(self) -> bool:
        """Whether there was a configuration to read, and all that every release reads of it was."""
        is_whole = all(file.is_unsure for file in self.unreadable)
        return bool(self.files or self.unsure) and is_whole

    def schema(self, source: str) -> int | None:
        """The version of the configuration's format that a file says it has."""
        return dict(self.schemas).get(source)

    def handler(self, name: str) -> HandlerEntry | None:
        """The entry of a handler."""
        return next((entry for entry in self.handlers if entry.name == name), None)
