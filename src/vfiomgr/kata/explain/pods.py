"""Check whether a pod gets its devices: combine the facts of a host and of a pod."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Unpack

from msgspec.structs import replace

from vfiomgr.cli.keywords import Keywords, Option, fields_of
from vfiomgr.containers.cdi.document import read_file
from vfiomgr.containers.resource_names import default_names
from vfiomgr.containers.runtimes.handlers import CriName
from vfiomgr.documents.text import STANDARD_INPUT, source_of, text_of
from vfiomgr.errors import UsageError, forbid_together
from vfiomgr.guests.model import HOST_FILE
from vfiomgr.host.installation import remedy_for_extra
from vfiomgr.kata.explain import cluster, configuration, devices, functions, pod_to_shim, resources
from vfiomgr.kata.explain import facts as gather
from vfiomgr.kata.explain.context import (
    ClaimVerdict,
    ConfigurationFacts,
    Difference,
    KataTrace,
    PodContext,
)
from vfiomgr.kata.explain.mediated import devices_named
from vfiomgr.kata.explain.pod import Objects, PodContainer, PodSpec, no_pod, read_objects
from vfiomgr.kata.facts import installation_of
from vfiomgr.kata.kubernetes import require_label, require_resource
from vfiomgr.kata.model import (
    DEFAULT_HANDLER,
    NEWEST,
    KataRelease,
    KataRuntime,
    KataVersion,
    RuntimeName,
)
from vfiomgr.units import Version
from vfiomgr.users.node_agent import find_status

if TYPE_CHECKING:
    from vfiomgr.kata.explain.context import DeviceChain
    from vfiomgr.pci.model import PciAddress, PciDevice
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
    layout: Annotated[
        str | None,
        Option(
            "Use this layout of the node, for claims.  [default: the installed one]",
            flags=("--with-layout",),
            metavar="FILE",
            complete="cli.options:complete_file",
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
        InvalidDocument: the file has no pod, and nothing else that is judged.
        Refusal: the device is a bridge, or a mediated device.
    """
    fields = fields_of(ExplainOptions, options)
    version, handler, resource = (fields.get(k) for k in ("version", "handler", "resource"))
    subject = os.fspath(pod)
    version_told = None if version is None else Version.parse(version)
    if handler is not None:
        require_label("--handler", handler)
    if resource is not None:
        require_resource("--resource", resource)
    seen = host.scan(with_readiness=True)
    if host.snapshot is None:
        seen = replace(seen, users=replace(seen.users, agent=find_status(host.tree)))
    chosen = (fields.get(key) for key in ("runtime", "config", "cri"))
    scene = _Scene(host, seen, version_told, *chosen)
    is_file = subject == STANDARD_INPUT or os.path.exists(subject)
    if is_file or subject.endswith((".yaml", ".yml", ".json")):
        content = text_of(subject, "the pod")
        objects = read_objects(content, source_of(subject), needs_pod=False)
        claims = _claims(host, seen, objects, content, fields.get("layout"))
        contexts = [
            replace(scene.context(spec, objects, handler), claims=own)
            for spec, own in zip(objects.pods, claims, strict=True)
        ]
        more = tuple(cluster.traces(seen, scene.kubernetes, objects.others, objects.pods))
        if not contexts and not more:
            raise no_pod(objects, source_of(subject))
    else:
        more = ()
        contexts = [scene.context_of_device(subject, resource, handler or DEFAULT_HANDLER)]
    for text in dict.fromkeys(context.release.beyond_known for context in contexts):
        if text is not None:
            host.on_note(f"{text}: checked as that release")
    return (*map(trace, contexts), *more)


