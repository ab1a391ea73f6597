"""The topology of a host as a tree of values, and in words: the lines of its picture."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from msgspec.structs import replace

from vfiomgr.documents.text import printable
from vfiomgr.pci.capabilities import PciLink
from vfiomgr.pci.model import PciAddress
from vfiomgr.units import counted, format_cpulist
from vfiomgr.value import Value

NodeKind = Literal[
    "host",
    "numa-node",
    "root-complex",
    "root-port",
    "upstream-port",
    "downstream-port",
    "bridge",
    "function",
    "virtual-function",
    "vgpu-parent",
    "vgpu",
]
"""`vgpu-parent` is a parent of vGPUs that is no PCI function."""
PORTS: tuple[NodeKind, ...] = ("root-port", "upstream-port", "downstream-port", "bridge")
LEADING_DOWN: tuple[NodeKind, ...] = ("root-port", "downstream-port")
"""Ports whose link is the one to what is below them."""
ProblemKind = Literal[
    "iommu-off",
    "unidentified",
    "stuck",
    "not-responding",
    "no-iommu-group",
    "group-not-viable",
    "no-driver",
    "link-width",
    "link-speed",
    "boot-display",
    "wedged",
]
Severity = Literal["error", "warning", "info"]


class Problem(Value):
    """What keeps a function from a guest, or makes it slower than it can be."""

    kind: ProblemKind
    severity: Severity
    text: str


class TopologyNode(Value):
    """One thing of the picture, with all that is below it."""

    kind: NodeKind
    id: str
    """What sets it apart: an address, a UUID, `numa 0`, `pci0000:00`."""
    name: str | None = None
    short_name: str | None = None
    """Vendor and marketing name of a function."""
    address: PciAddress | None = None
    class_name: str | None = None
    driver: str | None = None
    iommu_group: int | None = None
    numa_node: int | None = None
    link: PciLink | None = None
    port_link: PciLink | None = None
    """Of a function behind a port: the same link as the port reports it."""
    users: tuple[str, ...] | None = None
    """What uses it, on the host or for a guest; None where nobody looked."""
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()
    is_chipset: bool = False
    """Whether it is part of the chipset or the processor, which no guest gets."""
    is_selected: bool = False
    """Whether its branch was asked for; it is never folded then."""
    children: tuple[TopologyNode, ...] = ()


class Topology(Value):
    """The picture of a host."""

    root: TopologyNode
    is_iommu_on: bool | None
    """None where a recording does not show it."""
    knows_users: bool
    """Whether somebody looked for processes that use devices; only root sees all of them."""
    knows_links: bool


_TITLES = {
    "numa-node": "NUMA node",
    "root-complex": "root complex",
    "root-port": "root port",
    "upstream-port": "switch",
    "downstream-port": "downstream port",
    "bridge": "bridge",
    "virtual-function": "VF",
    "vgpu-parent": "virtual device",
    "vgpu": "vGPU",
}
_NO_BREAK = "\u00a0"
"""A blank at which no line is broken; no text of a host has one that is not escaped."""
_LONG = 32
_UNNAMED = frozenset({"root-port", "downstream-port", "virtual-function"})
"""They are drawn with their addresses alone; the name is among their details."""


class Item(NamedTuple):
    """A line of the picture, or several that are folded into it; all texts are printable."""

    key: str
    kind: str
    """A kind of node, or `virtual-functions`, `chipset`, `empty-ports`: folds."""
    title: str
    name: str = ""
    facts: tuple[str, ...] = ()
    users: str = ""
    group: int | None = None
    problems: tuple[Problem, ...] = ()
    details: tuple[tuple[str, str], ...] = ()
    is_fold: bool = False
    children: tuple[Item, ...] = ()

    @property
    def is_in_trouble(self) -> bool:
        """Whether it has a problem that is more than a remark."""
        return any(problem.severity != "info" for problem in self.problems)

    @property
    def is_notable(self) -> bool:
        """Whether it is shown although it is folded: used, with a vGPU, or in trouble."""
        return bool(self.users or self.children or self.is_in_trouble)

    @property
    def starts_closed(self) -> bool:
        """Whether a page shows it closed at first: a fold that hides no trouble."""
        return self.is_fold and not any(child.is_in_trouble for child in self.children)

    def shown(self, *, unfold: bool) -> tuple[Item, ...]:
        """Its children but for those that stay folded."""
        if self.is_fold and not unfold:
            return tuple(child for child in self.children if child.is_notable)
        return self.children


class Row(NamedTuple):
    """An item and where it stands in the tree."""

    item: Item
    depth: int
    guides: tuple[bool, ...]
    """Of each level above but the root's, whether more follows there."""
    position: int
    """Among its siblings, from 1."""
    siblings: int
    is_open: bool | None
    """Whether its children are shown; None where it has none."""


