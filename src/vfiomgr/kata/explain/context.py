"""The facts about the way from a pod to its devices, its steps, and their problems."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, Literal

from vfiomgr.containers.cdi.document import is_qualified, read_file
from vfiomgr.containers.cdi.model import DYNAMIC, STATIC, CdiDevice, CdiFile, CdiSpecification
from vfiomgr.containers.cdi.rules import PREFERS_STATIC, Consumer, consumers_named, faults
from vfiomgr.containers.runtimes.handlers import CriName, HandlerEntry, HandlerFacts
from vfiomgr.diagnostic import Diagnostic, Remedy, Severity, finding
from vfiomgr.guests.nodes import is_vfio_node
from vfiomgr.kata.explain.image import GuestImage
from vfiomgr.kata.explain.pod import KATA_ANNOTATION, PodSpec, RuntimeClassSpec
from vfiomgr.kata.facts import NO_PORT, KataSettings
from vfiomgr.kata.model import (
    KataConfigurationFile,
    KataRelease,
    PciePort,
    RuntimeName,
)
from vfiomgr.paths import HostPath
from vfiomgr.pci.model import PciAddress, PciDevice
from vfiomgr.rules.runner import Fact
from vfiomgr.snapshot.model import HostSnapshot
from vfiomgr.units import Version
from vfiomgr.value import Value

LIST = "; "
_KATA = "kata"
StepState = Literal["ok", "broken", "unknown"]
StepName = Literal[
    "pod",
    "runtime class",
    "handler",
    "configuration",
    "request",
    "CDI",
    "node",
    "functions",
    "root ports",
    "guest",
]
"""In the order of the chain."""


NUMBERS: dict[str, int] = {
    "kata-annotation-alone": 1,
    "kata-annotation-ignored": 1,
    "kata-annotation-not-enabled": 1,
    "kata-annotation-refused": 1,
    "kata-claim": 2,
    "kata-foreign-resource": 3,
    "kata-cdi-unreadable": 4,
    "kata-cdi-precedence": 5,
    "kata-drop-in-ending": 6,
    "kata-drop-in-key-ignored": 6,
    "kata-drop-in-key-refused": 6,
    "kata-drop-ins-shared": 6,
    "kata-kernel-params-replaced": 6,
    "kata-conf-file": 7,
    "kata-pci-domain": 8,
    "kata-port-order": 8,
    "kata-overhead": 9,
    "kata-kubelet-timeout": 10,
    "kata-crio-sizes": 11,
    "kata-privileged": 12,
}
"""The rules of the silent or confusing problems that docs/kata.md numbers."""
SILENT = frozenset(
    {
        "kata-annotation-alone",
        "kata-annotation-ignored",
        "kata-annotation-unknown",
        "kata-annotations-not-passed",
        "kata-annotations-overruled",
        "kata-annotations-unread",
        "kata-block-volumes",
        "kata-cdi-precedence",
        "kata-claim",
        "kata-crio-sizes",
        "kata-devices-unnamed",
        "kata-drop-in-ending",
        "kata-drop-in-key-ignored",
        "kata-drop-ins-shared",
        "kata-handler-not-kata",
        "kata-kernel-params-replaced",
        "kata-maxmemory",
        "kata-no-cold-plug",
        "kata-no-pod-resources",
        "kata-no-runtime-class",
        "kata-not-plugged-silently",
        "kata-overhead",
        "kata-pci-domain",
        "kata-port-order",
        "kata-privileged",
        "kata-runtime-drop-in-replaced",
        "kata-runtime-versions-mixed",
        "kata-window",
    }
)
"""The rules of problems that no component reports: the pod runs without its device, or with a
wrong one."""


def chain_break(
    rule: str,
    subject: object,
    summary: str,
    *remedies: str | Remedy,
    is_certain: bool = True,
    evidence: tuple[str, ...] = (),
) -> Diagnostic:
    """A problem that keeps a device from a guest; a warning if it only may."""
    severity: Severity = "blocker" if is_certain else "warning"
    return finding(rule, severity, summary, evidence, "", *remedies, subject=subject)


def is_broken(breaks: Iterable[Diagnostic]) -> bool:
    """Whether one of them certainly breaks the chain."""
    return any(found.severity == "blocker" for found in breaks)


def is_of_kata(name: str) -> bool:
    """Whether a handler, a RuntimeClass or an annotation has a name of Kata."""
    return name.startswith(KATA_ANNOTATION) or ("/" not in name and _KATA in name)


class TraceStep(Value):
    """A step from the pod to its devices."""

    name: StepName
    state: StepState
    parts: tuple[str, ...]
    """The state; for a step with many devices, of each device."""
    looked_at: tuple[str, ...] = ()
    """The evidence: files and facts."""
    breaks: tuple[Diagnostic, ...] = ()

    @property
    def what(self) -> str:
        """All parts in one line."""
        return LIST.join(self.parts)


def judged(
    name: StepName,
    what: str | Iterable[str],
    looked_at: tuple[str, ...] = (),
    breaks: Iterable[Diagnostic] = (),
    otherwise: StepState = "ok",
) -> TraceStep:
    """A step that is broken if one of its problems is certain."""
    found = tuple(breaks)
    parts = (what,) if isinstance(what, str) else tuple(what)
    return TraceStep(name, "broken" if is_broken(found) else otherwise, parts, looked_at, found)


class ClaimVerdict(Value):
    """What the ResourceClaims of a pod get on this host."""

    names: tuple[str, ...]
    """Those of the claims, and of resources that DeviceClasses offer."""
    parts: tuple[str, ...]
    """Their devices, or what is not checked."""
    breaks: tuple[Diagnostic, ...] = ()
    is_known: bool = False
    """Whether they get all devices, and the agent serves claims."""


class PassedFunction(Value):
    """A PCI function assigned to a guest."""

    address: PciAddress
    name: str
    driver: str | None
    is_ready: bool
    port: str | None
    """`rp0`; None without a port."""
    guest_index: int | None
    """The index in the guest's nvidia.com/gpu; None if Kata does not tell the agent."""