def _claims(
    source: HostSource, host: HostSnapshot, objects: Objects, text: str, layout: str | None
) -> Sequence[ClaimVerdict | None]:
    """What the claims of each pod of a file get on this host.

    Raises:
        UsageError: the file with the layout cannot be read.
        InvalidDocument: the layout is malformed.
    """
    pods = objects.pods
    others = (each for each in objects.others if each.kind == "DeviceClass")
    if not any(pod.all_claims for pod in pods) and not any(others):
        return [None for _ in pods]
    tree = source.tree if source.snapshot is None else None
    try:
        judge = import_module("vfiomgr.node.simulation.explaining")  # cel is of an extra
    except ModuleNotFoundError:
        parts = (f"not checked: claims; {remedy_for_extra('simulate')}",)
        return [ClaimVerdict((), parts) if pod.all_claims else None for pod in pods]
    found = judge.verdicts(host, tree, text, pods[0].source, layout)
    return [
        own if own and (pod.all_claims or own.names) else None
        for pod, own in zip(pods, found, strict=True)
    ]


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
        self._runtime, self._config = runtime, config
        self._tree = source.tree if source.snapshot is None else None
        tree = self._tree
        self.kubernetes = gather.kubelet_version(tree) if tree else None
        self._kubelet = gather.read_kubelet(tree, self.kubernetes) if tree else None
        self._docker = None
        if tree and cri is None:
            self._docker = gather.read_docker(tree, self._kubelet, self.kubernetes)
        self._handlers = gather.read_handlers(tree, cri) if tree and not self._docker else None
        self._cri: CriName = self._handlers.cri if self._handlers else cri or "containerd"
        self._installed = installation_of(source)
        self._version, self._version_source = NEWEST, "assumed: the newest known release"
        if version is not None:
            self._version, self._version_source = version, "--kata-version"
        elif self._installed.version is not None:
            self._version = self._installed.version
            self._version_source = self._installed.version_source

    def context(
        self,
        spec: PodSpec,
        objects: Objects,
        handler: str | None,
        *,
        only: frozenset[PciAddress] = frozenset(),
        only_name: str | None = None,
    ) -> PodContext:
        """One pod with all facts."""
        classes = (c for c in objects.runtime_classes if c.name == spec.runtime_class)
        runtime_class = next(classes, None)
        name = handler or (runtime_class.handler if runtime_class else spec.runtime_class)
        handlers, tree = self._handlers, self._tree
        if name is None and handlers is not None:
            default = handlers.handler(handlers.default)
            name = default.name if default is not None and default.is_kata else None
        entry = handlers.handler(name) if handlers is not None and name is not None else None
        is_lacking = entry is None and handlers is not None and handlers.is_known
        program = (entry.runtime_path or entry.shim) if entry is not None else ""
        conf_file = None
        if tree is not None and name is not None and not is_lacking:
            shim = program if entry is not None else f"containerd-shim-{name}-v2"
            conf_file = gather.kata_conf_file(tree, self._cri, shim)
        shim_runtime = gather.runtime_of(tree, program) if tree is not None else None
        likely = self._runtime or shim_runtime or self._installed.default_runtime(self._version)
        configuration = ConfigurationFacts((), problem="a snapshot does not contain it")
        if self._config is not None:
            configuration = gather.named_configuration(self._source, self._config)
        elif tree is not None and is_lacking and name is not None:
            configuration = gather.own_configuration(tree, name)
        elif tree is not None:
            configuration = gather.handler_configuration_of(tree, entry, conf_file, name, likely)
        settings = configuration.settings
        stated = settings.stated_runtime if settings is not None else None
        return PodContext(
            host=self._host,
            pod=spec,
            runtime_class=runtime_class,
            handler_name=name,
            release=KataRelease(self._version, self._runtime or shim_runtime or stated or likely),
            release_source=self._version_source,
            cri=self._cri,
            handlers=handlers,
            configuration=configuration,
            conf_file=conf_file,
            shim=gather.state_of_shim(tree, program) if tree is not None else "not looked for",
            shim_runtime=shim_runtime,
            shims=tuple(shim.path for shim in self._installed.shims),
            kubelet=self._kubelet,
            docker=self._docker,
            toolkit=gather.read_toolkit(tree) if tree else None,
            lacks_checkpoint=gather.lacks_checkpoint(tree) if tree else False,
            empty_resources=gather.empty_resources(tree) if tree else frozenset(),
            lacks_plugins=gather.lacks_plugins(tree) if tree else False,
            is_told=handler is not None or self._config is not None,
            absent_nodes=gather.absent_nodes(tree, self._host) if tree else frozenset(),
            guest_image=gather.image_of(tree, settings) if tree and settings else None,
            has_kubelet_socket=gather.has_socket(tree, settings) if tree else None,
            is_machine=tree is not None and tree.is_machine,
            only=only,
            only_name=only_name,
        )

    def context_of_device(self, text: str, resource: str | None, handler: str) -> PodContext:
        """A pod that only requests a device: an address, or a CDI name KIND=NAME.

        Raises:
            Refusal: it is a bridge or a mediated device.
            UsageError: there is no such device.
        """
        if "=" in text:
            kind, _, name = text.partition("=")
            known = map(read_file, self._host.cdi_files)
            if not any(s.kind == kind and name in [d.name for d in s.devices] for s in known):
                message = f"no such device in the CDI specifications of this host: {text}"
                raise UsageError(message, "vfiomgr cdi list shows the devices")
            if resource not in (None, kind):
                why = f"the resource is already given as the kind {kind}"
                forbid_together("--resource", text, why)
            pod = _pod_for(text, kind, handler)
            return self.context(pod, _NOTHING, handler, only_name=name)
        (device,) = devices_named(self._host, (text,))
        kind = resource or self._kind_of(device)
        kind = kind or default_names(self._host, [device])[device.address]
        pod = _pod_for(text, kind, handler)
        return self.context(pod, _NOTHING, handler, only=frozenset({device.address}))

    def _kind_of(self, device: PciDevice) -> str:
        """The kind of the first specification with the device's node; empty without any."""
        nodes = self._host.guest_nodes(device)
        for specification in map(read_file, self._host.cdi_files):
            for own in specification.devices:
                if any(node.on_host in nodes for node in own.edits.device_nodes):
                    return specification.kind
        return ""


