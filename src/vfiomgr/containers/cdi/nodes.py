"""The devices behind the nodes of a host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

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


class Target(Value):
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


def resolve(host: HostSnapshot, node: str) -> Target:
    """The device behind a node of the host."""
    if node in (CONTROL, IOMMU):
        return Target(node, "control")
    if node.startswith(f"{VFIO_CDEVS}/"):
        return _cdev(host, node)
    number = node.removeprefix(f"{VFIO_NODES}/")
    if node.startswith(f"{VFIO_NODES}/") and number.isdecimal():
        return _group(host, node, int(number))
    if number.removeprefix("noiommu-").isdecimal() and number.startswith("noiommu-"):
        return Target(node, "group", problem="it is in the unsafe no-IOMMU mode")
    return Target(node, "other")


def _group(host: HostSnapshot, node: str, number: int) -> Target:
    members = host.group_members(number)
    mediated = tuple(v for v in host.vgpus if v.uuid is not None and v.iommu_group == number)
    ready = tuple(device for device in members if host.is_ready_for_guests(device))
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
    return Target(node, "group", number, ready or members, mediated, problem)


def _on_drivers(devices: tuple[PciDevice, ...]) -> str:
    on = (f"{d.address} is on {d.driver or 'no driver'}" for d in devices if not d.is_bridge)
    return ", ".join(on) or "no functions"


def _cdev(host: HostSnapshot, node: str) -> Target:
    name = node.removeprefix(f"{VFIO_CDEVS}/")
    functions = tuple(device for device in host.devices if device.vfio_device == name)
    mediated = tuple(v for v in host.vgpus if v.uuid is not None and v.vfio_device == name)
    groups = [d.iommu_group for d in functions] + [v.iommu_group for v in mediated]
    if not functions and not mediated:
        problem: str | None = f"no function has the VFIO device {name}"
    elif functions and not functions[0].vfio_cdev:
        problem = f"the kernel does not create {node} (CONFIGVFIO_DEVICE_CDEV)"
    elif functions and not host.is_ready_for_guests(functions[0]):
        problem = f"{functions[0].address} is on {functions[0].driver or 'no driver'}"
    else:
        problem = None
    return Target(node, "cdev", next(iter(groups), None), functions, mediated, problem)


def is_vfio_node(path: str) -> bool:
    """Whether a node represents a group or a device."""
    return path.startswith("/dev/vfio/") and path != CONTROL