def rows(root: Item, *, unfold: bool) -> Iterator[Row]:
    """Every item that is shown, from the top to the bottom."""
    left: list[Row] = [Row(root, 0, (), 1, 1, None)]
    while left:
        row = left.pop()
        children = row.item.shown(unfold=unfold)
        yield row._replace(is_open=bool(children) if row.item.children else None)
        guides = (*row.guides, row.position < row.siblings) if row.depth else ()
        for position in range(len(children), 0, -1):
            child = children[position - 1]
            left.append(Row(child, row.depth + 1, guides, position, len(children), None))


def view(topology: Topology) -> Item:
    """The host as an item, with everything below it."""
    return _item(topology.root, frozenset())


def summary(topology: Topology, root: Item) -> str:
    """`Linux 6.8.0, IOMMU on, 226 PCI functions, 3 vGPUs`."""
    states = {True: "IOMMU on", False: "IOMMU off", None: "IOMMU state unknown"}
    nodes = list(_nodes(topology.root))
    functions = sum(node.address is not None for node in nodes)
    vgpus = sum(node.kind == "vgpu" for node in nodes)
    counts = [counted(functions, "PCI function"), counted(vgpus, "vGPU") if vgpus else ""]
    return ", ".join(filter(None, (root.name, states[topology.is_iommu_on], *counts)))


def _nodes(node: TopologyNode) -> Iterator[TopologyNode]:
    yield node
    for child in node.children:
        yield from _nodes(child)


def facts_text(item: Item) -> str:
    """The facts in a row; `wrap` breaks no line inside of a short one."""
    facts = (text.replace(" ", _NO_BREAK) if len(text) < _LONG else text for text in item.facts)
    return ", ".join(facts)


def wrap(text: str, width: int) -> list[str]:
    """Lines of at most that width."""
    lines = textwrap.wrap(text, width, break_on_hyphens=False)
    return [line.replace(_NO_BREAK, " ") for line in lines]


def link_text(link: PciLink | None) -> str:
    """`16 GT/s x16`; below its maximum `8 GT/s x8 of 16 GT/s x16`; empty without a link."""
    if link is None or link.width is None or link.speed is None:
        return ""
    now = _lanes(link.speed, link.width)
    most = _lanes(link.max_speed, link.max_width)
    return now if now == most else f"{now} of {most}"


def _lanes(speed: float | None, width: int | None) -> str:
    known = (None if speed is None else f"{speed:g} GT/s", None if width is None else f"x{width}")
    return " ".join(filter(None, known))


def _item(node: TopologyNode, first_functions: frozenset[tuple[int, int, int]]) -> Item:
    """`first_functions` are the slots whose function 0 shows the link of the others."""
    is_later = node.address is not None and node.address.function != 0
    shares_link = is_later and node.address is not None and node.address.slot in first_functions
    name = "" if node.kind in _UNNAMED else node.short_name or node.name or ""
    group = [] if node.iommu_group is None else [f"group {node.iommu_group}"]
    driver = [] if node.driver in (None, "pcieport") else [f"driver {node.driver}"]
    # the link of a port is drawn with what is below the port
    link = "" if shares_link or node.kind in LEADING_DOWN else link_text(node.link)
    facts = (*driver, *group, *filter(None, [link]), *node.notes)
    return Item(
        key=node.id,
        kind=node.kind,
        title=printable(_title(node)),
        name=printable(name),
        facts=tuple(map(printable, facts)),
        users=printable(", ".join(node.users or ())),
        group=node.iommu_group,
        problems=tuple(replace(p, text=printable(p.text)) for p in node.problems),
        details=tuple((label, printable(text)) for label, text in _details(node) if text),
        children=tuple(_children(node)),
    )


