"""What can be seen of the way from a pod to its devices: all that `explain` looks at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from vfiomgr.model.cdi import CdiSpecification
from vfiomgr.model.handler import CriName, HandlerFacts
from vfiomgr.model.kata import KataRelease
from vfiomgr.model.kata_installation import KataConfigurationFile
from vfiomgr.model.kata_keys import KeyTable
from vfiomgr.model.kata_settings import KataSettings
from vfiomgr.model.path import HostPath
from vfiomgr.model.pci import PciAddress
from vfiomgr.model.pod import PodSpec, RuntimeClassSpec
from vfiomgr.model.snapshot import HostSnapshot

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.model.cdi import CdiDevice
    from vfiomgr.model.handler import HandlerEntry

COLD_PLUG, HOT_PLUG = "cold_plug_vfio", "hot_plug_vfio"
HYPERVISOR_ANNOTATION = "io.katacontainers.config.hypervisor."
_ETC = "/etc/cdi/"
_CONTROL = ("/dev/vfio/vfio", "/dev/iommu")
"""Nodes of VFIO that are no device."""


@dataclass(frozen=True, slots=True)
class SpecificationFile:
    """A file with a CDI specification, or with none that can be read."""

    path: str
    specification: CdiSpecification | None
    problem: str = ""

    @property
    def directory(self) -> str:
        """Where it lies."""
        return self.path.rpartition("/")[0]


@dataclass(frozen=True, slots=True)
class ConfigurationFacts:
    """A configuration of Kata, or why there is none to be seen."""

    looked_for: tuple[str, ...]
    file: KataConfigurationFile | None = None
    settings: KataSettings | None = None
    documents: tuple[tuple[HostPath, Mapping[str, Any]], ...] = ()
    """The file itself and its drop-ins, one by one."""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class KubeletFacts:
    """What of the kubelet's configuration decides."""

    source: str
    request_timeout: float
    """Seconds; runtimeRequestTimeout."""


@dataclass(frozen=True)
class Situation:
    """A pod, and what a host shows of the way to its devices; None where nobody could look."""

    host: HostSnapshot
    pod: PodSpec
    runtime_class: RuntimeClassSpec | None
    handler_name: str | None
    release: KataRelease
    release_source: str
    cri: CriName
    handlers: HandlerFacts | None
    configuration: ConfigurationFacts
    keys: KeyTable
    specifications: tuple[SpecificationFile, ...] | None
    conf_file: tuple[str, str] | None = None
    """What KATA_CONF_FILE is for the shim, and where that is said."""
    kubelet: KubeletFacts | None = None
    only: frozenset[PciAddress] = frozenset()
    """Functions that were asked about; none for all."""

    @property
    def is_rs(self) -> bool:
        """Whether runtime-rs runs the pod."""
        return self.release.runtime == "rs"

    @property
    def settings(self) -> KataSettings | None:
        """What Kata's configuration says in the end."""
        return self.configuration.settings

    @property
    def entry(self) -> HandlerEntry | None:
        """What the container runtime knows of the handler."""
        if self.handlers is None or self.handler_name is None:
            return None
        return self.handlers.handler(self.handler_name)

    @property
    def is_cold(self) -> bool:
        """Whether devices are plugged before the guest starts, as far as can be seen."""
        return self.settings is None or self.settings.cold_plug != "no-port"

    @property
    def is_hot(self) -> bool:
        """Whether devices are plugged into the running guest: the Go runtime's way alone."""
        settings = self.settings
        return not self.is_rs and settings is not None and settings.hot_plug != "no-port"

    def knows(self, section: str, key: str) -> bool:
        """Whether the release has a key, or may have it."""
        return self.keys.knowledge(self.release, section, key) != "unknown"

    @cached_property
    def readable(self) -> tuple[tuple[SpecificationFile, CdiSpecification], ...]:
        """The specifications in the order in which the runtime looks: the last one counts.

        Go and containerd prefer /var/run/cdi to /etc/cdi (DefaultSpecDirs in
        pkg/cdi/spec-dirs.go), runtime-rs the other way round (handle_cdi_devices).
        """
        found = [(f, f.specification) for f in self.specifications or () if f.specification]
        return tuple(sorted(found, key=lambda pair: pair[0].path.startswith(_ETC) == self.is_rs))

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds that there are specifications of."""
        return frozenset(specification.kind for _, specification in self.readable)

    def devices_of(self, kind: str) -> dict[str, tuple[SpecificationFile, CdiDevice]]:
        """The devices of a kind by name, from the file that counts, sorted by name."""
        found = {
            device.name: (file, device)
            for file, specification in self.readable
            if specification.kind == kind
            for device in specification.devices
        }
        return dict(sorted(found.items(), key=lambda item: _natural(item[0])))

    def nodes_of(self, file: SpecificationFile, device: CdiDevice) -> tuple[str, ...]:
        """The device's own nodes of VFIO, and those that all devices of its file have."""
        shared = file.specification.edits.device_nodes if file.specification else ()
        nodes = (node.on_host for node in (*device.edits.device_nodes, *shared))
        return tuple(n for n in dict.fromkeys(nodes) if is_vfio_node(n))

    def published(self) -> Iterator[tuple[str, SpecificationFile, str]]:
        """Each node with the file and the full name that it is published under."""
        for file, specification in self.readable:
            for device in specification.devices:
                for node in self.nodes_of(file, device):
                    yield node, file, specification.qualified(device)


def is_vfio_node(path: str) -> bool:
    """Whether a node stands for a group or a device."""
    return path.startswith("/dev/vfio/") and path not in _CONTROL


def _natural(name: str) -> tuple[int, str]:
    """Numbers by value."""
    return (int(name), "") if name.isdecimal() and len(name) < 10 else (1 << 31, name)  # noqa: PLR2004
