"""The nodes that a container needs for host devices: reasons against them, and their numbers.

The fields are those of the runtime specification, config-linux.md, "Devices" and "Allowed Device
list".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from vfiomgr.diagnostic import Diagnostic, blocker, refuse, refuse_if_any
from vfiomgr.errors import HostError
from vfiomgr.guests.nodes import CONTROL, IOMMU
from vfiomgr.host.owners import ROOT_ONLY, NodeAccess
from vfiomgr.passthrough.readiness_hints import how_to_bind
from vfiomgr.paths import VFIO_CDEVS, VFIO_NODES, HostPath, vfio_group_node
from vfiomgr.pci.iommu import blockers
from vfiomgr.pci.model import PciDevice
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.guests.model import GuestDevice
    from vfiomgr.host.tree import HostTree
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.vgpu.model import Vgpu


NodeForm = Literal["group", "cdev"]
"""How a device is opened: `/dev/vfio/N`, or `/dev/vfio/devices/vfioN` (Linux 6.6)."""
ContainerRuntime = Literal["runc", "kata"]
"""The runtime of the container: one on this kernel, or Kata in a guest."""
RULE_ACCESS = "rwm"
"""Read, write, mknod."""


class DeviceNode(Value):
    """A character device of the host."""

    path: str
    major: int
    minor: int
    access: NodeAccess

    @property
    def number(self) -> tuple[int, int]:
        """The device number of the kernel."""
        return self.major, self.minor

    def __str__(self) -> str:
        """`/dev/vfio/23 (240:0)`."""
        return f"{self.path} ({self.major}:{self.minor})"


class ContainerDevice(Value):
    """A host device for a container: the paths of its nodes, and the addresses that share them."""

    name: str
    """The address of its first function, or the UUID of the vGPU."""
    functions: tuple[str, ...]
    nodes: tuple[str, ...]


class Injection(Value):
    """A device with the numbers of its nodes, and its CDI names."""

    device: ContainerDevice
    nodes: tuple[DeviceNode, ...]
    cdi: tuple[str, ...] = ()


def usual_form(host: HostSnapshot) -> NodeForm:
    """The form that every kernel has, but one without VFIO groups."""
    return "cdev" if host.vfio.has_groups is False else "group"


def device_nodes(unit: GuestDevice, form: NodeForm) -> tuple[str, ...]:
    """The nodes of a unit itself: those of its groups, or the cdevs of its functions.

    Raises:
        Refusal: this kernel has no cdev for one.
    """
    holders = unit.functions or ((unit.vgpu,) if unit.vgpu is not None else ())
    if form == "group":
        groups = dict.fromkeys(holder.iommu_group for holder in holders)
        return tuple(vfio_group_node(group) for group in groups if group is not None)
    names = [holder.vfio_device for holder in holders if _has_cdev(holder)]
    if len(names) < len(holders):
        message = f"{unit.name} has no node below {VFIO_CDEVS}"
        refuse("no-cdev", unit.name, message, "use its group: --node group (cdevs need Linux 6.6)")
    return tuple(VFIO_CDEVS / name for name in names if name)


def _has_cdev(holder: PciDevice | Vgpu) -> bool:
    """Whether a cdev exists: VFIO also reports the name of a missing one."""
    return holder.vfio_cdev if isinstance(holder, PciDevice) else holder.vfio_device is not None


def container_device(
    unit: GuestDevice, form: NodeForm, runtime: ContainerRuntime | None
) -> ContainerDevice:
    """A unit with the nodes that a container opens it by, the common nodes first.

    Kata opens /dev/iommu on the host itself, and needs only the cdev.
    """
    shared = [CONTROL] if form == "group" else [IOMMU][: runtime != "kata"]
    return ContainerDevice(unit.name, unit.function_names, (*shared, *device_nodes(unit, form)))


def waiting(host: HostSnapshot, units: Iterable[GuestDevice]) -> tuple[PciDevice, ...]:
    """Functions that are not available to guests, and those that make their group unusable."""
    found: dict[str, PciDevice] = {}
    for unit in units:
        for function in unit.functions:
            members = host.group_members(function.iommu_group)
            others = {*blockers(members), *(m for m in members if host.vgpus.is_vendor_function(m))}
            if not _is_ready(host, function):
                found[str(function.address)] = function
            found.update({str(o.address): o for o in others if not _is_ready(host, o)})
    return tuple(found.values())


def companions(host: HostSnapshot, units: Iterable[GuestDevice]) -> tuple[PciDevice, ...]:
    """Functions included without a name: a group gives access to all of its VFIO devices."""
    known = tuple(units)
    named = {function.address for unit in known for function in unit.functions}
    groups = dict.fromkeys(f.iommu_group for unit in known for f in unit.functions)
    members = (member for group in groups for member in host.group_members(group))
    return tuple(m for m in members if m.address not in named and m.is_for_guests)


def companion_notes(host: HostSnapshot, units: Sequence[GuestDevice]) -> list[str]:
    """Notes about functions of other devices that share a group with the added ones."""
    return [
        f"the container also gets {device}: it is in IOMMU group {device.iommu_group}"
        for device in companions(host, units)
    ]


def _is_ready(host: HostSnapshot, function: PciDevice) -> bool:
    return host.vgpus.is_ready_for_guests(function) and function.iommu_group is not None


def refuse_unready(host: HostSnapshot, units: Sequence[GuestDevice]) -> None:
    """Refuse devices that containers cannot open, with the remedy; `host` is a complete scan."""
    refuse_if_any((o for unit in units for o in _unready(host, unit)), frozenset())


def _unready(host: HostSnapshot, unit: GuestDevice) -> Iterator[Diagnostic]:
    late = waiting(host, [unit])
    named = [device for device in late if str(device.address) in unit.function_names]
    for device in (d for d in late if host.vgpus.is_vendor_function(d)):
        create = f"vfiomgr vgpu create --parent {device.address} --type …"
        yield blocker(
            "vgpu-missing",
            device,
            f"{device} has no vGPU, so its IOMMU group cannot be opened",
            create,
        )
        return
    if named:
        shown = ", ".join(f"{device} is on {device.driver or 'no driver'}" for device in named)
        others = len(late) > len(named)
        remedy = how_to_bind(host, [*named[:1]], with_group=others)
        yield blocker("on-host-driver", unit.name, f"{shown}: a container cannot open it", remedy)
    elif late:
        shown = ", ".join(f"{device} ({device.driver})" for device in late)
        remedy = how_to_bind(host, unit.functions[:1], with_group=True)
        yield blocker(
            "group-not-viable",
            unit.name,
            f"the IOMMU group of {unit.name} also contains {shown}",
            remedy,
        )


def refuse_noiommu(host: HostSnapshot, units: Iterable[GuestDevice]) -> None:
    """Refuse no-IOMMU mode, which isolates nothing."""
    for unit in units:
        group = host.group(unit.iommu_group)
        if group is not None and group.is_noiommu:
            message = (
                f"{unit.name} is in no-IOMMU mode, in which it can write to all memory of the host"
            )
            refuse("no-iommu-mode", unit.name, message, "enable the IOMMU: vfiomgr check shows how")


_CLASSES = HostPath("/sys/class")
_FOR_ALL = NodeAccess(0, 0, 0o666)
"""The permissions of devtmpfs for /dev/vfio/vfio (vfio_dev in drivers/vfio/container.c)."""


def read_node(tree: HostTree, path: str) -> DeviceNode:
    """A node with its numbers, owner and mode; for a recorded host the numbers of sysfs.

    Raises:
        HostError: there is no such node, or its numbers are unknown.
    """
    node = HostPath(path)
    access = tree.access(node)
    number = tree.device_number(node) or _number_in_sysfs(tree, node)
    if access is None and number is None and not (tree.is_live or tree.is_machine):
        message = f"no device numbers of {path}: neither the node nor /sys/class below {tree.root}"
        raise HostError(message, "run the command on the host itself")
    if access is None and (number is None or tree.is_live):
        message = f"{path} does not exist"
        raise HostError(message, _remedy(node, is_machine=tree.is_machine))
    if number is None:
        message = f"{path} is not a device node here, and sysfs does not have its numbers"
        raise HostError(message, "run the command where /dev is that of the host")
    usual = _FOR_ALL if node == VFIO_NODES / "vfio" else ROOT_ONLY
    return DeviceNode(path, *number, access or usual)


def _number_in_sysfs(tree: HostTree, node: HostPath) -> tuple[int, int] | None:
    """From the attribute `dev` of the node's device: `238:2`."""
    name = {VFIO_NODES: "vfio", VFIO_CDEVS: "vfio-dev"}.get(node.parent, "misc")
    if node.name in ("vfio", "iommu"):
        name = "misc"
    major, _, minor = (tree.read(_CLASSES / name / node.name / "dev") or "").partition(":")
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else None


def _remedy(node: HostPath, *, is_machine: bool) -> str:
    if node.name == "vfio":
        return "load the module: modprobe vfio_iommu_type1"
    if node.name == "iommu":
        return "load the module: modprobe iommufd; or use the device's group: --node group"
    if node.parent == VFIO_CDEVS:
        return "use the device's group: --node group"
    cdev = "use --node cdev on a kernel without groups"
    if not is_machine:
        return cdev
    return f"{cdev}; in a container, pass the root of the host with --root"
