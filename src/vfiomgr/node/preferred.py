"""Which devices a container should get: close to each other, and leaving others together.

The devices of a resource are the leaves of a tree: NUMA nodes, root complexes, PCIe bridges, GPUs
that have vGPUs. The set that is preferred has the fewest NUMA nodes, then the closest common part
of the tree; of several, that of a part which is already in use.
"""

from __future__ import annotations

from enum import IntEnum
from functools import cached_property
from typing import TYPE_CHECKING

from vfiomgr.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from vfiomgr.node.model import NodeResource, NodeUnit


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
    """The best devices below one part of the tree."""
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
    """How many devices are free in each part."""
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
