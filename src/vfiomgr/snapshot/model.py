"""All facts that a decision about a host needs, as one value, with its lookups."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec.structs import replace

from vfiomgr.definitions.model import DefinitionFacts
from vfiomgr.paths import VFIO_CDEVS
from vfiomgr.pci.drivers import is_variant_module
from vfiomgr.pci.iommu import IommuGroup, blockers
from vfiomgr.pci.model import DeviceIdentity, PciAddress, PciDevice, is_vfio_driver
from vfiomgr.pci.slots import is_integrated, one_device
from vfiomgr.snapshot.named import unknown_device
from vfiomgr.snapshot.values import DeviceState, Holder, HostFacts
from vfiomgr.value import values_by_key

if TYPE_CHECKING:
    from collections.abc import Callable

    from vfiomgr.pci.capabilities import PciLink, ResetCapabilities, Translation
    from vfiomgr.pci.drivers import OriginalState
    from vfiomgr.users.model import DeviceUser, UnknownUsers
    from vfiomgr.vgpu.quota.model import FunctionQuotas

_CLASS_NETWORK = "02"
_CLASS_USB = "0c03"
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

    @property
    def defined(self) -> DefinitionFacts:
        """Definitions of vGPUs; empty if not read."""
        return self.definitions or DefinitionFacts()

    @cached_property
    def _by_name(self) -> dict[str, PciDevice]:
        return {str(device.address): device for device in self.devices}

    @cached_property
    def _by_slot(self) -> dict[tuple[int, int, int], tuple[PciDevice, ...]]:
        return values_by_key((device.address.slot, device) for device in self.devices)

    @cached_property
    def _by_bus(self) -> dict[tuple[int, int], tuple[PciDevice, ...]]:
        return values_by_key(((d.address.domain, d.address.bus), d) for d in self.devices)

    @cached_property
    def _by_group(self) -> dict[int | None, tuple[PciDevice, ...]]:
        return values_by_key((device.iommu_group, device) for device in self.devices)

    @cached_property
    def _groups_by_number(self) -> dict[int, IommuGroup]:
        return {group.number: group for group in self.groups}

    @cached_property
    def _origins_by_address(self) -> dict[PciAddress, tuple[OriginalState, ...]]:
        return values_by_key((origin.device.address, origin) for origin in self.origins)

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
        """The functions of its slot that are passed through with it (see `one_device`)."""
        return one_device(device, self._by_slot.get(device.address.slot, ()))

    def removed_first(self, device: PciDevice) -> PciAddress | None:
        """Function 0 of a card that was removed without this one; a guest may have it alone.

        The kernel finds no other function of a slot without it (pci_scan_slot in probe.c).
        """
        domain, bus, number = device.address.slot
        first = PciAddress(domain, bus, number, 0)
        is_seen = first in self._by_address or str(first) in self.pci_unidentified
        is_alone = is_seen or device.physical_function is not None or device.is_on_root_bus
        return None if is_alone or self.kernel.runs_on == "guest" else first

    def awaits_probe(self, device: PciDevice) -> bool:
        """Whether it has no driver, and a driver_override for a registered driver of the host."""
        name = device.driver_override or ""
        return device.driver is None and name in self.pci_drivers and not is_vfio_driver(name)

    def is_integrated(self, device: PciDevice) -> bool:
        """Whether it belongs to the chipset or the CPU, and has no slot to be moved from."""
        return is_integrated(device, self._by_slot.get(device.address.slot, ()))

    def controller_of(self, device: PciDevice) -> PciDevice | None:
        """The function whose driver made the PCI domain of a device, such as Intel's VMD.

        All DMA behind it has its requester ID (pci_real_dma_dev in arch/x86/pci/common.c), and
        without its driver the domain does not exist (vmd_remove in pci/controller/vmd.c).
        """
        above = (self._by_name.get(part) for part in reversed(device.bridge_path.split("/")))
        return next((one for one in above if one is not None and not one.is_bridge), None)

    def behind(self, device: PciDevice) -> tuple[PciDevice, ...]:
        """The functions of the PCI domain that the driver of a device made."""
        return self._by_controller.get(device.address, ())

    @cached_property
    def _by_controller(self) -> dict[PciAddress | None, tuple[PciDevice, ...]]:
        pairs = ((self.controller_of(device), device) for device in self.devices)
        return values_by_key((above.address, device) for above, device in pairs if above)

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
    def _links_by_address(self) -> dict[PciAddress, PciLink]:
        return {link.address: link for link in self.links or ()}

    def link_of(self, address: PciAddress) -> PciLink | None:
        """The link of a function that is awake, if it was read and the function has one."""
        return self._links_by_address.get(address)

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

    def state_of(self, device: PciDevice) -> DeviceState:
        """What a function is used for now."""
        if str(device.address) in self.vgpus.carriers:
            return "vgpu"
        if device.driver is None:
            return "no-driver"
        if not device.is_on_vfio:
            return "host"
        return "vfio" if self.users.open_nodes.isdisjoint(self.guest_nodes(device)) else "in-use"

    def virtual_functions(self, physical: DeviceIdentity) -> list[PciDevice]:
        """The existing virtual functions of a physical function, in order."""
        device = self.device_named(str(physical.address))
        names = map(str, device.virtual_functions if device is not None else ())
        return [function for name in names if (function := self.device_named(name)) is not None]

    def function_quotas(self, device: PciDevice) -> FunctionQuotas | None:
        """The share of a virtual function in its GPU."""
        physical = self.device_named(str(device.physical_function))
        known = self.vgpus.quotas_of(physical) if physical is not None else None
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
            return self.users.of_nodes(self.guest_nodes(holder))
        nodes = frozenset(holder.nodes) | self.guest_nodes(holder)
        return (*self.users.of_nodes(nodes), *self.users.below(holder.address))

    def pod_of(self, holder: Holder) -> str | None:
        """The pod, NAMESPACE/NAME, that the kubelet gave a function or a vGPU to."""
        agent = self.users.agent
        return None if agent is None else agent.pods.get(_given_name(holder))

    def claim_of(self, holder: Holder) -> str | None:
        """The ResourceClaim, NAMESPACE/NAME, that has a function or a vGPU."""
        agent = self.users.agent
        return None if agent is None else agent.claimed.get(_given_name(holder))

    def is_on_demand(self, device: PciDevice) -> bool:
        """Whether ResourceClaims bind the function, by the layout of the running agent."""
        agent = self.users.agent
        return agent is not None and str(device.address) in agent.bound_by_claims

    def allocated_ago(self, holder: Holder) -> float | None:
        """Seconds since the kubelet gave it to a pod, until the kubelet names the pod."""
        agent = self.users.agent
        return None if agent is None else agent.allocated.get(_given_name(holder))

    def unknown_users_of(self, holder: Holder) -> tuple[UnknownUsers, ...]:
        """The unreadable sources that could name a user of a function or a vGPU."""
        return tuple(each for each in self.users.unknown if self._may_name(each, holder))

    def knows_users_of(self, holder: Holder) -> bool:
        """Whether all sources that could name a user of a function or a vGPU were read."""
        return self.users.processes is not None and not self.unknown_users_of(holder)

    def _may_name(self, unknown: UnknownUsers, holder: Holder) -> bool:
        if not isinstance(holder, PciDevice):
            return unknown.kind in ("pods", "open-files")
        is_for_guest = bool(self.guest_nodes(holder)) or self.vgpus.is_vendor_function(holder)
        is_network = holder.class_code.startswith(_CLASS_NETWORK) and not holder.is_on_vfio
        concerned = {
            "pods": is_for_guest,
            "processes": bool(holder.nodes),
            "open-files": bool(holder.nodes) or is_for_guest,
            "network": is_network,
            "input": holder.class_code.startswith(_CLASS_USB) and not holder.is_on_vfio,
        }
        return holder.address in unknown.functions or concerned.get(unknown.kind, False)


def _given_name(holder: Holder) -> str:
    """The name of a function or a vGPU in answers of the node agent."""
    return str(holder.address) if isinstance(holder, PciDevice) else holder.name
