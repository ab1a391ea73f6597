"""Check whether a pod gets its devices: combine the facts of a host and of a pod."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Unpack

from msgspec.structs import replace

from vfiomgr.cli.keywords import Keywords, Option, fields_of
from vfiomgr.containers.cdi.document import read_file
from vfiomgr.containers.resource_names import default_names
from vfiomgr.containers.runtimes.handlers import CriName
from vfiomgr.documents.text import STANDARD_INPUT, source_of, text_of
from vfiomgr.errors import UsageError, forbid_together
from vfiomgr.guests.model import HOST_FILE
from vfiomgr.kata.explain import configuration, devices, functions, pod_to_shim, resources
from vfiomgr.kata.explain import facts as gather
from vfiomgr.kata.explain.context import (
    ConfigurationFacts,
    Difference,
    KataTrace,
    PodContext,
    with_annotations,
)
from vfiomgr.kata.explain.facts import has_program, kata_conf_file, runtime_of
from vfiomgr.kata.explain.mediated import devices_named
from vfiomgr.kata.explain.pod import Objects, PodContainer, PodSpec, read_objects
from vfiomgr.kata.facts import installation_of
from vfiomgr.kata.kubernetes import require_label, require_resource
from vfiomgr.kata.model import (
    DEFAULT_HANDLER,
    NEWEST,
    KataRelease,
    KataRuntime,
    KataVersion,
    RuntimeName,
    handler_configuration,
)
from vfiomgr.units import Version
from vfiomgr.users.node_agent import find_status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from vfiomgr.containers.runtimes.handlers import HandlerEntry, HandlerFacts
    from vfiomgr.kata.explain.context import DeviceChain, ShimState, TraceStep
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.snapshot.source import HostSource


class ExplainOptions(Keywords, total=False):
    """What decides about pods, if not the host; every option may be omitted."""

    version: KataVersion
    runtime: KataRuntime
    config: Annotated[
        str | None,
        Option(
            "Use this Kata configuration.  [default: that of the handler]",
            metavar="FILE",
            complete=HOST_FILE,
        ),
    ]
    handler: Annotated[
        str | None,
        Option(
            "Use this handler if the file lacks the RuntimeClass.",
            metavar="NAME",
            complete="kata.completion:complete_handler",
        ),
    ]
    cri: Annotated[
        CriName | None,
        Option(
            "Check this container runtime.  [default: the configured one]", flags=("--runtime",)
        ),
    ]
    resource: Annotated[
        str | None,
        Option(
            "Use this resource name of the device plugin, for DEVICE.",
            metavar="DOMAIN/NAME",
            complete="containers.cdi.completion:complete_cdi_kind",
        ),
    ]


def explain_pod(
    host: HostSource, pod: str | os.PathLike[str], **options: Unpack[ExplainOptions]
) -> tuple[KataTrace, ...]:
    """Check for each pod of a file whether it gets its devices, step by step.

    `pod` is a file of Kubernetes objects (YAML or JSON), or a device: an address, or KIND=NAME of
    CDI; then a pod that requests it is assumed. `version` is that of Kata (`3.31`; None for the
    installed one), `runtime` is `go` or `rs`, `config` is Kata's configuration, `handler` is that
    of the RuntimeClass, `cri` is `containerd` or `crio`, and `resource` is the device plugin's name
    for a device. Nothing is started, and no cluster is contacted.

    Raises:
        UsageError: there is no such file or device, or an option is invalid.
        InvalidDocument: the file has no pod.
        Refusal: the device is a bridge, or a mediated device.

    """
    fields = fields_of(ExplainOptions, options)
    version, handler, resource = (fields.get(k) for k in ("version", "handler", "resource"))
    subject = os.fspath(pod)
    told = None if version is None else Version.parse(version)
    if handler is not None:
        require_label("--handler", handler)
    if resource is not None:
        require_resource("--resource", resource)
    seen = host.scan()
    if host.snapshot is None:
        seen = replace(seen, users=replace(seen.users, agent=find_status(host.tree)))
    chosen = (fields.get(key) for key in ("runtime", "config", "cri"))
    scene = _Scene(host, seen, told, *chosen)
    if _is_file(subject):
        objects = read_objects(text_of(subject, "the pod"), source_of(subject))
        found = tuple(scene.explain(spec, objects, handler) for spec in objects.pods)
    else:
        found = (scene.explain_device(subject, resource, handler or DEFAULT_HANDLER),)
    for text in dict.fromkeys(filter(None, scene.beyond_known)):
        host.on_note(f"{text}: checked as that release")
    return found


def _is_file(subject: str) -> bool:
    """Whether the argument is a file, or looks like a file name."""
    if subject == STANDARD_INPUT or os.path.exists(subject):
        return True
    return subject.endswith((".yaml", ".yml", ".json"))


_NOTHING = Objects((), (), ())


def _pod_for(subject: str, kind: str, handler: str) -> PodSpec:
    """A pod that requests one device of a kind."""
    container = PodContainer("main", "container", ((kind, "1"),), False, (), 0)  # noqa: FBT003
    return PodSpec("Pod", "example", handler, (), (container,), (), subject, 0, 0)


class _Scene:
    """The facts that do not depend on the pod."""

    def __init__(  # noqa: PLR0913, PLR0917 - what was typed
        self,
        source: HostSource,
        host: HostSnapshot,
        version: Version | None,
        runtime: RuntimeName | None,
        config: str | None,
        cri: CriName | None,
    ) -> None:
        self._source, self._host = source, host
        self._version, self._runtime, self._config = version, runtime, config
        self._is_live = source.snapshot is None
        self._cri: CriName = cri or "containerd"
        self._handlers: HandlerFacts | None = None
        self._installed = installation_of(source)
        self.beyond_known: list[str | None] = []
        if self._is_live:
            self._handlers = gather.read_handlers(source.tree, cri)
            self._cri = self._handlers.cri

    def explain(
        self,
        spec: PodSpec,
        objects: Objects,
        handler: str | None,
        *,
        only: Iterable[PciDevice] = (),
        only_name: str | None = None,
    ) -> KataTrace:
        """The chain of one pod."""
        classes = (c for c in objects.runtime_classes if c.name == spec.runtime_class)
        runtime_class = next(classes, None)
        name = handler or (runtime_class.handler if runtime_class else spec.runtime_class)
        entry = None
        if self._handlers is not None and name is not None:
            entry = self._handlers.handler(name)
        conf_file = None
        if self._is_live and name is not None and not self._lacks(entry):
            program = (entry.runtime_path or entry.shim) if entry else f"containerd-shim-{name}-v2"
            conf_file = kata_conf_file(self._source.tree, self._cri, program)
        version, source = self._version_told()
        shim_runtime = self._runtime_of_shim(entry)
        runtime = self._runtime or shim_runtime
        likely = runtime or self._installed.default_runtime(version)
        configuration = self._configuration(entry, conf_file, name, likely)
        settings, tree = configuration.settings, self._source.tree if self._is_live else None
        if runtime is None and settings is not None:
            runtime = settings.stated_runtime
        release = KataRelease(version, runtime or likely)
        self.beyond_known.append(release.beyond_known)
        return trace(
            PodContext(
                host=self._host,
                pod=spec,
                runtime_class=runtime_class,
                handler_name=name,
                release=release,
                release_source=source,
                cri=self._cri,
                handlers=self._handlers,
                configuration=configuration,
                conf_file=conf_file,
                shim=self._shim(entry),
                shim_runtime=shim_runtime,
                shims=tuple(shim.path for shim in self._installed.shims),
                kubelet=gather.read_kubelet(tree) if tree else None,
                absent_nodes=gather.absent_nodes(tree, self._host) if tree else frozenset(),
                guest_image=gather.image_of(tree, settings) if tree and settings else None,
                has_kubelet_socket=gather.has_socket(tree, settings) if tree else None,
                is_machine=tree is not None and tree.is_machine,
                only=frozenset(device.address for device in only),
                only_name=only_name,
            )
        )

    def explain_device(self, text: str, resource: str | None, handler: str) -> KataTrace:
        """The chain of a pod that only requests a device.

        Raises:
            Refusal: it is a bridge or a mediated device.
            UsageError: there is no such device.

        """
        if "=" in text:
            return self._explain_name(text, resource, handler)
        (device,) = devices_named(self._host, (text,))
        kind = resource or self._kind_of(device)
        kind = kind or default_names(self._host, [device])[device.address]
        return self.explain(_pod_for(text, kind, handler), _NOTHING, handler, only=(device,))

    def _explain_name(self, text: str, resource: str | None, handler: str) -> KataTrace:
        """The same for a device by its CDI name, KIND=NAME."""
        kind, _, name = text.partition("=")
        known = [read_file(file) for file in self._host.cdi_files]
        if not any(s.kind == kind and name in [d.name for d in s.devices] for s in known):
            message = f"no such device in the CDI specifications of this host: {text}"
            raise UsageError(message, "vfiomgr cdi list shows the devices")
        if resource not in (None, kind):
            forbid_together("--resource", text, f"the resource is already given as the kind {kind}")
        return self.explain(_pod_for(text, kind, handler), _NOTHING, handler, only_name=name)

    def _kind_of(self, device: PciDevice) -> str | None:
        """The kind of the first specification with the device's node."""
        nodes = self._host.guest_nodes(device)
        for file in self._host.cdi_files:
            specification = read_file(file)
            for own in specification.devices:
                if any(node.on_host in nodes for node in own.edits.device_nodes):
                    return specification.kind
        return None

    def _lacks(self, entry: HandlerEntry | None) -> bool:
        """Whether the container runtime is known to lack such a handler."""
        return entry is None and self._handlers is not None and self._handlers.is_known

    def _shim(self, entry: HandlerEntry | None) -> ShimState:
        program = (entry.runtime_path or entry.shim) if entry is not None else ""
        if not program or not self._is_live:
            return "not looked for"
        if has_program(self._source.tree, program):
            return "there"
        return "missing" if program.startswith("/") else "not found"

    def _version_told(self) -> tuple[Version, str]:
        """The version, and its source."""
        version = self._version or self._installed.version or NEWEST
        source = "assumed: the newest known release"
        if self._version is not None:
            source = "--kata-version"
        elif self._installed.version is not None:
            source = self._installed.version_source
        return version, source

    def _runtime_of_shim(self, entry: HandlerEntry | None) -> RuntimeName | None:
        """The runtime of the handler's shim, by its path and the target of its links."""
        program = (entry.runtime_path or entry.shim) if entry is not None else ""
        if not self._is_live:
            return None
        return runtime_of(self._source.tree, program)

    def _configuration(
        self,
        entry: HandlerEntry | None,
        conf_file: tuple[str, str] | None,
        handler: str | None,
        runtime: RuntimeName,
    ) -> ConfigurationFacts:
        if self._config is not None:
            return gather.named_configuration(self._source, self._config)
        if not self._is_live:
            return ConfigurationFacts((), problem="a snapshot does not contain it")
        if handler is None or (entry is not None and not entry.is_kata):
            return ConfigurationFacts((), problem="no Kata handler")
        if self._lacks(entry):
            own = gather.read_settings_of(self._source.tree, [handler_configuration(handler)])
            problem = f"handler {handler} not found, which would name it"
            return own if own.file is not None else ConfigurationFacts((), problem=problem)
        paths = gather.configuration_paths(entry, conf_file, handler, runtime)
        return gather.read_settings_of(self._source.tree, paths)