def _title(node: TopologyNode) -> str:
    word = _TITLES.get(node.kind, "")
    what = node.id.removeprefix("numa ").removeprefix("pci")
    if node.kind == "host":
        return "host"
    if node.kind == "vgpu" and node.id.endswith(" vGPU"):
        return word
    return f"{word} {what}".strip()


def _details(node: TopologyNode) -> Iterator[tuple[str, str]]:
    """All facts of a node, with labels."""
    yield "Name", node.name or ""
    yield "Class", node.class_name or ""
    yield "Driver", node.driver or ("none" if node.address else "")
    yield "IOMMU group", "" if node.iommu_group is None else str(node.iommu_group)
    yield "NUMA node", "" if node.numa_node is None else str(node.numa_node)
    for label, link in (("Link", node.link), ("Link of the port", node.port_link)):
        if link is not None:
            now = _lanes(link.speed, link.width) if link.width else "down"
            yield label, f"{now}, maximum {_lanes(link.max_speed, link.max_width)}"
    if node.users is not None:
        yield "In use", ", ".join(node.users) or "no"
    yield "Notes", ", ".join(node.notes)
    yield "Problems", "; ".join(problem.text for problem in node.problems)


def _children(node: TopologyNode) -> Iterator[Item]:
    """What is drawn below a node; several VFs, the chipset and empty ports are folded into one."""
    foldable = [child for child in node.children if not child.is_selected]
    virtual = [child for child in foldable if child.kind == "virtual-function"]
    virtual = virtual if len(virtual) > 1 else []
    chipset = [child for child in foldable if child.is_chipset]
    empty = [c for c in foldable if c.kind in PORTS and not c.children and not c.problems]
    folded = {id(child) for child in (*virtual, *chipset, *empty)}
    others = [child for child in node.children if id(child) not in folded]
    yield from _items(others)
    if virtual:
        yield _fold(node, "virtual-functions", virtual, "VF", tuple(_of_virtual(virtual)))
    if empty:
        yield _fold(node, "empty-ports", empty, "empty port", ())
    if chipset:
        yield _fold(node, "chipset", chipset, "chipset function", ())


def _items(nodes: Sequence[TopologyNode]) -> tuple[Item, ...]:
    addresses = [node.address for node in nodes if node.address is not None]
    first = frozenset(a.slot for a in addresses if a.function == 0)
    return tuple(_item(node, first) for node in nodes)


def _fold(
    node: TopologyNode,
    kind: str,
    nodes: Sequence[TopologyNode],
    word: str,
    facts: tuple[str, ...],
) -> Item:
    title, children = counted(len(nodes), word), _items(nodes)
    return Item(f"{node.id} {kind}", kind, title, "", facts, is_fold=True, children=children)


def _of_virtual(nodes: Sequence[TopologyNode]) -> Iterator[str]:
    """`13 on nvidia`, `3 without driver`, `groups 39-54`, `3 vGPUs`."""
    drivers = Counter(node.driver for node in nodes)
    for driver, count in sorted(drivers.items(), key=lambda pair: (-pair[1], pair[0] or "")):
        yield f"{count} on {printable(driver)}" if driver else f"{count} without driver"
    groups = {node.iommu_group for node in nodes if node.iommu_group is not None}
    if groups:
        yield f"group{'s' if len(groups) > 1 else ''} {format_cpulist(groups)}"
    vgpus = sum(child.kind == "vgpu" for node in nodes for child in node.children)
    if vgpus:
        yield counted(vgpus, "vGPU")
