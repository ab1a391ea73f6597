"""The facts about the way from a pod to its devices that `explain` uses."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from vfiomgr.containers.cdi.check import reads
from vfiomgr.containers.cdi.consumers import Consumer, consumers_named
from vfiomgr.containers.cdi.document import read_file
from vfiomgr.containers.cdi.model import DYNAMIC, STATIC, CdiDevice, CdiFile, CdiSpecification
from vfiomgr.containers.cdi.rules import faults
from vfiomgr.containers.runtimes.handlers import CriName, HandlerFacts
from vfiomgr.kata.explain.image import GuestImage
from vfiomgr.kata.explain.pod import PodSpec, RuntimeClassSpec
from vfiomgr.kata.keys import KataSchema
from vfiomgr.kata.model import KataConfigurationFile, KataRelease, RuntimeName
from vfiomgr.kata.settings import NO_PORT, KataSettings
from vfiomgr.paths import HostPath
from vfiomgr.pci.model import PciAddress
from vfiomgr.snapshot.model import HostSnapshot
from vfiomgr.value import Value
from vfiomgr.version import Version

if TYPE_CHECKING:
    from vfiomgr.containers.runtimes.handlers import HandlerEntry

COLD_PLUG, HOT_PLUG = "cold_plug_vfio", "hot_plug_vfio"
HYPERVISOR_ANNOTATION = "io.katacontainers.config.hypervisor."
_NEW_CRATE = Version(4, 0)
"""From this release on runtime-rs has the crate that supports CDI 1.1."""
_CONTROL = ("/dev/vfio/vfio", "/dev/iommu")
"""VFIO nodes that are not devices."""


class ConfigurationFacts(Value):
    """A configuration of Kata, or why it is unknown."""

    looked_for: tuple[str, ...]
    file: KataConfigurationFile | None = None
    settings: KataSettings | None = None
    documents: tuple[tuple[HostPath, Mapping[str, Any]], ...] = ()
    """The file itself and its drop-ins, separately."""
    problem: str = ""


ShimState = Literal["there", "not found", "missing", "not looked for"]
"""`not found` for a name without a path, searched in the usual directories."""


KUBELET_TIMEOUT = 120.0
"""runtimeRequestTimeout if the kubelet's configuration does not set it."""


class KubeletFacts(Value):
    """The relevant settings of the kubelet."""

    source: str
    request_timeout: float
    """Seconds; runtimeRequestTimeout."""
    problem: str = ""
    """Why the file is not readable, with the line."""
    pod_resources_get: bool | None = None
    """The feature gate KubeletPodResourcesGet, if it is set."""
    version: Version | None = None
    """That of the installed package, if known."""


class Published(Value):
    """A CDI device, and its file."""

    path: str
    specification: CdiSpecification
    device: CdiDevice

    @property
    def kind(self) -> str:
        """VENDOR/CLASS."""
        return self.specification.kind

    @property
    def name(self) -> str:
        """VENDOR/CLASS=NAME."""
        return self.specification.qualified(self.device)

    @property
    def directory(self) -> str:
        """The directory of its file."""
        return self.path.rpartition("/")[0]

    @property
    def nodes(self) -> tuple[str, ...]:
        """Its own VFIO device nodes, and those of the entire file."""
        shared = self.specification.edits.device_nodes
        nodes = (node.on_host for node in (*self.device.edits.device_nodes, *shared))
        return tuple(node for node in dict.fromkeys(nodes) if is_vfio_node(node))


