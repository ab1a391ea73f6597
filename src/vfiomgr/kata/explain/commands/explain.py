"""Chains of Kata as people and programs read them."""

from __future__ import annotations

import os
from dataclasses import fields
from typing import TYPE_CHECKING

import click

from vfiomgr.cli.output import Marked, note, print_document, say
from vfiomgr.cli.session import Session, complete_address, session_options
from vfiomgr.cli.usage import forbid_together
from vfiomgr.containers.cdi.document import read_file
from vfiomgr.containers.cdi.model import DEFAULT_KIND
from vfiomgr.diagnostic import refuse_if_any
from vfiomgr.errors import UsageError
from vfiomgr.kata.config.commands.release import read_installation, release_options
from vfiomgr.kata.explain import facts as gather
from vfiomgr.kata.explain.context import ConfigurationFacts, PodContext
from vfiomgr.kata.explain.facts import has_program, kata_conf_file, runtime_of
from vfiomgr.kata.explain.image import refuse_mediated
from vfiomgr.kata.explain.model import LIST
from vfiomgr.kata.explain.plan import explain as explain_chain
from vfiomgr.kata.explain.pod import Objects, PodContainer, PodSpec
from vfiomgr.kata.keys import key_table
from vfiomgr.kata.manifests.model import require_label, require_resource
from vfiomgr.kata.model import DEFAULT_HANDLER, NEWEST, KataRelease, handler_configuration
from vfiomgr.layout.commands.apply import STANDARD_INPUT, source_of, text_of
from vfiomgr.passthrough.guards import bridge
from vfiomgr.version import Version

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from vfiomgr.cli.session import Format
    from vfiomgr.containers.runtimes.handlers import CriName, HandlerEntry, HandlerFacts
    from vfiomgr.kata.explain.context import ShimState
    from vfiomgr.kata.explain.model import ChainBreak, DeviceChain, KataTrace, TraceStep
    from vfiomgr.kata.model import RuntimeName
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot


_COLOURS = {"ok": "green", "broken": "red", "unknown": "yellow"}
_STATE_WIDTH = 9
_NAME_WIDTH = 15
_INDENT = " " * _STATE_WIDTH
_CHAINS = 3
"""How many devices are followed in a table; the links tell what is wrong with any."""
_PARTS = 3
"""How many parts of a list are told there, where more than _LONG are in it."""
_LONG = 5
_BREAKS = 8
"""How many breaks of a link that has them of each device."""
_OF_EACH_DEVICE = frozenset({"CDI", "node", "functions"})


def print_explanations(found: Sequence[KataTrace], output: Format, *, is_whole: bool) -> None:
    """Each pod's links in their order; in JSON a `KataTrace` of all, whole in any case."""
    if output != "table":
        items = [{"is_broken": item.is_broken, **_members(item)} for item in found]
        body = {"items": items, "is_broken": any(item.is_broken for item in found)}
        print_document("KataTrace", body, output)
        return
    for number, item in enumerate(found):
        say(*[""] * bool(number), *_lines(item, is_whole=is_whole))


def _members(item: KataTrace) -> dict[str, object]:
    return {field.name: getattr(item, field.name) for field in fields(item)}


def _lines(item: KataTrace, *, is_whole: bool) -> Iterator[str | Marked]:
    place = f" ({item.source}:{item.line})" if item.line else f" for {item.source}"
    handler = f", handler {item.handler}" if item.handler else ""
    yield f"{item.kind} {item.pod}{place}{handler}, {item.release} ({item.release_source})"
    for step in item.steps:
        yield from _step_lines(step, is_whole=is_whole)
    if item.devices:
        which = "each device that the kubelet could give" if len(item.devices) > 1 else "the device"
        yield f"{which}, were nothing broken:" if item.is_broken else f"{which}:"
    told = item.devices if is_whole else item.devices[:_CHAINS]
    for chain in told:
        yield from _chain_lines(chain)
    more = len(item.devices) - len(told)
    if more:
        yield f"  and {more} more: -v, or --format json, tells of each"
    for difference in item.differences:
        yield f"  they differ: {difference if is_whole else _shorter_difference(difference)}"
    yield _verdict(item)


