"""A snapshot that is kept: after an event, only what the event names is read again.

A uevent names the directory of its device. What depends on a function is read with it: the bridges
above it (their links), its physical function (its virtual functions), its IOMMU group, its nodes,
and the vGPUs of its GPU. The result is the same as that of a scan, except for facts without events:
processes, mounts and routes, free memory, and files. Of those, `look` reads what a host is watched
for. Whenever it is unclear what has changed, everything is read.

Events: a driver binds or unbinds (KOBJ_BIND, KOBJ_UNBIND in drivers/base/dd.c), devices are added
and removed (device_add, device_del in drivers/base/core.c), and a parent of mediated devices is
registered (KOBJ_CHANGE with MDEV_STATE in drivers/vfio/mdev/mdev_core.c).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Self, TypeVar

from msgspec.structs import replace

from vfiomgr.expressions import expression
from vfiomgr.host.bounded import AttributeReader
from vfiomgr.host.owners import NodeFact
from vfiomgr.paths import IOMMU_GROUPS, PCI_DEVICES, PCI_DRIVERS, VFIO_CDEVS, VFIO_NODES, HostPath
from vfiomgr.pci import capabilities, drivers, iommu
from vfiomgr.pci import facts as pci_facts
from vfiomgr.pci.function import Functions, address_in
from vfiomgr.pci.model import CLASS_DISPLAY, PciAddress, PciDevice, is_address, pci_device
from vfiomgr.pci.names import Names
from vfiomgr.snapshot import scan
from vfiomgr.value import Value

if TYPE_CHECKING:
    from _typeshed import SupportsRichComparison

    from vfiomgr.host.tree import HostTree
    from vfiomgr.host.udev import DeviceEvents
    from vfiomgr.pci.iommu import IommuGroup
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.vgpu.quota.model import GpuQuotas

    Slots = frozenset[tuple[int, int, int]]

_ADDRESS = expression(r"(?<=/)[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7](?=/|$)")
_GROUP = expression(r"/devices/virtual/vfio/(?:noiommu-)?([0-9]+)")
_UUID = expression(r"/[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}(?=/|$)")
_T = TypeVar("_T")
_Key = TypeVar("_Key", bound="SupportsRichComparison")
_address_of = attrgetter("address")


class KeptSnapshot:
    """The last snapshot of a host; the same object as before says that nothing has changed.

    `scan` reads everything; `serials_of` says in which slots it reads serial numbers. Facts from
    nvidia-smi are not followed: they belong to the caller.
    """

    def __init__(
        self,
        tree: HostTree,
        machine: HostTree,
        scan: Callable[[], HostSnapshot],
        serials_of: Callable[[], Slots] = frozenset,
    ) -> None:
        self._tree = tree
        tree.reads_alone = True
        self._machine = machine
        self._scan = scan
        self._serials_of = serials_of
        self._host: HostSnapshot | None = None
        self._devices: dict[PciAddress, PciDevice] = {}
        self._groups: dict[int, IommuGroup] = {}
        self._console = pci_facts.ConsoleState((), None, {})
        self._stamps: dict[str, object] = {}
        self._reader = AttributeReader(tree)

    def close(self) -> None:
        """End the process that reads attributes."""
        self._reader.close()

    def read(self) -> HostSnapshot:
        """Read everything."""
        self._tree.forget()
        before, self._host = self._host, None
        self._stamps = {name: self._stamp_of(name) for name in _FILES}
        self._console = pci_facts.read_console(self._tree)
        host = self._scan()
        if host == before:
            host = before
        self._devices = {device.address: device for device in host.devices}
        self._groups = {group.number: group for group in host.groups}
        self._host = host
        return host

    def follow(self, events: DeviceEvents) -> HostSnapshot:
        """Read again what the events name, and what depends on it."""
        named = _Named.of(events) if events.is_complete else None
        host, self._host = self._host, None  # after an error, everything is read
        if host is None or named is None:
            return self.read()
        self._tree.forget()
        return self._follow(host, named)

    def look(self, watched: Collection[PciDevice]) -> HostSnapshot:
        """Read again what no event announces.

        These are files, owners of nodes, vGPUs and what more can be created, and of the watched
        functions the power state, the link, and whether they answer. Where events can be lost, the
        lists of functions and nodes and the drivers of watched functions tell.
        """
        self._tree.forget()
        host, self._host = self._host, None
        if host is None or not self._is_listed_as_before(host):
            return self.read()
        changed = set(pci_facts.changed(self._tree, watched))
        changed.update(self._with_other_links(host, watched))
        parents = _parents(host)
        named = _Named(frozenset(changed | parents), has_vgpus=bool(parents))
        host = self._follow(host, named)
        found: dict[str, Any] = {"nodes": scan.read_nodes(self._tree)}
        for name, (_, read) in _FILES.items():
            stamp = self._stamp_of(name)
            if stamp != self._stamps[name]:
                self._stamps[name] = stamp
                found[name] = read(self._tree)
        files = {name: found.pop(name) for name in ("nodes", "texts") if name in found}
        return self._with(host, {"files": replace(host.files, **files), **found})

    # ---- what has changed

    def _is_listed_as_before(self, host: HostSnapshot) -> bool:
        """Whether there are the same functions and nodes; if not, an event was lost."""
        there = set(filter(is_address, self._tree.children(PCI_DEVICES)))
        known = {*map(str, self._devices), *host.pci_unidentified}
        nodes = {node.path for node in host.files.nodes}
        return there == known and nodes == set(scan.list_nodes(self._tree))

    def _with_other_links(
        self, host: HostSnapshot, watched: Iterable[PciDevice | None]
    ) -> Iterator[PciAddress]:
        """The watched functions whose links have changed."""
        known = {link.address: link for link in host.links or ()}
        for device in watched:
            if device is not None and device.address in known:
                now = capabilities.read_links(self._tree, (device,))
                if now != (known[device.address],):
                    yield device.address

    def _follow(self, host: HostSnapshot, named: _Named) -> HostSnapshot:
        members = (
            frozenset(map(PciAddress.parse, filter(is_address, self._groups[number].members)))
            for number in named.groups & self._groups.keys()
        )
        touched = set(named.functions.union(*members))
        touched.update(self._physical_functions(touched))
        above = self._with_other_links(host, map(self._devices.get, named.above - touched))
        touched.update(above)
        touched.update(self._shown(touched))
        if any(use.address in touched for use in host.users.host_uses or ()):
            return self.read()  # what the host used it for may be gone
        old = [self._devices[address] for address in touched if address in self._devices]
        functions = Functions(self._tree)
        facts = self._with_functions(host, touched, functions)
        devices = facts["devices"]
        new = [self._devices[address] for address in touched if address in self._devices]
        facts |= self._with_vgpus(host, devices, touched, functions, has_vgpus=named.has_vgpus)
        vgpus = {*host.vgpus.active} ^ {*facts.get("vgpus", host.vgpus).active}
        holders = (*old, *new, *vgpus)
        numbers = {*named.groups, *(h.iommu_group for h in holders if h.iommu_group is not None)}
        facts |= self._with_groups(host, numbers)
        cdevs = {holder.vfio_device for holder in holders if holder.vfio_device}
        facts["files"] = replace(host.files, nodes=self._nodes(host, numbers, cdevs))
        facts |= self._with_capabilities(host, touched, new)
        known = facts.get("vgpus", host.vgpus)
        facts["vgpus"] = replace(known, quotas=self._quotas(host, touched, new))
        return self._with(host, facts)

    def _physical_functions(self, touched: Iterable[PciAddress]) -> set[PciAddress]:
        """The physical functions of virtual ones, as they were and as they are."""
        known = (self._devices[a].physical_function for a in touched if a in self._devices)
        links = (self._tree.link_name(pci_device(a) / "physfn") for a in touched)
        return {a for a in (*known, *map(address_in, links)) if a is not None}

    def _shown(self, touched: Iterable[PciAddress]) -> set[PciAddress]:
        """The functions that show the console, before or now, if a display is touched."""
        shown = {a for a, device in self._devices.items() if device.display_signs}
        displays = (self._devices[a] for a in touched if a in self._devices)
        classes = (self._tree.read(pci_device(a) / "class") or "" for a in touched)
        if (
            shown.isdisjoint(touched)
            and not any(d.class_code.startswith(CLASS_DISPLAY) for d in displays)
            and not any(text.startswith(f"0x{CLASS_DISPLAY}") for text in classes)
        ):
            return set()
        self._console = pci_facts.read_console(self._tree)
        framebuffer = self._console.framebuffer
        shown.update(self._console.masters, () if framebuffer is None else framebuffer[1:])
        return shown & self._devices.keys()

    # ---- what is read again

    def _with_functions(
        self, host: HostSnapshot, touched: set[PciAddress], functions: Functions
    ) -> dict[str, Any]:
        tree = self._tree
        names = [name for name in map(str, sorted(touched)) if tree.exists(PCI_DEVICES / name)]
        found, unidentified = pci_facts.read_named(
            tree,
            Names(tree, self._machine),
            functions,
            names,
            self._serials_of(),
            reader=self._reader,
        )
        now = {d.address: d for d in pci_facts.mark_displays(self._console, functions, found)}
        for address in touched - now.keys():
            self._devices.pop(address, None)
        self._devices.update(now)
        others = (name for name in host.pci_unidentified if PciAddress.parse(name) not in touched)
        devices = _exchanged(host.devices, dict.fromkeys(touched) | now, _address_of)
        return {
            "devices": devices,
            "pci_unidentified": tuple(sorted((*others, *unidentified), key=PciAddress.parse)),
            "pci_unlisted": None if devices else tree.why_unlisted(PCI_DEVICES),
            "pci_drivers": tuple(tree.children(PCI_DRIVERS)),
            "vfio": iommu.read_vfio_state(tree),
            **self._with_origins(),
        }

    def _stamp_of(self, name: str) -> tuple[object, ...]:
        """What differs after a file of a fact was written, replaced or removed."""
        list_files, _ = _FILES[name]
        found = ((place, self._tree.status(place)) for place in list_files(self._tree))
        return tuple((p, s.st_ino, s.st_mtime_ns, s.st_size) for p, s in found if s is not None)

    def _with_origins(self) -> dict[str, Any]:
        """The original drivers, if a record was written: each is renamed into their directory."""
        stamp = self._stamp_of("origins")
        if stamp == self._stamps["origins"]:
            return {}
        self._stamps["origins"] = stamp
        return {"origins": drivers.read_origins(self._tree)}

    def _with_vgpus(
        self,
        host: HostSnapshot,
        devices: tuple[PciDevice, ...],
        touched: set[PciAddress],
        functions: Functions,
        *,
        has_vgpus: bool,
    ) -> dict[str, Any]:
        """The vGPUs, and what can be created, if a function that has to do with them is touched."""
        tree, known = self._tree, _parents(host)
        present = touched & self._devices.keys()
        entries = (functions.of(str(address)).entries for address in present)
        if (
            not has_vgpus
            and known.isdisjoint(touched)
            and all(map(scan.VGPU_ENTRIES.isdisjoint, entries))
        ):
            return {}
        wanted = known | touched
        devices = tuple(
            device
            for device in devices
            if device.address in wanted or device.physical_function in wanted
        )
        vgpus = scan.read_vgpus(tree, functions, devices)
        found = replace(host.vgpus, parents=vgpus.parents, active=vgpus.active)
        return {
            "vgpus": scan.with_records(tree, found),
            "definitions": scan.read_definitions(tree, found.active),
        }

    def _with_groups(self, host: HostSnapshot, numbers: set[int]) -> dict[str, Any]:
        now = {
            number: iommu.read_group(self._tree, number)
            for number in numbers
            if self._tree.exists(IOMMU_GROUPS / str(number))
        }
        for number in numbers - now.keys():
            self._groups.pop(number, None)
        self._groups.update(now)
        groups = _exchanged(host.groups, dict.fromkeys(numbers) | now, attrgetter("number"))
        return {"groups": groups, "iommu": iommu.read_state(self._tree, groups)}

    def _nodes(
        self, host: HostSnapshot, numbers: Iterable[int], cdevs: Iterable[str]
    ) -> tuple[NodeFact, ...]:
        """The nodes, those of these groups and cdevs read again."""
        places = [VFIO_NODES / str(number) for number in numbers]
        places += [VFIO_CDEVS / name for name in cdevs]
        found = ((place, self._tree.access(place)) for place in places)
        now = {
            _place_of(place): None if access is None else NodeFact(place, access)
            for place, access in found
        }
        return _exchanged(host.files.nodes, now, lambda node: _place_of(node.path))

    def _with_capabilities(
        self, host: HostSnapshot, touched: set[PciAddress], devices: Sequence[PciDevice]
    ) -> dict[str, Any]:
        """The links, reset capabilities and vectors, as far as the snapshot has them."""
        tree, facts, gone = self._tree, dict[str, Any](), dict.fromkeys(touched)
        if host.links is not None:
            links = {link.address: link for link in capabilities.read_links(tree, devices)}
            facts["links"] = _exchanged(host.links, gone | links, _address_of)
        if host.reset_capabilities is not None:
            found = capabilities.read_reset_capabilities(tree, devices)
            resets = {each.address: each for each in found}
            changed = gone | resets
            facts["reset_capabilities"] = _exchanged(host.reset_capabilities, changed, _address_of)
        if host.bus_resets is not None:
            able = {address: address for address in capabilities.read_bus_resets(tree, devices)}
            facts["bus_resets"] = _exchanged(host.bus_resets, gone | able, lambda each: each)
        if host.msix or any(device.sriov_vf_total_msix for device in devices):
            facts["msix"] = capabilities.read_msix(tree, self._devices.values())
        return facts

    def _quotas(
        self, host: HostSnapshot, touched: set[PciAddress], devices: Sequence[PciDevice]
    ) -> tuple[GpuQuotas, ...]:
        """The quotas of GPUs, if the snapshot has any or a function can have them."""
        gpus = {PciAddress.parse(quotas.gpu) for quotas in host.vgpus.quotas}
        if not gpus and not any(device.sriov_totalvfs for device in devices):
            return host.vgpus.quotas
        present = (gpus | touched) & self._devices.keys()
        return scan.read_quotas(self._tree, [self._devices[address] for address in sorted(present)])

    def _with(self, host: HostSnapshot, facts: dict[str, Any]) -> HostSnapshot:
        """Keep the snapshot with these facts; the same object if none differs."""
        changed = {name: value for name, value in facts.items() if getattr(host, name) != value}
        self._host = replace(host, **changed) if changed else host
        return self._host


class _Named(Value):
    """What events name."""

    functions: frozenset[PciAddress]
    groups: frozenset[int] = frozenset()
    above: frozenset[PciAddress] = frozenset()
    """The bridges above the functions: their links may have changed."""
    has_vgpus: bool = False
    """Whether a mediated device is among them."""

    @classmethod
    def of(cls, events: DeviceEvents) -> Self | None:
        """Read the paths; None if one is of something that is not known."""
        functions: set[PciAddress] = set()
        above: set[PciAddress] = set()
        groups: set[int] = set()
        for path in events.paths:
            names = _ADDRESS.findall(path)
            group = _GROUP.fullmatch(path)
            if names:
                *bridges, function = map(PciAddress.parse, names)
                functions.add(function)
                above.update(bridges)
            elif group is not None:
                groups.add(int(group[1]))
            else:
                return None
        has_vgpus = any(_UUID.search(path) for path in events.paths)
        return cls(frozenset(functions), frozenset(groups), frozenset(above), has_vgpus)


def _parents(host: HostSnapshot) -> frozenset[PciAddress]:
    """The functions of vGPUs, and their GPUs."""
    names = {name for parent in host.vgpus.parents for name in (parent.name, parent.gpu)}
    names.update(vgpu.parent for vgpu in host.vgpus.active)
    return frozenset(map(PciAddress.parse, filter(is_address, names)))


def _place_of(node: str) -> tuple[bool, str]:
    """The order of `read_nodes`: groups, then cdevs, by name."""
    return node.startswith(VFIO_CDEVS), node


def _exchanged(
    values: tuple[_T, ...], changes: Mapping[_Key, _T | None], key: Callable[[_T], _Key]
) -> tuple[_T, ...]:
    """Values sorted by a key, of which some are exchanged, added or, if they are None, removed."""
    found = list(values)
    for name, value in changes.items():
        at = bisect_left(found, name, key=key)
        is_known = at < len(found) and key(found[at]) == name
        found[at : at + is_known] = [] if value is None else [value]
    return tuple(found)


_FILES: dict[str, tuple[Callable[[HostTree], Iterable[HostPath]], Callable[[HostTree], object]]] = {
    "origins": (lambda _tree: (drivers.ORIGINS,), drivers.read_origins),
    **scan.FILES,
}
"""Facts that are read again only if the stamps of their files differ."""