_NOTHING = Objects((), (), ())


def _pod_for(subject: str, kind: str, handler: str) -> PodSpec:
    """A pod that requests one device of a kind."""
    container = PodContainer("main", "container", ((kind, "1"),), False, (), 0)  # noqa: FBT003
    return PodSpec("Pod", "example", handler, (), (container,), (), subject, 0, 0)


def trace(context: PodContext) -> KataTrace:
    """Every link, also after a broken one: all problems are reported at once."""
    spec = context.pod
    effective = configuration.with_annotations(context)
    effective = replace(effective, candidates=devices.candidates(effective))
    links = (pod_to_shim.pod, pod_to_shim.runtime_class, pod_to_shim.handler)
    first = tuple(link(effective) for link in links)
    found = KataTrace(
        pod=spec.name,
        kind=spec.kind,
        source=spec.source,
        line=spec.line,
        handler=context.handler_name,
        steps=first,
    )
    if not effective.is_kata:
        return replace(found, steps=(*first, resources.request_of_others(effective)))
    chains = tuple(functions.chain_of(effective, each) for each in effective.candidates)
    later = (resources.request(effective), devices.cdi(effective), *functions.steps(effective))
    if context.has_no_handler:
        later = tuple(replace(s, state="unknown") if s.state == "ok" else s for s in later)
    configured = configuration.configuration(replace(context, candidates=effective.candidates))
    return replace(
        found,
        release=str(context.release),
        release_source=context.release_source,
        steps=(*first, configured, *later),
        devices=chains,
        differences=tuple(_differences(effective, chains)),
    )


def _differences(context: PodContext, chains: Sequence[DeviceChain]) -> Iterator[Difference]:
    """The differences between the candidate devices."""
    host = context.host

    def node(chain: DeviceChain) -> str:
        found = {host.device(function.address).numa_node for function in chain.functions}
        return ", ".join(map(str, sorted(n for n in found if n is not None))) or "-"

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
            by_value: dict[str, tuple[str, ...]] = {}
            for chain in same:
                by_value[tell(chain)] = (*by_value.get(tell(chain), ()), chain.id)
            if len(by_value) > 1:
                yield Difference(resource, name, tuple(by_value.items()))