def _step_lines(step: TraceStep, *, is_whole: bool) -> Iterator[str | Marked]:
    what, looked, breaks = step.what, list(step.looked_at), step.breaks
    if not is_whole and step.name in _OF_EACH_DEVICE:
        what = LIST.join(_first(what.split(LIST)))
        looked = _first(looked)
        breaks = tuple(sorted(breaks, key=lambda found: not found.is_certain))[:_BREAKS]
    state = step.state.ljust(_STATE_WIDTH)
    yield Marked(state, _COLOURS[step.state], f"{step.name.ljust(_NAME_WIDTH)}{what}")
    if looked:
        yield f"{_INDENT}  looked at: {', '.join(looked)}"
    for found in breaks:
        yield from _break_lines(found)
    if len(breaks) < len(step.breaks):
        yield f"{_INDENT}and {len(step.breaks) - len(breaks)} more such: -v tells them"


def _first(parts: list[str]) -> list[str]:
    """The first ones of many, and how many more there are."""
    if len(parts) <= _LONG:
        return parts
    return [*parts[:_PARTS], f"and {len(parts) - _PARTS} more"]


def _shorter_difference(text: str) -> str:
    """`RESOURCE, ASPECT: VALUE: ID, ID; VALUE: …` with the first ones of each."""
    parts = []
    for part in text.split(LIST):
        value, colon, names = part.rpartition(": ")
        parts.append(f"{value}{colon}{', '.join(_first(names.split(', ')))}")
    return LIST.join(_first(parts))


def _break_lines(found: ChainBreak) -> Iterator[str]:
    number = f" {found.number}" if found.number is not None else ""
    silent = ", silent" if found.is_silent else ""
    verb = "break" if found.is_certain else "may break"
    issue = f" ({found.issue})" if found.issue else ""
    yield f"{_INDENT}{verb}{number}{silent}: {found.what}{issue}"
    yield f"{_INDENT}  remedy: {found.remedy}"


def _chain_lines(chain: DeviceChain) -> Iterator[str]:
    groups = ", ".join(map(str, chain.groups)) or "-"
    nodes = ", ".join(chain.nodes) or "-"
    yield f"  {chain.cdi_name} -> {chain.source or 'no specification'} -> {nodes} -> group {groups}"
    for function in chain.functions:
        index = function.guest_index
        guest = "a PCI device of the guest" if index is None else f"nvidia.com/gpu={index}"
        driver = function.driver or "no driver"
        yield f"    {function.address} on {driver} -> {function.port or '-'} -> {guest}"
    for key, value in chain.annotations:
        yield f"    the agent is told {key}: {value}"


def _verdict(item: KataTrace) -> str:
    broken = [step.name for step in item.steps if step.state == "broken"]
    if broken:
        return f"broken: {', '.join(broken)}"
    unknown = [step.name for step in item.steps if step.state == "unknown"]
    if unknown:
        return f"nothing is broken that can be seen; not known: {', '.join(unknown)}"
    doubtful = [step.name for step in item.steps if step.breaks]
    if doubtful:
        return f"the chain is complete, unless what may break does: {', '.join(doubtful)}"
    return "the chain is complete"