class DeviceChain(Value):
    """The chain of one device that the kubelet could assign."""

    resource: str
    id: str
    cdi_name: str
    source: str | None
    """The file with its CDI device."""
    nodes: tuple[str, ...]
    groups: tuple[int, ...]
    functions: tuple[PassedFunction, ...]
    annotations: tuple[tuple[str, str], ...]
    """What Kata writes for the agent in the guest."""
    is_complete: bool
    """Whether its chain is complete."""


class Difference(Value):
    """A property in which the candidate devices of a resource differ."""

    resource: str
    aspect: str
    ids: tuple[tuple[str, tuple[str, ...]], ...]
    """Each value, and the devices that have it."""

    def __str__(self) -> str:
        """`RESOURCE, ASPECT: VALUE: ID, ID; VALUE: …`."""
        values = (f"{value}: {', '.join(ids)}" for value, ids in self.ids)
        return f"{self.resource}, {self.aspect}: {LIST.join(values)}"


class KataTrace(Value):
    """All steps of a pod."""

    pod: str
    kind: str
    source: str
    line: int
    handler: str | None = None
    release: str = ""
    """Empty for a pod that Kata does not run; its chain then ends with the request."""
    release_source: str = ""
    steps: tuple[TraceStep, ...] = ()
    devices: tuple[DeviceChain, ...] = ()
    """Each candidate; the kubelet chooses among them."""
    differences: tuple[Difference, ...] = ()
    """How they differ."""

    @property
    def is_broken(self) -> bool:
        """Whether a step is certainly broken."""
        return any(step.state == "broken" for step in self.steps)

    is_blocked = is_broken

    @property
    def is_fine(self) -> bool:
        """Whether all steps are ok, and none has a possible problem."""
        return all(step.state == "ok" and not step.breaks for step in self.steps)

    @property
    def unknown(self) -> tuple[str, ...]:
        """The steps that could not be checked."""
        return tuple(step.name for step in self.steps if step.state == "unknown")

    @property
    def breaks(self) -> tuple[Diagnostic, ...]:
        """All problems, in the order of the steps."""
        return tuple(found for step in self.steps for found in step.breaks)


_NEW_CRATE = Version(4, 0)
"""From this release on runtime-rs has the crate that supports CDI 1.1."""


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
    endpoint: str = ""
    """containerRuntimeEndpoint."""
    cgroup_driver: str = ""
    """cgroupDriver."""


