"""All facts that a decision about a host needs, as one value, with its lookups."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec.structs import replace

from vfiomgr.definitions.model import DefinitionFacts, DefinitionProblem
from vfiomgr.paths import VFIO_CDEVS
from vfiomgr.pci.drivers import is_variant_module
from vfiomgr.pci.iommu import IommuGroup, blockers
from vfiomgr.pci.model import DeviceIdentity, PciAddress, PciDevice
from vfiomgr.persistence.model import (
    DRIVERCTL,
    RULES,
    DriverctlOverride,
    PersistedBinding,
    parse_driverctl,
    parse_rule,
)
from vfiomgr.snapshot.named import unknown_device
from vfiomgr.snapshot.values import DeviceState, DeviceUser, Holder, HostFacts
from vfiomgr.vgpu.model import (
    GpuMode,
    GpuPartition,
    Vgpu,
    mark_file,
    mark_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from vfiomgr.definitions.model import VgpuDefinition
    from vfiomgr.host.owners import NodeAccess
    from vfiomgr.pci.capabilities import ResetCapabilities
    from vfiomgr.pci.drivers import OriginalState
    from vfiomgr.pci.translation import Translation
    from vfiomgr.snapshot.node_agent import NodeStatus
    from vfiomgr.snapshot.unknown import UnknownUsers
    from vfiomgr.vgpu.model import VgpuType
    from vfiomgr.vgpu.quota.model import FunctionQuotas, GpuQuotas

_CLASS_NETWORK = "02"
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class HostSnapshot(HostFacts):
    """The facts of a host at one moment, and what follows from them."""

    @cached_property
    def _made(self) -> dict[object, Any]:
        return {}

    def once(self, make: Callable[[HostSnapshot], _Value]) -> _Value:
        """What another module makes of these facts, made once."""
        if make not in self._made:
            self._made[make] = make(self)
        found: _Value = self._made[make]
        return found

    @cached_property
    def _by_address(self) -> dict[PciAddress, PciDevice]:
        return {device.address: device for device in self.devices}

    @cached_property
    def number_of_pci_groups(self) -> int:
        """How many IOMMU groups isolate PCI functions."""
        return sum(group.has_pci_members and not group.is_noiommu for group in self.groups)

    @cached_property
    def nvswitches(self) -> tuple[PciDevice, ...]:
        """The switches of NVIDIA's NVLink fabric."""
        return tuple(device for device in self.devices if device.is_nvswitch)

    @cached_property
    def persisted(self) -> tuple[PersistedBinding, ...]:
        """The bindings in vfiomgr's rules, sorted by address."""
        texts = [file.text for file in self.files if file.path.startswith(RULES)]
        found = [binding for binding in map(parse_rule, texts) if binding is not None]
        return tuple(sorted(found, key=lambda binding: binding.address))

    @cached_property
    def driverctl_overrides(self) -> tuple[DriverctlOverride, ...]:
        """The overrides of driverctl, sorted by address."""
        files = [file for file in self.files if file.path.startswith(DRIVERCTL)]
        found = [entry for entry in map(parse_driverctl, files) if entry is not None]
        return tuple(sorted(found, key=lambda entry: entry.address))

    @property
    def defined(self) -> DefinitionFacts:
        """Definitions of vGPUs; empty if not read."""
        return self.definitions or DefinitionFacts()

    @property
    def vgpu_definitions(self) -> tuple[VgpuDefinition, ...]:
        """The defined mediated devices, by parent and UUID."""
        return self.defined.vgpus

    @property
    def vgpu_definition_problems(self) -> tuple[DefinitionProblem, ...]:
        """Invalid definition files of vGPUs."""
        return self.defined.problems

    def in_persistence_mode(self, address: PciAddress) -> bool | None:
        """Whether a GPU is in NVIDIA's persistence mode; None if unknown."""
        uses = self.host_uses or ()
        if any((use.address, use.kind) == (address, "persistence-mode") for use in uses):
            return True
        return None if self.host_uses is None or self.users is None else False

    def binding(self, address: PciAddress) -> PersistedBinding | None:
        """The binding in vfiomgr's rule for an address."""
        return next((b for b in self.persisted if b.address == address), None)

    def file(self, path: str) -> str | None:
        """The text of a file of vfiomgr."""
        return next((file.text for file in self.files if file.path == path), None)

    def access(self, path: str) -> NodeAccess | None:
        """Owner and mode of a node of VFIO."""
        return self._access_by_node.get(path)

    @cached_property
    def _access_by_node(self) -> dict[str, NodeAccess]:
        return {node.path: node.access for node in self.nodes}

    @cached_property
    def _by_name(self) -> dict[str, PciDevice]:
        return {str(device.address): device for device in self.devices}

    @cached_property
    def _by_slot(self) -> dict[tuple[int, int, int], tuple[PciDevice, ...]]:
        return _gathered((device.address.slot, device) for device in self.devices)

    @cached_property
    def _by_bus(self) -> dict[tuple[int, int], tuple[PciDevice, ...]]:
        return _gathered(((d.address.domain, d.address.bus), d) for d in self.devices)

    @cached_property
    def _by_group(self) -> dict[int | None, tuple[PciDevice, ...]]:
        return _gathered((device.iommu_group, device) for device in self.devices)

    @cached_property
    def _vgpus_by_parent(self) -> dict[str, tuple[Vgpu, ...]]:
        return _gathered((vgpu.parent, vgpu) for vgpu in self.vgpus)

    @cached_property
    def _vgpus_by_name(self) -> dict[str, Vgpu]:
        return {vgpu.name: vgpu for vgpu in reversed(self.vgpus)}

    @cached_property
    def _vendor_functions(self) -> frozenset[str]:
        return frozenset(p.name for p in self.vgpu_parents if p.family == "vendor-vfio")

    @cached_property
    def parent_names(self) -> frozenset[str]:
        """The names of the devices on which vGPUs can be created."""
        return frozenset(parent.name for parent in self.vgpu_parents)

    @cached_property
    def _types_by_gpu(self) -> dict[str, tuple[VgpuType, ...]]:
        return _gathered(
            (parent.gpu, kind) for parent in self.vgpu_parents for kind in parent.types
        )

    @cached_property
    def _carriers(self) -> frozenset[str]:
        """The functions on which vGPUs are, and the GPUs of these."""
        parents = {vgpu.parent for vgpu in self.vgpus}
        return frozenset({*parents, *(p.gpu for p in self.vgpu_parents if p.name in parents)})

    @cached_property
    def _held_nodes(self) -> frozenset[str]:
        return frozenset(user.node for user in self.users or ())

    @cached_property
    def _groups_by_number(self) -> dict[int, IommuGroup]:
        return {group.number: group for group in self.groups}

    @cached_property
    def _origins_by_address(self) -> dict[PciAddress, tuple[OriginalState, ...]]:
        return _gathered((origin.device.address, origin) for origin in self.origins)

    def device_named(self, name: str) -> PciDevice | None:
        """The function with this name in sysfs; None for other members of groups."""
        return self._by_name.get(name)

    def device(self, address: PciAddress) -> PciDevice:
        """The function at an address.

        Raises:
            UnknownDevice: there is none.

        """
        try:
            return self._by_address[address]
        except KeyError:
            raise unknown_device(self, address) from None

    def slot(self, device: PciDevice) -> tuple[PciDevice, ...]:
        """The functions that are passed through together, no bridges; a virtual one is alone."""
        if device.physical_function is not None:
            return (device,)
        return tuple(
            other
            for other in self._by_slot.get(device.address.slot, ())
            if other.physical_function is None and (other is device or not other.is_bridge)
        )

    def beside(self, device: PciDevice) -> tuple[PciDevice, ...]:
        """The other functions of its bus."""
        bus = self._by_bus.get((device.address.domain, device.address.bus), ())
        return tuple(other for other in bus if other is not device)

    def group_members(self, number: int | None) -> tuple[PciDevice, ...]:
        """The PCI functions of an IOMMU group."""
        if number is None:
            return ()
        return self._by_group.get(number, ())

    def is_viable(self, number: int) -> bool:
        """Whether an IOMMU group can be passed through now: no member is on a host driver."""
        return not blockers(self.group_members(number))

    @property
    def knows_variants(self) -> bool:
        """Whether the variant drivers of VFIO are known, from modules.dep and modules.alias."""
        built = {name for name in self.vfio_modules or () if is_variant_module(name)}
        listed = {variant.module.replace("-", "_") for variant in self.variants}
        return self.vfio_modules is not None and (not built or not built.isdisjoint(listed))

    def origin(self, device: PciDevice) -> OriginalState | None:
        """The original state of this device in this boot, if it was recorded."""
        boot_id = self.kernel.boot_id or ""
        for origin in self._origins_by_address.get(device.address, ()):
            if origin.device.is_same_as(device.identity) and origin.boot_id == boot_id:
                return origin
        return None

    def resets_of(self, device: PciDevice) -> ResetCapabilities | None:
        """The reset capabilities of the function, if they were readable."""
        known = self.reset_capabilities or ()
        return next((found for found in known if found.address == device.address), None)

    @cached_property
    def _vectors_by_address(self) -> dict[PciAddress, int]:
        return {each.address: each.count for each in self.msix}

    def vectors_of(self, address: PciAddress) -> int | None:
        """The MSI-X vectors of a virtual function, if their number can be set and is known."""
        return self._vectors_by_address.get(address)

    def translation_of(self, device: PciDevice) -> Translation | None:
        """ATS and PASID of a function, if they were readable and it has one of them.

        Virtual functions use the PASID of their physical function (pci_enable_pasid in
        drivers/pci/ats.c).
        """
        known = {each.address: each for each in self.translations or ()}
        own = known.get(device.address)
        physical = device.physical_function
        shared = known.get(physical) if physical is not None else None
        if shared is None or shared.pasid == "absent":
            return own
        ats = "absent" if own is None else own.ats
        return replace(shared, address=device.address, ats=ats)

    def vgpus_of(self, parent: str) -> tuple[Vgpu, ...]:
        """The active vGPUs of a parent, by its name."""
        return self._vgpus_by_parent.get(parent, ())

    def types_of_gpu(self, gpu: str) -> tuple[VgpuType, ...]:
        """The types of vGPUs of a GPU, once for each place where they are made."""
        return self._types_by_gpu.get(gpu, ())

    def state_of(self, device: PciDevice) -> DeviceState:
        """What a function is used for now."""
        if str(device.address) in self._carriers:
            return "vgpu"
        if device.driver is None:
            return "no-driver"
        if not device.is_on_vfio:
            return "host"
        return "vfio" if self._held_nodes.isdisjoint(self.guest_nodes(device)) else "in-use"

    def is_vendor_function(self, device: PciDevice) -> bool:
        """Whether a function goes to guests from the vendor's own driver, as a vGPU."""
        return str(device.address) in self._vendor_functions

    def makes_vgpus(self, device: PciDevice) -> bool:
        """Whether the driver of a virtual function turns it into a vGPU for guests.

        On a VFIO driver, such a function has no memory of its GPU and is useless for guests.
        """
        if device.physical_function is None or device.is_on_vfio:
            return False
        name = str(device.address)
        return any(p.name == name and p.family != "sriov-vf" for p in self.vgpu_parents)

    def is_ready_for_guests(self, device: PciDevice) -> bool:
        """Whether a guest can open a function: it is on VFIO, or a vGPU of the vendor's driver."""
        if self.is_vendor_function(device):
            return self.vgpu(str(device.address)) is not None
        return device.is_on_vfio

    def vgpu(self, uuid: str) -> Vgpu | None:
        """The active vGPU with this UUID, or on the virtual function with this address."""
        return self._vgpus_by_name.get(uuid.lower())

    def is_own(self, vgpu: Vgpu) -> bool:
        """Whether vfiomgr created it; False for a virtual function that was recreated since."""
        if vgpu.uuid is None and vgpu.name not in self.made_functions:
            return False
        file, text = mark_file(vgpu), mark_of(vgpu)
        return any((mark.path, mark.text) == (file, text) for mark in self.vgpu_marks)

    def gpu_mode(self, device: PciDevice) -> GpuMode | None:
        """How a GPU divides its memory, if its driver was asked and answered."""
        name = str(device.address)
        return next((mode for mode in self.gpu_modes if mode.gpu == name), None)

    def partition(self, gpu: str) -> GpuPartition | None:
        """The partitions of a GPU in MIG mode, if nvidia-smi was asked and answered."""
        return next((known for known in self.gpu_partitions if known.gpu == gpu), None)

    def quotas_of(self, device: PciDevice) -> GpuQuotas | None:
        """The quotas of a GPU's virtual functions."""
        name = str(device.address)
        return next((found for found in self.quotas if found.gpu == name), None)

    def virtual_functions(self, physical: DeviceIdentity) -> list[PciDevice]:
        """The existing virtual functions of a physical function, in order."""
        device = self.device_named(str(physical.address))
        names = map(str, device.virtual_functions if device is not None else ())
        return [function for name in names if (function := self.device_named(name)) is not None]

    def function_quotas(self, device: PciDevice) -> FunctionQuotas | None:
        """The share of a virtual function in its GPU."""
        physical = self.device_named(str(device.physical_function))
        known = self.quotas_of(physical) if physical is not None else None
        if physical is None or known is None or device.address not in physical.virtual_functions:
            return None
        return known.function(physical.virtual_functions.index(device.address) + 1)

    def group(self, number: int | None) -> IommuGroup | None:
        """The IOMMU group with this number."""
        return None if number is None else self._groups_by_number.get(number)

    def guest_nodes(self, holder: Holder) -> frozenset[str]:
        """The nodes through which a guest opens a function or a vGPU: its group, its cdev."""
        nodes: set[str] = set()
        group = self.group(holder.iommu_group)
        if group is not None and (
            not isinstance(holder, PciDevice)
            or holder.is_for_guests
            or holder.is_stuck_without_driver
        ):
            nodes.add(group.node)
        if holder.vfio_device is not None:
            nodes.add(VFIO_CDEVS / holder.vfio_device)
        return frozenset(nodes)

    def existing_nodes(self, device: PciDevice) -> tuple[str, ...]:
        """The nodes of a function on a VFIO driver: that of its group, and its cdev.

        A kernel without CONFIG_VFIO_GROUP has only the cdev. If the snapshot has neither, it is
        that of the group, which most kernels have.
        """
        group = self.group(device.iommu_group)
        cdev = VFIO_CDEVS / device.vfio_device if device.vfio_cdev and device.vfio_device else None
        if group is None:
            return () if cdev is None else (cdev,)
        nodes = (group.node,) if group.has_node or cdev is None else ()
        return nodes if cdev is None else (*nodes, cdev)

    def holders(self, holder: Holder) -> tuple[DeviceUser, ...]:
        """The processes that have a function or a vGPU open, on the host or in a guest."""
        if not isinstance(holder, PciDevice):
            return self.users_of(self.guest_nodes(holder))
        nodes = frozenset(holder.nodes) | self.guest_nodes(holder)
        return (*self.users_of(nodes), *self.users_below(holder))

    @property
    def running_agent(self) -> NodeStatus | None:
        """The agent, unless `agent` is what the kubelet's record says."""
        return self.agent if self.agent is not None and self.agent.pid else None

    def pod_of(self, holder: Holder) -> str | None:
        """The pod, NAMESPACE/NAME, that the kubelet gave a function or a vGPU to."""
        return None if self.agent is None else self.agent.pods.get(_given_name(holder))

    def claim_of(self, holder: Holder) -> str | None:
        """The ResourceClaim, NAMESPACE/NAME, that has a function or a vGPU."""
        return None if self.agent is None else self.agent.claimed.get(_given_name(holder))

    def allocated_ago(self, holder: Holder) -> float | None:
        """Seconds since the kubelet gave it to a pod, until the kubelet names the pod."""
        return None if self.agent is None else self.agent.allocated.get(_given_name(holder))

    def unknown_users_of(self, holder: Holder) -> tuple[UnknownUsers, ...]:
        """The unreadable sources that could name a user of a function or a vGPU."""
        return tuple(each for each in self.unknown_users if self._may_name(each, holder))

    def knows_users_of(self, holder: Holder) -> bool:
        """Whether all sources that could name a user of a function or a vGPU were read."""
        return self.users is not None and not self.unknown_users_of(holder)

    def _may_name(self, unknown: UnknownUsers, holder: Holder) -> bool:
        if not isinstance(holder, PciDevice):
            return unknown.kind in ("pods", "open-files")
        is_for_guest = bool(self.guest_nodes(holder)) or self.is_vendor_function(holder)
        is_network = holder.class_code.startswith(_CLASS_NETWORK) and not holder.is_on_vfio
        concerned = {
            "pods": is_for_guest,
            "processes": bool(holder.nodes),
            "open-files": bool(holder.nodes) or is_for_guest,
            "network": is_network,
        }
        return holder.address in unknown.functions or concerned.get(unknown.kind, False)

    def users_below(self, device: PciDevice) -> tuple[DeviceUser, ...]:
        """The processes that have a disk of a function open."""
        return tuple(user for user in self.users or () if device.address in user.functions)

    def users_of(self, nodes: frozenset[str]) -> tuple[DeviceUser, ...]:
        """The processes that have one of the nodes open."""
        return tuple(user for user in self.users or () if user.node in nodes)


def _given_name(holder: Holder) -> str:
    """The name of a function or a vGPU in answers of the node agent."""
    return str(holder.address) if isinstance(holder, PciDevice) else holder.name


def _gathered(pairs: Iterable[tuple[_Key, _Value]]) -> dict[_Key, tuple[_Value, ...]]:
    """Values by key, in the order of their occurrence."""
    found: dict[_Key, list[_Value]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return {key: tuple(values) for key, values in found.items()}
