"""The result of a simulation as a document, and as rows and notes for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.units import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vfiomgr.node.simulation.model import PendingReason, PodResult, SimulationResult


def document_of(result: SimulationResult, notes: Sequence[str]) -> dict[str, object]:
    """The document of `--format json`."""
    return {
        "pods": result.pods,
        "nodes": result.nodes,
        "notes": notes,
        "unknown": result.unknown,
        "summary": {"placed": len(result.pods) - result.pending, "pending": result.pending},
    }


def pod_rows(result: SimulationResult) -> list[tuple[str, str, str]]:
    """Each pod, its node and its devices."""
    return [(pod.pod, pod.node or "-", _devices(pod) or "-") for pod in result.pods]


def node_rows(result: SimulationResult) -> list[tuple[str, ...]]:
    """Each node with pods, and what is used of it."""
    return [
        (each.node, str(each.pods), str(each.devices), str(each.before), str(each.free))
        for each in result.nodes
        if each.pods
    ]


def lines_about(result: SimulationResult) -> Iterator[str]:
    """Which pods are pending and why, and what is not used."""
    for pods, reasons in _by_reasons(result).items():
        yield f"pending: {pods}"
        yield from (f"  {_nodes(reason)}: {reason.text}" for reason in reasons)
    unused = sum(not each.pods for each in result.nodes)
    if unused:
        yield f"{counted(unused, 'node')} without pods"
    placed = len(result.pods) - result.pending
    chosen = "each pod on the node with the fewest free devices that it fits on"
    yield f"placed {placed} of {counted(len(result.pods), 'pod')}, {chosen}"


def _devices(pod: PodResult) -> str:
    """The devices of a pod; those of a GPU with its name."""
    of_claims = (f"{each.claim}: {_device(each.pool, each.device)}" for each in pod.devices)
    of_limits = (f"{each.resource}: {each.unit}" for each in pod.units)
    return ", ".join((*of_claims, *of_limits))


def _device(pool: str, device: str) -> str:
    """A device; if its name does not begin with its GPU, the GPU precedes it."""
    gpu = pool.partition("/")[2]
    return device if not gpu or device.startswith(gpu) else f"{gpu}/{device}"


def _by_reasons(result: SimulationResult) -> dict[str, tuple[PendingReason, ...]]:
    """The reasons of pending pods; pods in a row with the same reasons are one entry."""
    found: dict[str, tuple[PendingReason, ...]] = {}
    pending = [pod for pod in result.pods if pod.node is None]
    start = 0
    for end in range(1, len(pending) + 1):
        if end == len(pending) or pending[end].reasons != pending[start].reasons:
            first, last = pending[start].pod, pending[end - 1].pod
            name = first if end - start == 1 else f"{first} to {last} ({end - start} pods)"
            found[name] = pending[start].reasons
            start = end
    return found


def _nodes(reason: PendingReason) -> str:
    """`3 nodes (a, b, …)`."""
    more = ", ..." if reason.count > len(reason.nodes) else ""
    return f"{counted(reason.count, 'node')} ({', '.join(reason.nodes)}{more})"