class PodContext(Value, dict=True):
    """A pod, and the host's facts about the way to its devices; None if unknown."""

    host: HostSnapshot
    pod: PodSpec
    runtime_class: RuntimeClassSpec | None
    handler_name: str | None
    release: KataRelease
    release_source: str
    cri: CriName
    handlers: HandlerFacts | None
    configuration: ConfigurationFacts
    keys: KataSchema
    conf_file: tuple[str, str] | None = None
    """The value of KATA_CONF_FILE for the shim, and where it is set."""
    kubelet: KubeletFacts | None = None
    shim: ShimState = "not looked for"
    shims: tuple[str, ...] = ()
    """The installed shims of Kata."""
    shim_runtime: RuntimeName | None = None
    """The runtime of the handler's shim, if its path shows it."""
    absent_nodes: frozenset[str] = frozenset()
    """Nodes of specifications that are missing in an existing /dev."""
    guest_image: GuestImage | None = None
    has_kubelet_socket: bool | None = None
    """Whether the configured socket exists; None without the kubelet's directory."""
    is_machine: bool = False
    """Whether it is the running machine, not a file tree."""
    only: frozenset[PciAddress] = frozenset()
    """The requested functions; None for all."""
    only_name: str | None = None
    """The requested CDI device, by name; None for all."""

    @property
    def is_rs(self) -> bool:
        """Whether runtime-rs runs the pod."""
        return self.release.runtime == "rs"

    @property
    def settings(self) -> KataSettings | None:
        """The effective settings of Kata."""
        return self.configuration.settings

    @property
    def entry(self) -> HandlerEntry | None:
        """The handler's entry in the container runtime."""
        if self.handlers is None or self.handler_name is None:
            return None
        return self.handlers.handler(self.handler_name)

    @property
    def has_no_handler(self) -> bool:
        """Whether no Kata handler for the pod is known, and no configuration was named."""
        if self.settings is not None or self.configuration.file is not None:
            return False
        if self.handler_name is None:
            return True
        known = self.handlers is not None and self.handlers.is_known
        return known and (self.entry is None or not self.entry.is_kata)

    @property
    def is_cold(self) -> bool:
        """Whether devices are plugged before the guest starts, as far as known."""
        return self.settings is None or self.settings.cold_plug != NO_PORT

    @property
    def is_hot(self) -> bool:
        """Whether devices are plugged into the running guest: only the Go runtime does."""
        settings = self.settings
        return not self.is_rs and settings is not None and settings.hot_plug != NO_PORT

    def knows(self, section: str, key: str) -> bool:
        """Whether the release has a key."""
        return self.keys.knows(self.release, section, key)

    @property
    def consumer(self) -> Consumer:
        """The consumer of CDI specifications that runs the pod."""
        is_old = self.release.runtime == "rs" and self.release.version < _NEW_CRATE
        return consumers_named("kata-rs-3.31" if is_old else f"kata-{self.release.runtime}")[0]

    @cached_property
    def readable(self) -> tuple[tuple[CdiFile, CdiSpecification], ...]:
        """What the runtime can read, in search order: the last one applies."""
        consumer = self.consumer
        files = [file for file in self.host.cdi_files if reads(consumer, file)]
        pairs = [(file, read_file(file, consumer.family)) for file in files]
        good = [pair for pair in pairs if not faults(pair[1], consumer)]
        last = STATIC if consumer.prefers_static else DYNAMIC
        return tuple(sorted(good, key=lambda pair: pair[0].directory == last))

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of all specifications."""
        return frozenset(each.kind for each in self.published)

    def devices_of(self, kind: str) -> dict[str, Published]:
        """The devices of a kind from the applicable file, sorted by name."""
        found = {each.device.name: each for each in self.published if each.kind == kind}
        return dict(sorted(found.items(), key=lambda item: _natural(item[0])))

    @cached_property
    def published(self) -> tuple[Published, ...]:
        """All devices that the runtime can read, in the order of `readable`."""
        return tuple(
            Published(file.path, specification, device)
            for file, specification in self.readable
            for device in specification.devices
        )


def is_vfio_node(path: str) -> bool:
    """Whether a node represents a group or a device."""
    return path.startswith("/dev/vfio/") and path not in _CONTROL


def _natural(name: str) -> tuple[int, str]:
    """Sort numbers by value."""
    return (int(name), "") if name.isdecimal() and len(name) < 10 else (1 << 31, name)  # noqa: PLR2004
