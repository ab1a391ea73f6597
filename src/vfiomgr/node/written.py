"""The CDI specifications that agents wrote since the boot: only these are removed again."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from vfiomgr.containers.cdi.document import render_specification
from vfiomgr.containers.cdi.model import DYNAMIC, own_file
from vfiomgr.host.owners import NotARecord, read_own
from vfiomgr.node.answers import specifications
from vfiomgr.paths import RUNTIME

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vfiomgr.host.tree import HostTree
    from vfiomgr.node.model import Inventory

FILE = RUNTIME / "node-cdi.json"


def read_written(tree: HostTree) -> frozenset[str]:
    """The kinds of the specifications; empty if there is no record that vfiomgr wrote."""
    try:
        return frozenset(map(str, json.loads(read_own(tree, FILE))))
    except (OSError, NotARecord, ValueError, TypeError):
        return frozenset()


def write_specifications(tree: HostTree, found: Inventory, written: frozenset[str]) -> None:
    """Write the CDI specifications that have changed, before the kubelet learns of the devices.

    One without usable devices is removed: after a reset of the IOMMU groups it could name the node
    of another device. `written` are the kinds of `read_written`.
    """
    made = {specification.kind: specification for specification in specifications(found)}
    if not made.keys() <= written:
        _record(tree, {*written, *made})
    for kind, specification in made.items():
        file, text = own_file(DYNAMIC, kind), render_specification(specification)
        if tree.read_text(file) != text:
            tree.make_directory(DYNAMIC)
            tree.replace(file, text.encode(), durable=False)
    gone = written - made.keys()
    for kind in gone:
        tree.remove(own_file(DYNAMIC, kind))
    if gone:
        _record(tree, made)


def _record(tree: HostTree, kinds: Iterable[str]) -> None:
    tree.make_directory(RUNTIME)
    tree.replace(FILE, f"{json.dumps(sorted(kinds))}\n".encode(), mode=0o600, durable=False)
