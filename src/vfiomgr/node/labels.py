"""Labels of a node, as lines for the local source of Node Feature Discovery (features.d)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from vfiomgr.containers.resource_names import DEFAULT_PREFIX
from vfiomgr.expressions import expression
from vfiomgr.kata.explain.facts import read_handlers
from vfiomgr.node.model import FEATURES, Inventory

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree
    from vfiomgr.snapshot.model import HostSnapshot

LABELS = FEATURES / "vfiomgr"
_MOST = 63
"""Characters of the name of a label."""
_FLAGS = {True: "true", False: "false"}
_INVALID = expression(r"[^A-Za-z0-9._-]+")


def labels(
    inventory: Inventory, host: HostSnapshot, handlers: Iterable[str] = ()
) -> tuple[str, ...]:
    """`DOMAIN/NAME=VALUE` of each label, sorted; `handlers` are those of Kata.

    They show the devices of a node, free or not: a label that changes with every pod loads the API
    server.
    """
    found = dict(_labels(inventory, host, handlers))
    return tuple(sorted(f"{DEFAULT_PREFIX}/{name}={value}" for name, value in found.items()))


def _labels(
    inventory: Inventory, host: HostSnapshot, handlers: Iterable[str]
) -> Iterator[tuple[str, str]]:
    yield "iommu", _FLAGS[host.iommu.is_on]
    yield "iommufd", _FLAGS[any(device.vfio_cdev for device in host.devices)]
    for resource in inventory.resources:
        model = resource.name.partition("/")[2]
        is_vgpu = any(unit.kind != "function" for unit in resource.units)
        yield _name("vgpu" if is_vgpu else "model", model), str(len(resource.units))
    for driver in sorted({unit.driver for unit in inventory.units if unit.driver}):
        yield _name("driver", driver), "true"
    for handler in handlers:
        yield _name("kata", handler), "true"


def _name(kind: str, text: str) -> str:
    """`model.GA102GL_A40`; cut to the longest valid name."""
    return f"{kind}.{_INVALID.sub('_', text)}"[:_MOST].rstrip("._-")


def write_labels(tree: HostTree, found: Inventory, seen: HostSnapshot) -> None:
    """Write the labels of the node, if Node Feature Discovery has its directory there."""
    if not tree.exists(LABELS.parent):
        return  # the handlers of Kata are not read: that runs the container runtime
    text = "".join(f"{line}\n" for line in labels(found, seen, kata_handlers(tree)))
    if tree.read_text(LABELS) != text:
        tree.replace(LABELS, text.encode(), durable=False)


def kata_handlers(tree: HostTree) -> tuple[str, ...]:
    """The names of Kata's handlers in the configuration of containerd or CRI-O, sorted."""
    return tuple(
        sorted(entry.name for entry in read_handlers(tree, None).handlers if entry.is_kata)
    )