def trace(context: PodContext) -> KataTrace:
    """Every link, also after a broken one: all problems are reported at once."""
    spec = context.pod
    effective = with_annotations(context)
    chains = functions.chains(effective)
    return KataTrace(
        pod=spec.name,
        kind=spec.kind,
        source=spec.source,
        line=spec.line,
        handler=context.handler_name,
        release=str(context.release),
        release_source=context.release_source,
        steps=(
            pod_to_shim.pod(effective),
            pod_to_shim.runtime_class(effective),
            pod_to_shim.handler(effective),
            configuration.configuration(context),
            *_later(effective),
        ),
        devices=chains,
        differences=tuple(_differences(effective, chains)),
    )


def _later(context: PodContext) -> Iterator[TraceStep]:
    """The steps after the configuration; unknown for a pod without a Kata handler."""
    for step in (resources.request(context), devices.cdi(context), *functions.steps(context)):
        is_open = context.has_no_handler and step.state == "ok"
        yield replace(step, state="unknown") if is_open else step


def _differences(context: PodContext, chains: Sequence[DeviceChain]) -> Iterator[Difference]:
    """The differences between the candidate devices."""
    host = context.host

    def node(chain: DeviceChain) -> str:
        found = {host.device(function.address).numa_node for function in chain.functions}
        return ", ".join(str(number) for number in sorted(n for n in found if n is not None)) or "-"

    aspects: tuple[tuple[str, Callable[[DeviceChain], str]], ...] = (
        ("is complete", lambda chain: "yes" if chain.is_complete else "no"),
        ("device", lambda chain: chain.functions[0].name if chain.functions else "-"),
        ("functions", lambda chain: str(len(chain.functions))),
        ("NUMA node", node),
        ("specification", lambda chain: chain.source or "-"),
    )
    for resource in dict.fromkeys(chain.resource for chain in chains):
        same = [chain for chain in chains if chain.resource == resource]
        for name, tell in aspects:
            by_value: dict[str, list[str]] = {}
            for chain in same:
                by_value.setdefault(tell(chain), []).append(chain.id)
            if len(by_value) > 1:
                ids = tuple((value, tuple(names)) for value, names in by_value.items())
                yield Difference(resource, name, ids)
