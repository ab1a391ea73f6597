"""What containers receive for the devices that the kubelet chose, and the files of CDI for it."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from vfiomgr.containers.cdi.devices import LOWEST
from vfiomgr.containers.cdi.document import needed_version, render_specification
from vfiomgr.containers.cdi.model import (
    DYNAMIC,
    CdiDevice,
    CdiEdits,
    CdiSpecification,
    device_nodes,
    own_file,
    shared_nodes,
)
from vfiomgr.diagnostic import refuse_if_any
from vfiomgr.errors import UsageError
from vfiomgr.expressions import expression
from vfiomgr.guests.nodes import CONTROL, IOMMU
from vfiomgr.host.owners import NotARecord, read_own
from vfiomgr.node.health import UNUSABLE
from vfiomgr.node.model import Answer
from vfiomgr.node.preferred import preferred
from vfiomgr.paths import RUNTIME, VFIO_CDEVS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from vfiomgr.host.owners import NodeAccess
    from vfiomgr.host.tree import HostTree
    from vfiomgr.node.model import Consumer, Inventory, NodeResource, NodeUnit

__all__ = ["answer", "preferred", "specifications"]

_ANNOTATION = "cdi.k8s.io/vfiomgr_"
_LONGEST_KEY = 63
"""Characters of the name in the key of an annotation."""
_BY_CDI: tuple[Consumer, ...] = ("default", "kata")
"""The consumers that receive names of CDI devices, which outlive a reboot."""
_OPEN_IOMMU: tuple[Consumer, ...] = ("default", "container")
_NONE = CdiEdits()
_TO_UNDERSCORE = expression(r"[/.]")


def answer(resource: NodeResource, ids: Sequence[str]) -> Answer:
    """The answer for the devices of one container; the same for the same IDs in any order.

    Raises:
        UsageError: an ID is unknown.
        Refusal: no container could open a device.

    """
    units = _units(resource, ids)
    refuse_if_any(
        (reason for unit in units for reason in unit.reasons if reason.rule in UNUSABLE),
        frozenset(),
    )
    match resource.consumer:
        case "default":
            return Answer(_cdi_names(resource, units))
        case "kata":
            names = _cdi_names(resource, units)
            return Answer(names, annotations={_annotation(resource.name): ",".join(names)})
        case "kubevirt":
            return Answer(environment=_environment(resource, units), nodes=_nodes(resource, units))
        case "container":
            return Answer(nodes=_nodes(resource, units))


def specifications(inventory: Inventory) -> tuple[CdiSpecification, ...]:
    """The CDI specifications of the resources that are given by CDI names.

    Devices that no container could open are omitted: their nodes may belong to others now.
    """
    made = (_specification(r) for r in inventory.resources if r.consumer in _BY_CDI)
    return tuple(specification for specification in made if specification.devices)


def _specification(resource: NodeResource) -> CdiSpecification:
    units = [unit for unit in resource.units if not any(r.rule in UNUSABLE for r in unit.reasons)]
    return specification_of(
        resource.name,
        tuple(CdiDevice(unit.id, edits_of(unit.nodes, unit.access)) for unit in units),
        shared_edits(_common_nodes(units, resource.consumer), (unit.access for unit in units)),
    )


def specification_of(
    kind: str, devices: tuple[CdiDevice, ...], common: CdiEdits = _NONE
) -> CdiSpecification:
    """A specification of the lowest version that its devices need."""
    built = CdiSpecification("", kind, devices, common)
    version = max(LOWEST, needed_version(built)) if devices else LOWEST
    return CdiSpecification(str(version), kind, devices, common)


def _units(resource: NodeResource, ids: Iterable[str]) -> list[NodeUnit]:
    known = {unit.id: unit for unit in resource.units}
    wanted = sorted(set(ids))
    unknown = [name for name in wanted if name not in known]
    if unknown:
        message = f"{resource.name} has no device {', '.join(unknown)}"
        raise UsageError(message, "list the devices of this node with: vfiomgr node status")
    return [known[name] for name in wanted]


def _cdi_names(resource: NodeResource, units: Iterable[NodeUnit]) -> tuple[str, ...]:
    return tuple(f"{resource.name}={unit.id}" for unit in units)


def _annotation(name: str) -> str:
    """The key for a resource, as CDI's library accepts it (ValidateAnnotationKey)."""
    prefix, last = _ANNOTATION.rpartition("/")[::2]
    key = f"{last}{name.rpartition('/')[2]}"
    if len(key) > _LONGEST_KEY:
        digest = hashlib.sha256(key.encode()).hexdigest()[:8]
        key = f"{key[: _LONGEST_KEY - len(digest) - 1]}_{digest}"
    return f"{prefix}/{key}"


def _environment(resource: NodeResource, units: Sequence[NodeUnit]) -> dict[str, str]:
    """The variables of KubeVirt, which deals the addresses out by position (pkg/util/util.go)."""
    name = _TO_UNDERSCORE.sub("_", resource.name.upper())
    mediated = [unit.id for unit in units if unit.kind == "mdev"]
    functions = [unit.id for unit in units if unit.kind != "mdev"]
    found = {"PCI_RESOURCE": functions, "MDEV_PCI_RESOURCE": mediated}
    return {f"{before}_{name}": ",".join(ids) for before, ids in found.items() if ids}


def _nodes(resource: NodeResource, units: Sequence[NodeUnit]) -> tuple[str, ...]:
    """The nodes of devices, each in one form only, after those that all need."""
    own = (path for unit in units for path in unit.nodes)
    return tuple(dict.fromkeys((*_common_nodes(units, resource.consumer), *own)))


def _common_nodes(units: Iterable[NodeUnit], consumer: Consumer) -> Iterator[str]:
    return common_nodes([path for unit in units for path in unit.nodes], consumer)


def common_nodes(paths: Sequence[str], consumer: Consumer) -> Iterator[str]:
    """The nodes that a container needs besides those of its devices.

    Kata's hypervisor opens /dev/iommu on the host, and KubeVirt passes its descriptor.
    """
    is_cdev = [path.startswith(f"{VFIO_CDEVS}/") for path in paths]
    if not all(is_cdev):
        yield str(CONTROL)
    if any(is_cdev) and consumer in _OPEN_IOMMU:
        yield IOMMU


def edits_of(paths: Iterable[str], access: NodeAccess) -> CdiEdits:
    """The edits that add the nodes of a device to a container."""
    return CdiEdits(device_nodes=device_nodes(paths, access))


def shared_edits(paths: Iterable[str], accesses: Iterable[NodeAccess]) -> CdiEdits:
    """The edits that add the nodes that devices need in common."""
    return CdiEdits(device_nodes=shared_nodes(paths, accesses))


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