@click.command("explain")
@click.argument("subject", metavar="POD.yaml|DEVICE", shell_complete=complete_address)
@release_options
@click.option(
    "--config", metavar="FILE", help="Kata's configuration.  [default: the one of the handler]"
)
@click.option(
    "--handler", metavar="NAME", help="What the RuntimeClass names, where it is not in the file."
)
@click.option(
    "--cri",
    type=click.Choice(["containerd", "crio"]),
    help="Which container runtime.  [default: the one that is configured]",
)
@click.option(
    "--resource", metavar="DOMAIN/NAME", help="Of a DEVICE: what its device plugin calls it."
)
@session_options()
@click.pass_context
def explain(
    context: click.Context,
    *,
    subject: str,
    kata_version: str | None,
    runtime: RuntimeName | None,
    config: str | None,
    handler: str | None,
    cri: CriName | None,
    resource: str | None,
) -> None:
    """Follow a device to the guest of a pod, link by link, and say what breaks the way.

    From the pod of a file (YAML or JSON, - for a pipe; a Deployment's or another's as well), or
    from a pod that asks for DEVICE (an address, or KIND=NAME of CDI): RuntimeClass, handler, Kata's
    configuration, the resource, its CDI name, specification, node, IOMMU group, functions, root
    ports, and the index that the guest's agent is told. Nothing is started, and nothing is asked of
    a cluster. Which device of a resource the kubelet gives is not known: the way of each is told,
    and where they differ; of many the first ones, without -v.

    Exit status 1 where a link is broken.

    \b
    Examples:
      vfiomgr kata explain pod.yaml
      vfiomgr kata explain 0000:04:00.0 --resource nvidia.com/pgpu
      vfiomgr kata explain nvidia.com/pgpu=23
      vfiomgr kata explain pod.yaml --kata-version 3.24 --runtime go --cri crio
      vfiomgr --root /srv/node kata explain pod.yaml --handler kata-gpu --config kata.toml
    """
    session = context.find_object(Session) or Session()
    version = None if kata_version is None else Version.parse(kata_version)
    if handler is not None:
        require_label("--handler", handler)
    if resource is not None:
        require_resource("--resource", resource)
    host = session.host()
    scene = _Scene(session, host, version, runtime, config, cri)
    if _is_file(subject):
        objects = _read(subject)
        found = [scene.explain(spec, objects, handler) for spec in objects.pods]
    else:
        found = [scene.explain_device(subject, resource, handler or DEFAULT_HANDLER)]
    for told in dict.fromkeys(filter(None, scene.beyond_known)):
        note(f"{told}: it is judged as that one")
    print_explanations(found, session.format, is_whole=bool(session.verbose))
    if any(explanation.is_broken for explanation in found):
        context.exit(1)


def _is_file(subject: str) -> bool:
    """Whether the argument is a file, or looks like the name of one."""
    if subject == STANDARD_INPUT or os.path.exists(subject):
        return True
    return subject.endswith((".yaml", ".yml", ".json"))


def _read(subject: str) -> Objects:
    from vfiomgr.kata.explain.pod import read_objects  # noqa: PLC0415 - slow

    return read_objects(text_of(subject, "the pod"), source_of(subject))


_NOTHING = Objects((), (), ())


def _pod_for(subject: str, kind: str, handler: str) -> PodSpec:
    """A pod that asks for one device of a kind."""
    container = PodContainer("main", "container", ((kind, "1"),), False, (), 0)  # noqa: FBT003
    return PodSpec("Pod", "example", handler, (), (container,), (), subject, 0, 0)