class DockerFacts(Value):
    """A kubelet that runs pods with Docker, which takes no handlers from containerd's files."""

    program: str
    """`dockershim`, or `cri-dockerd`."""
    source: str
    """What shows it."""
    default: str | None
    """Docker's default runtime; None if unknown."""
    takes_handlers: bool | None = None
    """Whether Docker's runtimes are handlers, as cri-dockerd 0.4 has it; None if unknown."""


class ToolkitFacts(Value):
    """How NVIDIA's container runtime takes devices of containers without privileges."""

    source: str
    refused: tuple[tuple[str, str], ...]
    """Strategies of the device plugin that it refuses, each with its key and value."""


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


class KubeletDevice(Value):
    """A device that the kubelet could assign: its CDI name and its functions."""

    kind: str
    name: str
    source: str | None
    nodes: tuple[str, ...]
    functions: tuple[PciDevice, ...]
    breaks: tuple[tuple[StepName, Diagnostic], ...]
    dropped: tuple[PciDevice, ...] = ()
    """Functions of its groups that the release does not pass to the guest."""

    @property
    def passed(self) -> tuple[PciDevice, ...]:
        """The functions that reach the guest, each behind its own port."""
        return tuple(each for each in self.functions if each not in self.dropped)

    @property
    def groups(self) -> tuple[int, ...]:
        """The IOMMU groups of its functions."""
        found = (d.iommu_group for d in self.functions if d.iommu_group is not None)
        return tuple(dict.fromkeys(found))


Channel = Literal["kubelet", "annotations", "container", "none", "unknown"]
"""PodResources, cdi.k8s.io annotations, device nodes of the container (hot plug)."""
SOCKET = "pod_resource_api_sock"
Q35, ON_ROOT_BUS = "q35", "hotplug_vfio_on_root_bus"


