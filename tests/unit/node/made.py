"""Hosts of Kubernetes nodes, as values: for tests that vary a field or two."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from tests.fakes.functions import moved
from tests.unit.devices import host_of, pci_device, with_facts
from vfiomgr.node.model import NodeResource, NodeSettings, NodeUnit
from vfiomgr.node.plan import inventory
from vfiomgr.pci.iommu import IommuGroup
from vfiomgr.vgpu.model import Vgpu, VgpuParent, describe_type

if TYPE_CHECKING:
    from vfiomgr.node.model import Inventory
    from vfiomgr.pci.model import PciAddress, PciDevice
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.vgpu.model import Family

SETTINGS = NodeSettings()
A40_NAME = "vfiomgr.io/GA102GL_A40"
UUID = "f715f63c-0d00-4007-9c5a-b07b0c6c05de"
A40 = replace(
    pci_device("0000:41:00.0"),
    name="NVIDIA Corporation GA102GL [A40]",
    device_id="2235",
    driver="vfio-pci",
    vfio_device="vfio0",
    iommu_group=41,
    bridge_path="pci0000:40/0000:40:01.0",
)
AUDIO = replace(
    A40,
    address=moved(A40.address, function=1),
    name="NVIDIA Corporation GA102 High Definition Audio Controller",
    device_id="1aef",
    class_code="040300",
    vfio_device="vfio1",
)


def at(device: PciDevice, bus: int) -> PciDevice:
    """The same on another bus, in a group of that number."""
    address = moved(device.address, bus=bus)
    return replace(device, address=address, iommu_group=bus, vfio_device=f"vfio{bus}")


def node_of(*devices: PciDevice) -> HostSnapshot:
    """A host whose groups all have nodes."""
    host = host_of(*devices)
    return with_facts(host, groups=tuple(replace(group, has_node=True) for group in host.groups))


def vgpu_node(*, uuid: str | None = None, type_name: str | None = "NVIDIA A40-4Q") -> HostSnapshot:
    """An A40 with two virtual functions; the first has a vGPU, mediated if it has a UUID."""
    physical = replace(A40, driver="nvidia", vfio_device=None)
    addresses = tuple(moved(A40.address, function=number) for number in (4, 5))
    functions = [
        replace(
            physical,
            address=address,
            physical_function=physical.address,
            iommu_group=number,
            vfio_device=None if uuid else f"vfio{number}",
        )
        for number, address in enumerate(addresses, start=50)
    ]
    family: Family = "mdev" if uuid else "vendor-vfio"
    kind = describe_type("nvidia-561" if uuid else "561", "NVIDIA A40-4Q", None, "vfio-pci")
    parents = tuple(
        VgpuParent(str(a), f"/sys/{a}", family, "nvidia", str(physical.address), types, (1,) * n)
        for n, (a, types) in enumerate(zip(addresses, ((), (kind,)), strict=True))
    )
    group = 60 if uuid else 50
    parent = str(addresses[0])
    vgpu = Vgpu(uuid, family, parent, kind.id, type_name, "nvidia", group, None, None)
    host = node_of(replace(physical, virtual_functions=addresses), *functions)
    own = (IommuGroup(group, (uuid,), None, "DMA", has_node=True),) if uuid else ()
    return with_facts(host, groups=(*host.groups, *own), vgpu_parents=parents, vgpus=(vgpu,))


def offered(host: HostSnapshot, settings: NodeSettings = SETTINGS) -> dict[str, list[str]]:
    """The IDs of the units of each resource."""
    return units_by_name(inventory(host, settings))


def units_by_name(made: Inventory) -> dict[str, list[str]]:
    """The IDs of the units of each resource."""
    return {resource.name: [unit.id for unit in resource.units] for resource in made.resources}


def rules(made: Inventory) -> dict[str, list[str]]:
    """The rules of the reasons of each unit that is not healthy."""
    return {u.id: [r.rule for r in u.reasons] for u in made.units if not u.is_healthy}


def notes(host: HostSnapshot, settings: NodeSettings = SETTINGS) -> list[tuple[str, str]]:
    """The rule of each note, and the first word of its subject."""
    found = inventory(host, settings).notes
    return [(note.rule, note.subject.partition(" ")[0]) for note in found]


def unit(
    name: str, path: str = "", node: int | None = 0, parent: PciAddress | None = None
) -> NodeUnit:
    """A unit at a place: `path` has the root complex and the bridges, separated by `/`."""
    return NodeUnit(
        id=name,
        kind="function",
        addresses=(),
        group=None,
        nodes=(),
        numa_nodes=() if node is None else (node,),
        pcie_path=tuple(path.split("/")) if path else (),
        parent=parent,
    )


def resource_of(*units: NodeUnit) -> NodeResource:
    """A resource of these units."""
    return NodeResource("vfiomgr.io/GPU", units)
