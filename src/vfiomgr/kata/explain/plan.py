"""The whole way of a device to a pod's guest, link by link, without starting anything."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.kata.explain import cdi_names, configuration, functions, pod_to_shim, resources
from vfiomgr.kata.explain.annotations import with_annotations
from vfiomgr.kata.explain.model import Difference, KataTrace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from vfiomgr.kata.explain.context import PodContext
    from vfiomgr.kata.explain.model import DeviceChain, TraceStep


def explain(situation: PodContext) -> KataTrace:
    """Every link, also behind one that is broken: all breaks that apply are told at once."""
    spec = situation.pod
    effective = with_annotations(situation)
    chains = functions.chains(effective)
    return KataTrace(
        pod=spec.name,
        kind=spec.kind,
        source=spec.source,
        line=spec.line,
        handler=situation.handler_name,
        release=str(situation.release),
        release_source=situation.release_source,
        steps=(
            pod_to_shim.pod(effective),
            pod_to_shim.runtime_class(effective),
            pod_to_shim.handler(effective),
            configuration.configuration(situation),
            *_later(effective),
        ),
        devices=chains,
        differences=tuple(_differences(effective, chains)),
    )


def _later(situation: PodContext) -> Iterator[TraceStep]:
    """What comes behind the configuration: not known of a pod that nothing of Kata's runs."""
    for step in (
        resources.request(situation),
        cdi_names.cdi(situation),
        *functions.steps(situation),
    ):
        is_open = situation.has_no_handler and step.state == "ok"
        yield replace(step, state="unknown") if is_open else step


def _differences(situation: PodContext, chains: Sequence[DeviceChain]) -> Iterator[Difference]:
    """Where the devices that could be given differ."""
    host = situation.host

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