class Request(Value):
    """Devices of one kind that a pod requests, with their names."""

    kind: str
    count: int
    names: tuple[str, ...] = ()
    """The names from annotations; the kubelet chooses the others."""


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
    conf_file: tuple[str, str] | None = None
    """The value of KATA_CONF_FILE for the shim, and where it is set."""
    kubelet: KubeletFacts | None = None
    docker: DockerFacts | None = None
    """Known only if the kubelet runs pods with Docker; there are no handlers then."""
    toolkit: ToolkitFacts | None = None
    lacks_checkpoint: bool = False
    """Whether the kubelet runs without a record of devices that its plugins registered."""
    empty_resources: frozenset[str] = frozenset()
    """Resources with a device plugin that has registered no healthy device."""
    lacks_plugins: bool = False
    """Whether no device plugin has a socket for the kubelet."""
    is_told: bool = False
    """Whether a handler or a configuration of Kata was named for the pod."""
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
    candidates: tuple[KubeletDevice, ...] = ()
    """The devices that the kubelet could assign; known when the request is."""
    claims: ClaimVerdict | None = None
    """None if nothing is known of its claims, or it has none."""

    @cached_property
    def is_kata(self) -> bool:
        """Whether the pod is for Kata: by its handler, names and annotations, or a GPU on VFIO.

        A GPU on VFIO is of no use to a container on the host's kernel.
        """
        names = (self.handler_name, self.pod.runtime_class, *dict(self.pod.annotations))
        return (
            self.is_told
            or (self.entry is not None and self.entry.is_kata)
            or any(name is not None and is_of_kata(name) for name in names)
            or any(d.is_graphics_or_accelerator for c in self.candidates for d in c.functions)
        )

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
        return self.settings is None or self.cold_plug != NO_PORT

    @property
    def cold_plug(self) -> PciePort:
        """The port of devices that are plugged before the guest starts, if the release has it."""
        settings = self.settings
        if settings is None or not self.release.has_plug_keys:
            return NO_PORT
        return settings.cold_plug

    @property
    def is_hot(self) -> bool:
        """Whether devices are plugged into the running guest.

        Releases without plug keys always do; later ones of the Go runtime by hot_plug_vfio.
        """
        settings = self.settings
        if settings is None or not self.release.has_plug_keys:
            return settings is not None
        return not self.is_rs and settings.hot_plug != NO_PORT

    @property
    def is_early_go(self) -> bool:
        """Whether the Go runtime is older than 3.2: no guest index, root ports only by a key."""
        return not self.is_rs and not self.release.has_plug_keys

    @property
    def is_on_root_bus(self) -> bool:
        """Whether a Go runtime before 3.2 plugs devices into the root bus, not into a bridge."""
        settings = self.settings
        if settings is None or not self.is_early_go or settings.hypervisor != "qemu":
            return False
        return settings.value("hypervisor.qemu", ON_ROOT_BUS) is True

    @property
    def has_root_ports(self) -> bool:
        """Whether devices are plugged into root ports, as far as known."""
        is_q35 = self.settings is not None and self.settings.machine_type == Q35
        return not self.is_early_go or (self.is_on_root_bus and is_q35)

    @property
    def requests_devices(self) -> bool:
        """Whether the pod requests a device in any way."""
        spec = self.pod
        return bool(spec.resources or spec.cdi_names or spec.all_claims)

    @property
    def asks_kubelet(self) -> bool:
        """Whether Kata has the kubelet's socket, and the key for it."""
        settings = self.settings
        has_socket = settings is not None and bool(settings.pod_resource_api_sock)
        return has_socket and self.release.knows("runtime", SOCKET)

    @cached_property
    def channel(self) -> Channel:
        """Where Kata looks for devices."""
        settings, names = self.settings, self.pod.cdi_names
        if settings is None:
            return "annotations" if names else "unknown"
        if self.cold_plug != NO_PORT and self.asks_kubelet and (self.pod.resources or not names):
            return "kubelet"
        if self.cold_plug != NO_PORT and names:
            return "annotations"
        return "container" if self.is_hot else "none"

    @cached_property
    def requests(self) -> tuple[Request, ...]:
        """The requested devices by kind, in the order of the pod."""
        found = {name: Request(name, count) for name, count in self.pod.resources}
        if self.channel != "kubelet":
            for text in filter(is_qualified, self.pod.cdi_names):
                kind, _, name = text.partition("=")
                before = found.get(kind, Request(kind, 0))
                names = (*before.names, name)
                found[kind] = Request(kind, max(len(names), before.count), names)
        return tuple(found.values())

    @cached_property
    def picked(self) -> tuple[KubeletDevice, ...]:
        """The first candidates of each kind, as many as the pod requests."""
        picked: list[KubeletDevice] = []
        for item in self.requests:
            picked += [c for c in self.candidates if c.kind == item.kind][: item.count]
        return tuple(picked)

    @property
    def consumer(self) -> Consumer:
        """The consumer of CDI specifications that runs the pod."""
        is_old = self.release.runtime == "rs" and self.release.version < _NEW_CRATE
        return consumers_named("kata-rs-3.31" if is_old else f"kata-{self.release.runtime}")[0]

    @cached_property
    def readable(self) -> tuple[tuple[CdiFile, CdiSpecification], ...]:
        """What the runtime can read, in search order: the last one applies."""
        consumer = self.consumer
        files = [file for file in self.host.cdi_files if consumer.reads(file)]
        pairs = [(file, read_file(file, consumer.family)) for file in files]
        good = [pair for pair in pairs if not faults(pair[1], [consumer])]
        last = STATIC if consumer.has(PREFERS_STATIC) else DYNAMIC
        return tuple(sorted(good, key=lambda pair: pair[0].directory == last))

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of all specifications."""
        return frozenset(each.kind for each in self.published)

    def devices_of(self, kind: str) -> dict[str, Published]:
        """The devices of a kind from the applicable file, sorted by name."""
        found = {each.device.name: each for each in self.published if each.kind == kind}
        return dict(sorted(found.items(), key=lambda item: _by_number(item[0])))

    @cached_property
    def published(self) -> tuple[Published, ...]:
        """All devices that the runtime can read, in the order of `readable`."""
        return tuple(
            Published(file.path, specification, device)
            for file, specification in self.readable
            for device in specification.devices
        )


def _by_number(name: str) -> tuple[int, str]:
    return (int(name), "") if name.isdecimal() and len(name) < 10 else (1 << 31, name)  # noqa: PLR2004


SETTINGS: Fact[PodContext, KataSettings] = Fact(
    lambda context: context.settings, "Kata's settings", "no readable configuration", decides=True
)
"""The effective settings; the step of the configuration is unknown without them."""
