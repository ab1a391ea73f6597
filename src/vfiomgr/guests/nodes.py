"""The nodes of VFIO: the devices behind them, the groups that guests can open, and owners."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from vfiomgr.host.owners import ROOT_ONLY, NodeAccess
from vfiomgr.paths import VFIO_CDEVS, VFIO_NODES
from vfiomgr.pci.model import PciDevice
from vfiomgr.value import Value
from vfiomgr.vgpu.model import Vgpu

if TYPE_CHECKING:
    from vfiomgr.snapshot.model import HostSnapshot

NodeKind = Literal["group", "cdev", "control", "other"]
CONTROL = VFIO_NODES / "vfio"
IOMMU = "/dev/iommu"
VFIO: frozenset[NodeKind] = frozenset({"group", "cdev"})


class NodeDevice(Value):
    """The device behind a node; `problem` says why guests cannot open it."""

    path: str
    kind: NodeKind
    group: int | None = None
    functions: tuple[PciDevice, ...] = ()
    vgpus: tuple[Vgpu, ...] = ()
    problem: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Addresses and UUIDs."""
        mediated = (vgpu.uuid for vgpu in self.vgpus if vgpu.uuid is not None)
        return (*(str(device.address) for device in self.functions), *mediated)


def resolve(host: HostSnapshot, node: str) -> NodeDevice:
    """The device behind a node of the host."""
    if node in (CONTROL, IOMMU):
        return NodeDevice(node, "control")
    if node.startswith(f"{VFIO_CDEVS}/"):
        return _cdev(host, node)
    number = node.removeprefix(f"{VFIO_NODES}/")
    if node.startswith(f"{VFIO_NODES}/") and number.isdecimal():
        return _group(host, node, int(number))
    if number.removeprefix("noiommu-").isdecimal() and number.startswith("noiommu-"):
        return NodeDevice(node, "group", problem="it is in the unsafe no-IOMMU mode")
    return NodeDevice(node, "other")


def _group(host: HostSnapshot, node: str, number: int) -> NodeDevice:
    members = host.group_members(number)
    mediated = tuple(v for v in host.vgpus.active if v.uuid is not None and v.iommu_group == number)
    ready = tuple(device for device in members if host.vgpus.is_ready_for_guests(device))
    if host.group(number) is None:
        problem: str | None = f"no such IOMMU group: {number}"
        if not host.iommu.is_known:
            problem = f"whether IOMMU group {number} exists is unknown"
    elif mediated:
        problem = None
    elif not ready:
        problem = f"IOMMU group {number} is not on VFIO: {_on_drivers(members)}"
    elif not host.is_viable(number):
        others = tuple(device for device in members if device not in ready)
        problem = f"IOMMU group {number} is not viable: {_on_drivers(others)}"
    else:
        problem = None
    return NodeDevice(node, "group", number, ready or members, mediated, problem)


def _on_drivers(devices: tuple[PciDevice, ...]) -> str:
    on = (f"{d.address} is on {d.driver or 'no driver'}" for d in devices if not d.is_bridge)
    return ", ".join(on) or "no functions"


def _cdev(host: HostSnapshot, node: str) -> NodeDevice:
    name = node.removeprefix(f"{VFIO_CDEVS}/")
    functions = tuple(device for device in host.devices if device.vfio_device == name)
    mediated = tuple(v for v in host.vgpus.active if v.uuid is not None and v.vfio_device == name)
    groups = [d.iommu_group for d in functions] + [v.iommu_group for v in mediated]
    if not functions and not mediated:
        problem: str | None = f"no function has the VFIO device {name}"
    elif functions and not functions[0].vfio_cdev:
        problem = f"the kernel does not create {node} (CONFIG_VFIO_DEVICE_CDEV)"
    elif functions and not host.vgpus.is_ready_for_guests(functions[0]):
        problem = f"{functions[0].address} is on {functions[0].driver or 'no driver'}"
    else:
        problem = None
    return NodeDevice(node, "cdev", next(iter(groups), None), functions, mediated, problem)


def is_vfio_node(path: str) -> bool:
    """Whether a node represents a group or a device."""
    return path.startswith("/dev/vfio/") and path != CONTROL


class AssignableGroup(Value):
    """An IOMMU group that can be assigned to a guest."""

    group: int
    functions: tuple[PciDevice, ...] = ()
    vgpu: Vgpu | None = None
    """A mediated device, which has its own group."""

    @property
    def name(self) -> str:
        """The address of the first GPU or accelerator, else of the first function; or the UUID."""
        if self.vgpu is not None:
            return self.vgpu.name
        first = next((d for d in self.functions if d.is_graphics_or_accelerator), self.functions[0])
        return str(first.address)

    @property
    def cdevs(self) -> tuple[str, ...]:
        """The nodes of its functions below /dev/vfio/devices, the naming one first."""
        if self.vgpu is not None:
            return (self.vgpu.vfio_device,) if self.vgpu.vfio_device else ()
        ordered = sorted(self.functions, key=lambda device: str(device.address) != self.name)
        return tuple(d.vfio_device for d in ordered if d.vfio_cdev and d.vfio_device)


def offers(host: HostSnapshot, *, with_mediated: bool = False) -> Iterator[AssignableGroup]:
    """The groups that can be assigned to a guest, in name order.

    One function without a vGPU makes the group unusable: Kata opens all of its functions, and the
    vendor's driver answers ENODEV for that one.
    """
    found: list[AssignableGroup] = []
    for group in host.groups:
        members = host.group_members(group.number)
        functions = tuple(device for device in members if host.vgpus.is_ready_for_guests(device))
        if any(d not in functions and host.vgpus.is_vendor_function(d) for d in members):
            continue
        if functions and host.is_viable(group.number) and not group.is_noiommu:
            found.append(AssignableGroup(group.number, functions))
    yield from sorted(found, key=lambda offer: min(d.address for d in offer.functions))
    if with_mediated:
        for vgpu in host.vgpus.active:
            if vgpu.uuid is not None and vgpu.iommu_group is not None:
                yield AssignableGroup(vgpu.iommu_group, vgpu=vgpu)


def default_form(host: HostSnapshot, offer: AssignableGroup) -> Literal["group", "cdev"]:
    """One kind of node per device: with both, a GPU could be assigned twice."""
    group = host.group(offer.group)
    has_group = group is None or group.has_node or not offer.cdevs
    return "group" if has_group else "cdev"


def node_paths(offer: AssignableGroup, form: Literal["group", "cdev"]) -> tuple[str, ...]:
    """The nodes that give access to a group, in one of the two forms."""
    if form == "cdev":
        return tuple(str(VFIO_CDEVS / name) for name in offer.cdevs)
    return (f"/dev/vfio/{offer.group}",)


def node_access(host: HostSnapshot, offer: AssignableGroup) -> NodeAccess:
    """Owner and mode of its nodes in a container: those of the layout, else root with 0600."""
    bindings = (host.files.binding(function.address) for function in offer.functions)
    owners = (binding.owner for binding in bindings if binding is not None)
    return next((owner.access for owner in owners if owner is not None), ROOT_ONLY)
