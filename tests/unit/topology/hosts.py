"""Hosts for tests of the picture, made once each."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from tests import api
from tests.fakes import servers
from vfiomgr.topology.build import tree_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.topology.model import Topology, TopologyNode


@cache
def vgpu_server() -> HostSnapshot:
    """The facts of a host with vGPUs."""
    with tempfile.TemporaryDirectory() as directory:
        kernel = servers.vgpu_server(Path(directory))
        return api.scan(kernel, with_users=True, with_links=True)


@cache
def dgx() -> HostSnapshot:
    """The facts of a host with GPUs behind switches."""
    with tempfile.TemporaryDirectory() as directory:
        return api.scan(servers.dgx(Path(directory)), with_users=True, with_links=True)


def nodes(node: TopologyNode) -> Iterator[TopologyNode]:
    """A node and all below it."""
    yield node
    for child in node.children:
        yield from nodes(child)


def by_id(topology: Topology) -> dict[str, TopologyNode]:
    """All nodes; each has an identifier of its own."""
    found = list(nodes(topology.root))
    assert len({node.id for node in found}) == len(found)
    return {node.id: node for node in found}


def path_to(topology: Topology, wanted: str) -> list[str]:
    """The kinds and identifiers from the host to a node."""

    def search(node: TopologyNode) -> list[str]:
        here = f"{node.kind} {node.id}"
        if node.id == wanted:
            return [here]
        for child in node.children:
            if below := search(child):
                return [here, *below]
        return []

    return search(topology.root)


def made(host: HostSnapshot) -> dict[str, TopologyNode]:
    """The nodes of a host by their identifiers."""
    return by_id(tree_of(host))
