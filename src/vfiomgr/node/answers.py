"""What containers receive for the devices that the kubelet chose, and the files of CDI for it.

The kubelet asks which devices a container should get: close to each other, and leaving others
together. The devices of a resource are the leaves of a tree: NUMA nodes, root complexes, PCIe
bridges, GPUs that have vGPUs. The set that is preferred has the fewest NUMA nodes, then the closest
common part of the tree; of several, that of a part which is already in use.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from functools import cached_property
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.containers.cdi.devices import LOWEST
from vfiomgr.containers.cdi.document import needed_version, render_specification
from vfiomgr.containers.cdi.model import (
    DYNAMIC,
    CdiDevice,
    CdiDeviceNode,
    CdiEdits,
    CdiSpecification,
    device_nodes,
    own_file,
    shared_nodes,
)
from vfiomgr.diagnostic import refuse_if_any
from vfiomgr.errors import HostError, UsageError
from vfiomgr.expressions import expression
from vfiomgr.guests.nodes import CONTROL, IOMMU
from vfiomgr.node.health import UNUSABLE, is_unusable
from vfiomgr.node.messages import read_record, write_record
from vfiomgr.node.model import Answer, Consumer, Inventory, NodeResource, NodeUnit
from vfiomgr.paths import RUNTIME, VFIO_CDEVS, HostPath

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree


_ANNOTATION = "cdi.k8s.io/vfiomgr_"
_LONGEST_KEY = 63
"""Characters of the name in the key of an annotation."""
_BY_CDI: tuple[Consumer, ...] = ("default", "kata")
"""The consumers that receive names of CDI devices, which outlive a reboot."""
_OPEN_IOMMU: tuple[Consumer, ...] = ("default", "container")
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
    units = [unit for unit in resource.units if not is_unusable(unit)]
    return specification_of(
        resource.name,
        tuple(
            CdiDevice(u.id, CdiEdits(device_nodes=device_nodes(u.nodes, u.access))) for u in units
        ),
        shared_nodes(_common_nodes(units, resource.consumer), (unit.access for unit in units)),
    )


def specification_of(
    kind: str, devices: tuple[CdiDevice, ...], common: tuple[CdiDeviceNode, ...] = ()
) -> CdiSpecification:
    """A specification of the lowest version that its devices need; all get the common nodes."""
    built = CdiSpecification("", kind, devices, CdiEdits(device_nodes=common))
    version = max(LOWEST, needed_version(built)) if devices else LOWEST
    return replace(built, version=str(version))


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


FILE = RUNTIME / "node-cdi.json"


def read_written(tree: HostTree) -> frozenset[str]:
    """The kinds of the specifications; empty if their record is absent or cannot be read.

    Files of kinds that no resource has now then count as another program's.
    """
    try:
        return frozenset(read_record(list[str], tree, FILE) or ())
    except HostError:
        return frozenset()


def write_specifications(tree: HostTree, found: Inventory, written: frozenset[str]) -> None:
    """Write the CDI specifications that have changed, before the kubelet learns of the devices.

    One without usable devices is removed: after a reset of the IOMMU groups it could name the node
    of another device. `written` are the kinds of `read_written`.
    """
    made = {specification.kind: specification for specification in specifications(found)}
    if not made.keys() <= written:
        write_record(tree, FILE, sorted({*written, *made}))
    for kind, specification in made.items():
        write_specification(tree, own_file(DYNAMIC, kind), specification)
    gone = written - made.keys()
    for kind in gone:
        tree.remove(own_file(DYNAMIC, kind))
    if gone:
        write_record(tree, FILE, sorted(made))


def write_specification(tree: HostTree, file: HostPath, specification: CdiSpecification) -> None:
    """Write a file if it has another content: runtimes read the directory at each change."""
    text = render_specification(specification)
    if tree.read_text(file) != text:
        tree.make_directory(DYNAMIC)
        tree.replace(file, text.encode(), durable=False)


class _Level(IntEnum):
    """What devices below a node of the tree share; the closest first."""

    UNIT = 0
    GPU = 1
    BRIDGE = 2
    COMPLEX = 3
    NUMA = 4
    HOST = 5


def preferred(
    resource: NodeResource, available: Sequence[str], required: Sequence[str], size: int
) -> tuple[str, ...]:
    """The best available devices, sorted, including all required ones.

    Raises:
        UsageError: there are not enough, or a required one is not available.
    """
    free, needed = frozenset(available), frozenset(required)
    known = {unit.id: unit for unit in resource.units}
    foreign = free - known.keys()
    if not needed <= free or foreign or not len(needed) <= size <= len(free):
        numbers = f"{len(free)} are available, {len(needed)} are required"
        message = f"cannot choose {size} devices of {resource.name}: {numbers}"
        raise UsageError(message, "list the devices of this node with: vfiomgr node status")
    tree = _tree(resource.units)
    return tuple(sorted(_choose(tree, free, needed, size)))


class _Part:
    """A part of the tree; parts with a single child are left out."""

    def __init__(self, level: _Level, path: tuple[str, ...]) -> None:
        self.level = level
        self.path = path
        """The names of the parts above it, and its own."""
        self.children: list[_Part] = []
        self.units: frozenset[str] = frozenset()

    @cached_property
    def parts(self) -> list[_Part]:
        """This part and all below it, children before their parents."""
        return [part for child in self.children for part in child.parts] + [self]


def _tree(units: Iterable[NodeUnit]) -> _Part:
    root = _Part(_Level.HOST, ())
    made: dict[tuple[str, ...], _Part] = {(): root}
    for unit in units:
        path: tuple[str, ...] = ()
        parent = root
        for level, name in _path(unit):
            path = (*path, name)
            part = made.get(path)
            if part is None:
                part = made[path] = _Part(level, path)
                parent.children.append(part)
            parent = part
    return _compressed(root)


def _path(unit: NodeUnit) -> Iterator[tuple[_Level, str]]:
    """From the NUMA node to the device; an unknown one is a node of its own."""
    yield _Level.NUMA, f"node {unit.numa_nodes}"
    for number, name in enumerate(unit.pcie_path):
        yield _Level.COMPLEX if number == 0 else _Level.BRIDGE, name
    if unit.parent is not None:
        yield _Level.GPU, str(unit.parent)
    yield _Level.UNIT, unit.id


def _compressed(part: _Part) -> _Part:
    """The part without single children; its root is the closest common bridge."""
    part.children = sorted(map(_compressed, part.children), key=lambda child: child.path)
    if len(part.children) == 1:
        return part.children[0]
    own = [part.path[-1]] if part.level is _Level.UNIT else []
    part.units = frozenset(own).union(*(child.units for child in part.children))
    return part


def _choose(tree: _Part, free: frozenset[str], required: frozenset[str], size: int) -> set[str]:
    if size == 0:
        return set()
    rooms = _rooms(tree, free)
    best = _closest(tree, rooms, required, size)
    units = best.units & free
    if len(units) == size:
        return set(units)
    chosen: set[str] = set()
    for child, count in _shares(best, rooms, required, size):
        chosen |= _choose(child, free, required & child.units, count)
    return chosen


def _rooms(tree: _Part, free: frozenset[str]) -> dict[_Part, int]:
    rooms: dict[_Part, int] = {}
    for part in tree.parts:
        if part.level is _Level.UNIT:
            rooms[part] = int(part.path[-1] in free)
        else:
            rooms[part] = sum(rooms[child] for child in part.children)
    return rooms


def _closest(tree: _Part, rooms: dict[_Part, int], required: frozenset[str], size: int) -> _Part:
    """The part with enough devices whose devices share most, and which is in use already."""
    best: tuple[object, ...] | None = None
    found = tree
    stack: list[tuple[_Part, tuple[tuple[_Level, tuple[bool, int]], ...]]] = [(tree, ())]
    while stack:
        part, above = stack.pop()
        if rooms[part] < size or not required <= part.units:
            continue
        here = ((part.level, _strain(part, rooms)), *above)
        deeper = [child for child in part.children if _fits(child, rooms, required, size)]
        stack += [(child, here) for child in deeper]
        key = (part.level, _by_level(part, here), part.path)
        if not deeper and (best is None or key < best):
            best, found = key, part
    return found


def _fits(part: _Part, rooms: dict[_Part, int], required: frozenset[str], size: int) -> bool:
    return rooms[part] >= size and required <= part.units


def _strain(part: _Part, rooms: dict[_Part, int]) -> tuple[bool, int]:
    """Whether all devices of a part are free, which should stay so, and how many are."""
    return (rooms[part] == len(part.units), rooms[part])


def _by_level(
    part: _Part, strains: Sequence[tuple[_Level, tuple[bool, int]]]
) -> tuple[object, ...]:
    """The strains of a part and of those above it, by level; the innermost of each counts.

    A level that is missing has nothing to keep together.
    """
    innermost: dict[_Level, tuple[bool, int]] = {}
    for level, strain in strains:
        innermost.setdefault(level, strain)
    return tuple(innermost.get(level, (False, 0)) for level in _Level if level >= part.level)


def _shares(
    part: _Part, rooms: dict[_Part, int], required: frozenset[str], size: int
) -> Iterator[tuple[_Part, int]]:
    """How many devices to take from which children: from as few children as possible.

    The last one is that which fits best; all others are used up, unless they are only needed for
    required devices.
    """
    needed = {child: len(required & child.units) for child in part.children}
    used = [child for child in part.children if needed[child]]
    others = [child for child in part.children if not needed[child]]
    while (missing := size - sum(rooms[child] for child in used)) > 0:
        enough = [child for child in others if rooms[child] >= missing]
        if enough:
            child = min(enough, key=lambda child: (_strain(child, rooms), child.path))
        else:
            child = min(others, key=lambda child: (-rooms[child], child.path))
        others.remove(child)
        used.append(child)
    left = size - sum(needed[child] for child in used)
    for child in used:
        more = min(left, rooms[child] - needed[child])
        left -= more
        yield child, needed[child] + more
