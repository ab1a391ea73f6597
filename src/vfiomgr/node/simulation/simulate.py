"""A simulation from files of nodes and pods."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from vfiomgr.node.simulation.named import read_cluster
from vfiomgr.node.simulation.objects import read_simulation
from vfiomgr.node.simulation.scheduler import Scheduler
from vfiomgr.node.simulation.selectors import Selectors

if TYPE_CHECKING:
    from vfiomgr.layout.model import Layout
    from vfiomgr.node.model import NodeSettings
    from vfiomgr.node.simulation.model import SimulationResult
    from vfiomgr.snapshot.model import HostSnapshot


def simulation(  # noqa: PLR0913 - each is a fact of its own, with a default
    nodes: Sequence[str],
    text: str,
    source: str,
    settings: NodeSettings,
    layout: Layout | None = None,
    *,
    has_groups: bool = False,
) -> tuple[SimulationResult, tuple[str, ...]]:
    """The result for the pods of a text, and notes about what is not simulated.

    `has_groups`: the cluster has compatibility groups.

    Raises:
        UsageError: a file of a node cannot be read, or its name is not that of a node.
        InvalidDocument: the text or a file of a node is malformed.
    """
    selectors = Selectors()
    objects = read_simulation(text, source, selectors)
    layouts = import_module("vfiomgr.node.layouts") if layout else None  # pydantic is slow

    def of_host(host: HostSnapshot) -> NodeSettings:
        found: NodeSettings = layouts.with_layout(host, settings, layout) if layouts else settings
        return found

    cluster = read_cluster(nodes, of_host, objects.labels, has_groups=has_groups)
    return Scheduler(cluster, selectors).place(objects.workloads), objects.notes
