"""From a snapshot to the topology of its host, and the problems that the picture marks; pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.expressions import expression
from vfiomgr.listing import listed
from vfiomgr.pci.iommu import blockers
from vfiomgr.pci.model import PciAddress, PciDevice, is_address
from vfiomgr.topology.model import LEADING_DOWN, PORTS, NodeKind, Problem, Topology, TopologyNode
from vfiomgr.units import counted, format_cpulist, size

if TYPE_CHECKING:
    from vfiomgr.pci.capabilities import PciLink
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.vgpu.model import Vgpu


_SHOWN = 3
"""Blocking functions that a text names."""


def of_host(host: HostSnapshot) -> Iterator[Problem]:
    """Problems that concern all devices."""
    if host.devices and host.iommu.is_known and not host.iommu.is_on:
        yield Problem("iommu-off", "error", "IOMMU is off: no device can be passed through")
    if host.pci_unidentified:
        text = f"cannot identify {listed(host.pci_unidentified, _SHOWN)}"
        yield Problem("unidentified", "warning", text)


def of_function(
    host: HostSnapshot, device: PciDevice, link: PciLink | None, port: PciLink | None
) -> Iterator[Problem]:
    """Problems of one function, the gravest first."""
    if device.stuck:
        text = f"stuck in the kernel: {device.stuck} has not returned"
        yield Problem("stuck", "error", text)
    if not device.is_responsive:
        yield Problem("not-responding", "error", "does not respond")
    yield from _of_group(host, device)
    for wedged in host.vgpus.wedged:
        if wedged.name == str(device.address):
            yield Problem("wedged", "warning", wedged.why)
    yield from of_link(device, link, port)
    if device.driver is None and not device.is_bridge and device.physical_function is None:
        yield Problem("no-driver", "info", "no driver")
    if device.is_boot_display:
        yield Problem("boot-display", "info", "boot display")


def _of_group(host: HostSnapshot, device: PciDevice) -> Iterator[Problem]:
    """Why a function that a guest has, or that is a GPU, cannot be opened by a guest."""
    if device.is_bridge or not (device.is_on_vfio or device.is_graphics_or_accelerator):
        return
    if device.iommu_group is None:
        if host.iommu.is_on:
            yield Problem("no-iommu-group", "error", "no IOMMU group")
        return
    blocking = [
        f"{other.address} is on {other.driver}"
        for other in blockers(host.group_members(device.iommu_group))
        if device.is_on_vfio or other.address.slot != device.address.slot
    ]
    if blocking:
        text = f"group {device.iommu_group} is not viable: {listed(blocking, _SHOWN)}"
        yield Problem("group-not-viable", "warning", text)


def of_link(device: PciDevice, link: PciLink | None, port: PciLink | None) -> Iterator[Problem]:
    """A link that runs below what both of its ends support; `port` is the upper end."""
    if link is None or link.width is None:
        return
    ends = "the device supports" if port is None else "both ends support"
    ends_of_link = (link,) if port is None else (link, port)
    width = min((e.max_width for e in ends_of_link if e.max_width is not None), default=None)
    speed = min((e.max_speed for e in ends_of_link if e.max_speed is not None), default=None)
    if width is not None and link.width < width:
        yield Problem("link-width", "warning", f"link width x{link.width}, {ends} x{width}")
    if speed is not None and link.speed is not None and link.speed < speed:
        text = f"link speed {link.speed:g} GT/s, {ends} {speed:g} GT/s"
        if device.is_graphics_or_accelerator:
            yield Problem("link-speed", "info", "link speed below maximum (normal when idle)")
        else:
            yield Problem("link-speed", "warning", text)


_ROOT_COMPLEX = expression(r"pci([0-9a-f]{4,8}):([0-9a-f]{2})")
_DEEPEST = 64
"""Bridges above a function; a snapshot that names more is not of a real host."""
_CHIPSET = ("05", "0600", "0601", "0680", "0700", "0780", "08", "0c05", "1101", "1180", "13")
"""Classes of functions that are the chipset's or the processor's where they are on a root bus:
memory controllers, host and ISA bridges, serial ports, management engines, system peripherals,
SMBus, performance counters, signal processing, instrumentation."""


def tree_of(host: HostSnapshot, only: Collection[PciAddress] = ()) -> Topology:
    """The topology of a host; with `only`, the branches of these functions.

    Raises:
        UnknownDevice: the host has no such function.
    """
    wanted = {str(host.device(address).address) for address in only}
    root = _Builder(host).root()
    return Topology(
        root=_pruned(root, wanted) or root if wanted else root,
        is_iommu_on=host.iommu.is_on if host.iommu.is_known else None,
        knows_users=host.users.processes is not None,
        knows_links=host.links is not None,
    )


def _pruned(node: TopologyNode, wanted: Collection[str]) -> TopologyNode | None:
    """The node with the branches that lead to what is wanted, and with all below that."""
    if node.id in wanted:
        return replace(node, is_selected=True)
    children = tuple(filter(None, (_pruned(child, wanted) for child in node.children)))
    virtual = sum(child.kind == "virtual-function" for child in node.children)
    notes = (*node.notes, counted(virtual, "VF")) if virtual else node.notes
    return replace(node, children=children, notes=notes) if children else None


class _Builder:
    """Finds out what is below what; the tree is made from its leaves."""

    def __init__(self, host: HostSnapshot) -> None:
        self._host = host
        self._links = {link.address: link for link in host.links or ()}
        self._complexes: dict[str, int] = {}
        """Root complexes, and how many bridges are above each."""
        self._below: dict[str, list[PciDevice]] = defaultdict(list)
        self._complexes_below: dict[str, list[str]] = defaultdict(list)
        self._vgpus: dict[str, list[Vgpu]] = defaultdict(list)
        self._uses: dict[PciAddress, list[str]] = defaultdict(list)
        trails = {device.address: _trail(host, device) for device in host.devices}
        self._depths = {str(address): len(trail) for address, trail in trails.items()}
        for trail in trails.values():
            for depth, name in enumerate(trail):
                if not is_address(name):
                    self._complexes[name] = min(depth, self._complexes.get(name, depth))
        for device in host.devices:
            self._below[self._parent(device, trails[device.address])].append(device)
        above = dict.fromkeys(self._complexes, "")
        for trail in trails.values():
            above |= self._known_above(trail)
        for name in sorted(above, key=lambda name: (len(name), name)):
            self._complexes_below[above[name]].append(name)
        for vgpu in host.vgpus.active:
            self._vgpus[vgpu.parent].append(vgpu)
        for use in host.users.host_uses or ():
            if use.kind != "persistence-mode":
                is_route = use.kind == "default-route"
                text = f"default route ({use.what})" if is_route else use.what
                self._uses[use.address].append(text)

    def _known_above(self, trail: tuple[str, ...]) -> dict[str, str]:
        """Of root complexes behind a function, as those of VMD are, the function."""
        return {
            name: above
            for above, name in pairwise(trail)
            if name in self._complexes
            and above in self._depths
            and self._depths[above] < self._complexes[name]
        }

    def _parent(self, device: PciDevice, trail: tuple[str, ...]) -> str:
        """The function or root complex that a function is below; a VF is below its PF."""
        physical = self._host.device_named(str(device.physical_function))
        if physical is not None and physical.physical_function is None:
            return str(physical.address)
        # Those above have fewer above themselves, so that no snapshot leads round in a circle.
        depths = self._depths | self._complexes
        return next((name for name in reversed(trail) if depths[name] < len(trail)), trail[0])

    def root(self) -> TopologyNode:
        """The host."""
        by_node: dict[int | None, list[TopologyNode]] = defaultdict(list)
        for name in self._complexes_below[""]:
            found = self._complex(name)
            by_node[found.numa_node].append(found)
        numbers = sorted(number for number in by_node if number is not None)
        nodes = [self._numa_node(number, by_node[number]) for number in numbers]
        others = by_node[None] + list(self._virtual_parents())
        release = self._host.kernel.release
        return TopologyNode(
            kind="host",
            id="host",
            name=f"Linux {release}" if release else None,
            problems=tuple(of_host(self._host)),
            children=(*nodes, *others),
        )

    def _numa_node(self, number: int, children: Iterable[TopologyNode]) -> TopologyNode:
        known = self._host.topology.node(number) if self._host.topology else None
        notes = []
        if known is not None and known.cpus:
            notes.append(f"CPUs {format_cpulist(known.cpus)}")
        if known is not None and known.memory_bytes:
            notes.append(f"{size(known.memory_bytes)} memory")
        return TopologyNode(
            kind="numa-node",
            id=f"numa {number}",
            numa_node=number,
            notes=tuple(notes),
            children=tuple(children),
        )

    def _complex(self, name: str) -> TopologyNode:
        """A root complex; its NUMA node is that of most of its functions."""
        children = tuple(self._function(d, None, on_root_bus=True) for d in self._below[name])
        known = Counter(number for child in children for number in _numa_nodes(child))
        return TopologyNode(
            kind="root-complex",
            id=name,
            numa_node=max(known, key=lambda number: (known[number], -number), default=None),
            children=children,
        )

    def _virtual_parents(self) -> Iterator[TopologyNode]:
        """Parents of vGPUs that are no functions, and have vGPUs."""
        for parent, vgpus in sorted(self._vgpus.items()):
            if self._host.device_named(parent) is None:
                children = tuple(map(self._vgpu, vgpus))
                yield TopologyNode(kind="vgpu-parent", id=parent, children=children)

    def _function(
        self, device: PciDevice, above: NodeKind | None, *, on_root_bus: bool
    ) -> TopologyNode:
        name = str(device.address)
        kind = self._kind(device, above, on_root_bus=on_root_bus)
        link = self._links.get(device.address)
        port = None if kind in LEADING_DOWN else self._port_link(device)
        is_judged = kind not in LEADING_DOWN and not self._shares_link(device.address)
        found = tuple(of_function(self._host, device, link if is_judged else None, port))
        children = (
            *(self._complex(below) for below in self._complexes_below[name]),
            *(self._function(below, kind, on_root_bus=False) for below in self._below[name]),
            *map(self._vgpu, self._vgpus[name]),
        )
        is_quiet = all(problem.kind == "no-driver" for problem in found) and not children
        is_chipset = on_root_bus and is_quiet and device.class_code.startswith(_CHIPSET)
        return TopologyNode(
            kind=kind,
            id=name,
            name=device.name,
            short_name=device.short_name,
            address=device.address,
            class_name=device.class_name,
            driver=device.driver,
            iommu_group=device.iommu_group,
            numa_node=device.numa_node,
            link=link,
            port_link=port,
            users=self._users(device),
            problems=() if is_chipset else found,
            notes=tuple(self._notes(device)),
            is_chipset=is_chipset and not self._uses[device.address],
            children=children,
        )

    def _kind(self, device: PciDevice, above: NodeKind | None, *, on_root_bus: bool) -> NodeKind:
        """By place: the type of a port stands in a capability that only root can read."""
        if device.physical_function is not None:
            return "virtual-function"
        if device.header_type != 1 and not device.class_code.startswith("0604"):
            return "function"
        is_port = device.driver == "pcieport" or device.address in self._links
        if on_root_bus:
            return "root-port" if is_port or self._host.links is None else "bridge"
        if above == "upstream-port":
            return "downstream-port"
        leads_to_bridges = any(below.is_bridge for below in self._below[str(device.address)])
        return "upstream-port" if (leads_to_bridges or is_port) and above in PORTS else "bridge"

    def _port_link(self, device: PciDevice) -> PciLink | None:
        """The link of the port above a function."""
        above = self._host.device_named(device.bridge_path.rpartition("/")[2])
        return self._links.get(above.address) if above is not None else None

    def _shares_link(self, address: PciAddress) -> bool:
        """Whether the link of a function is that of function 0 of its slot, which reports it."""
        first = PciAddress(address.domain, address.bus, address.device, 0)
        return first != address and first in self._links

    def _users(self, device: PciDevice) -> tuple[str, ...] | None:
        """Those of a bridge are those of what is behind it, where they are shown."""
        if device.is_bridge:
            return None
        uses = self._uses[device.address]
        if self._host.users.processes is None and not uses:
            return None
        return (*uses, *self._holders(device))

    def _holders(self, holder: PciDevice | Vgpu) -> tuple[str, ...]:
        return tuple(dict.fromkeys(str(user) for user in self._host.holders(holder)))

    def _notes(self, device: PciDevice) -> Iterator[str]:
        if device.driver_override not in (None, device.driver):
            yield f"driver_override {device.driver_override}"
        if device.sriov_totalvfs and not device.virtual_functions:
            yield f"up to {counted(device.sriov_totalvfs, 'VF')}"
        if self._host.users.in_persistence_mode(device.address):
            yield "persistence mode"

    def _vgpu(self, vgpu: Vgpu) -> TopologyNode:
        return TopologyNode(
            kind="vgpu",
            id=vgpu.uuid or f"{vgpu.parent} vGPU",
            name=vgpu.type_name or vgpu.type,
            driver=vgpu.driver,
            iommu_group=vgpu.iommu_group,
            numa_node=vgpu.numa_node,
            users=None if self._host.users.processes is None else self._holders(vgpu),
        )


def _trail(host: HostSnapshot, device: PciDevice) -> tuple[str, ...]:
    """What is above a function, from its root complex on: root complexes and known functions."""
    names = []
    for name in device.bridge_path.split("/"):
        known = host.device_named(name)
        is_above = known is not None and known.physical_function is None
        if (is_above and name != str(device.address)) or _ROOT_COMPLEX.fullmatch(name):
            names.append(name)
    if not names or is_address(names[0]):
        names.insert(0, f"pci{device.address.domain:04x}:{device.address.bus:02x}")
    return tuple(names if len(names) <= _DEEPEST else names[:1])


def _numa_nodes(node: TopologyNode) -> Iterator[int]:
    if node.numa_node is not None:
        yield node.numa_node
    for child in node.children:
        yield from _numa_nodes(child)
