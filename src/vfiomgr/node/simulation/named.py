"""Nodes as written by people: FILE, or FILE=COPIES."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.errors import UsageError
from vfiomgr.expressions import expression
from vfiomgr.node.dra.plan import pools
from vfiomgr.node.labels import labels
from vfiomgr.node.plan import inventory
from vfiomgr.node.simulation.scheduler import Cluster, NodeTemplate, template_of
from vfiomgr.passthrough.isolation import iommu_unread
from vfiomgr.snapshot.source import HostSource
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.node.dra.model import Pool
    from vfiomgr.node.model import NodeSettings
    from vfiomgr.snapshot.model import HostSnapshot

_COPIES = expression(r"(?P<file>.+)=(?P<copies>\d+)")
_NAME = expression(r"[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?")
_MOST = 100_000
"""Maximum number of nodes."""
_SUFFIXES = (".json", ".yaml", ".yml")


class NamedNodes(Value):
    """A snapshot, and the nodes that are like it."""

    file: str
    name: str
    """The name of the node; copies are numbered."""
    copies: int | None = None

    @property
    def nodes(self) -> list[str]:
        """The names of its nodes."""
        if self.copies is None:
            return [self.name]
        return [f"{self.name}-{number}" for number in range(1, self.copies + 1)]


def read_cluster(
    words: Iterable[str],
    settings: Callable[[HostSnapshot], NodeSettings],
    own_labels: Mapping[str, Mapping[str, str]],
    *,
    has_groups: bool = False,
) -> Cluster:
    """The nodes of some snapshots; `own_labels` are further labels by node, or by file.

    `settings` are how the devices of a host become resources. `has_groups`: the cluster has
    compatibility groups.

    Raises:
        UsageError: a word does not name nodes, two nodes have one name, or a file cannot be read.
        InvalidDocument: a file is not a snapshot.
    """
    cluster = Cluster()
    seen: set[str] = set()
    for named in map(named_nodes, words):
        repeated = seen.intersection(named.nodes)
        if repeated:
            message = f"two nodes are called {min(repeated)}"
            raise UsageError(message, f"rename {named.file}: nodes are named after their files")
        seen.update(named.nodes)
        if len(seen) > _MOST:
            message = f"more than {_MOST} nodes"
            raise UsageError(message, "simulate fewer copies")
        source = HostSource()
        source.snapshot = named.file
        host = source.scan()
        cluster.unknown += [text.replace(":", f" ({named.name}):", 1) for text in _unknown(host)]
        template = _template(host, named, settings(host), has_groups)
        for further, names in _by_labels(named, own_labels).items():
            cluster.add(replace(template, labels={**template.labels, **dict(further)}), names)
    return cluster


def _unknown(host: HostSnapshot) -> Iterator[str]:
    yield from iommu_unread(host)
    if host.users.processes is None:
        why = "not in the snapshot (created without root, or of a recorded host)"
        yield f"which devices are in use: {why}"


def _template(
    host: HostSnapshot,
    named: NamedNodes,
    settings: NodeSettings,
    has_groups: bool,  # noqa: FBT001 - a fact
) -> NodeTemplate:
    found = inventory(host, settings)

    def publish(allocated: frozenset[tuple[str, str]]) -> tuple[Pool, ...]:
        return pools(host, found, named.name, allocated=allocated, has_groups=has_groups)

    own = (label.partition("=") for label in labels(found, host))
    return template_of(publish, found, named.name, {name: value for name, _, value in own})


def _by_labels(
    named: NamedNodes, own_labels: Mapping[str, Mapping[str, str]]
) -> dict[tuple[tuple[str, str], ...], list[str]]:
    """The nodes with the same further labels; those of the file's name are for all copies."""
    of_file = own_labels.get(named.name, {})
    found: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for name in named.nodes:
        own = {**of_file, **own_labels.get(name, {})}
        found.setdefault(tuple(sorted(own.items())), []).append(name)
    return found


def named_nodes(word: str) -> NamedNodes:
    """The nodes that a word names.

    Raises:
        UsageError: the name of the file is not that of a node, or there are no copies.
    """
    match = _COPIES.fullmatch(word)
    file, copies = (match["file"], int(match["copies"])) if match else (word, None)
    stem, suffix = os.path.splitext(os.path.basename(file))
    name = stem if suffix in _SUFFIXES else f"{stem}{suffix}"
    if not _NAME.fullmatch(name):
        message = f"not the name of a node: {name!r}"
        raise UsageError(message, "rename the file: use a-z, 0-9, - and . as in worker-1.json")
    if copies is not None and not 1 <= copies <= _MOST:
        message = f"{word}: the number of copies is not from 1 to {_MOST}"
        raise UsageError(message, f"write {file}=100 for 100 nodes like it")
    return NamedNodes(file, name, copies)