class _Scene:
    """What does not depend on the pod."""

    def __init__(  # noqa: PLR0917 - what was typed
        self,
        session: Session,
        host: HostSnapshot,
        version: Version | None,
        runtime: RuntimeName | None,
        config: str | None,
        cri: CriName | None,
    ) -> None:
        self._session, self._host = session, host
        self._version, self._runtime, self._config = version, runtime, config
        self._is_live = session.snapshot is None
        self._cri: CriName = cri or "containerd"
        self._handlers: HandlerFacts | None = None
        self._installed = read_installation(session)
        self.beyond_known: list[str | None] = []
        if self._is_live:
            self._handlers = gather.read_handlers(session.tree, cri)
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
            conf_file = kata_conf_file(self._session.tree, self._cri, program)
        version, source = self._version_told()
        shim_runtime = self._runtime_of_shim(entry)
        runtime = self._runtime or shim_runtime
        likely = runtime or self._installed.default_runtime(version)
        configuration = self._configuration(entry, conf_file, name, likely)
        settings, tree = configuration.settings, self._session.tree if self._is_live else None
        if runtime is None and settings is not None and "runtime" in settings.document:
            runtime = settings.runtime
        release = KataRelease(version, runtime or likely)
        self.beyond_known.append(release.beyond_known)
        return explain_chain(
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
                keys=key_table(),
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
        """The chain of a pod that asks for a device, and for nothing else.

        Raises:
            Refusal: it is a bridge or a mediated device.
            UsageError: there is none of that name.

        """
        if "=" in text:
            return self._explain_name(text, resource, handler)
        refuse_mediated(self._host, text)
        device = self._host.device(self._host.parse_address(text))
        refuse_if_any(list(bridge(self._host, device)), frozenset())
        kind = resource or self._kind_of(device) or DEFAULT_KIND
        return self.explain(_pod_for(text, kind, handler), _NOTHING, handler, only=(device,))

    def _explain_name(self, text: str, resource: str | None, handler: str) -> KataTrace:
        """The same for a device by its name in CDI, KIND=NAME."""
        kind, _, name = text.partition("=")
        known = [read_file(file) for file in self._host.cdi_files]
        if not any(s.kind == kind and name in [d.name for d in s.devices] for s in known):
            message = f"no CDI specification of this host has {text}"
            raise UsageError(message, "vfiomgr cdi list shows what there is")
        if resource not in (None, kind):
            forbid_together("--resource", text, f"the resource is {kind}, the kind")
        return self.explain(_pod_for(text, kind, handler), _NOTHING, handler, only_name=name)

    def _kind_of(self, device: PciDevice) -> str | None:
        """The kind of the first specification that has the device's node."""
        nodes = self._host.guest_nodes(device)
        for file in self._host.cdi_files:
            specification = read_file(file)
            for own in specification.devices:
                if any(node.on_host in nodes for node in own.edits.device_nodes):
                    return specification.kind
        return None

    def _lacks(self, entry: HandlerEntry | None) -> bool:
        """Whether the container runtime is known to have no such handler."""
        return entry is None and self._handlers is not None and self._handlers.is_known

    def _shim(self, entry: HandlerEntry | None) -> ShimState:
        program = (entry.runtime_path or entry.shim) if entry is not None else ""
        if not program or not self._is_live:
            return "not looked for"
        if has_program(self._session.tree, program):
            return "there"
        return "missing" if program.startswith("/") else "not found"

    def _version_told(self) -> tuple[Version, str]:
        """Which version it is, and what tells."""
        version = self._version or self._installed.version or NEWEST
        source = "taken: the newest that is known"
        if self._version is not None:
            source = "--kata-version"
        elif self._installed.version is not None:
            source = self._installed.version_source
        return version, source

    def _runtime_of_shim(self, entry: HandlerEntry | None) -> RuntimeName | None:
        """Of the handler's shim, by its path and where links of it lead."""
        program = (entry.runtime_path or entry.shim) if entry is not None else ""
        if not self._is_live:
            return None
        return runtime_of(self._session.tree, program)

    def _configuration(
        self,
        entry: HandlerEntry | None,
        conf_file: tuple[str, str] | None,
        handler: str | None,
        runtime: RuntimeName,
    ) -> ConfigurationFacts:
        if self._config is not None:
            return gather.named_configuration(self._session, self._config)
        if not self._is_live:
            return ConfigurationFacts((), problem="a snapshot does not hold it")
        if handler is None or (entry is not None and not entry.is_kata):
            return ConfigurationFacts((), problem="no handler of Kata's is named")
        if self._lacks(entry):
            own = gather.read_settings_of(self._session.tree, [handler_configuration(handler)])
            problem = f"there is no handler {handler} that would name one"
            return own if own.file is not None else ConfigurationFacts((), problem=problem)
        paths = gather.configuration_paths(entry, conf_file, handler, runtime)
        return gather.read_settings_of(self._session.tree, paths)
