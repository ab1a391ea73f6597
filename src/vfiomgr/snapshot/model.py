"""All that a decision about a host needs, as one value."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Literal, TypeVar

from msgspec import field

from vfiomgr.check.model import Readiness
from vfiomgr.containers.cdi.model import CdiFile
from vfiomgr.definitions.model.kept import DefinitionFacts, DefinitionProblem
from vfiomgr.documents.text_file import TextFile
from vfiomgr.errors import UnknownDevice, UsageError
from vfiomgr.host.accounts import NodeAccess
from vfiomgr.paths import VFIO_CDEVS
from vfiomgr.pci.iommu import IommuGroup, IommuState, VfioState, blockers
from vfiomgr.pci.links import PciLink
from vfiomgr.pci.model import DeviceIdentity, PciAddress, PciDevice, identifiers_in
from vfiomgr.pci.numa import HostTopology
from vfiomgr.pci.original_state import OriginalState
from vfiomgr.pci.reset_capabilities import ResetCapabilities
from vfiomgr.pci.vfio_drivers import VfioVariant
from vfiomgr.persistence.model import (
    DRIVERCTL,
    RULES,
    DriverctlOverride,
    Initramfs,
    PersistedBinding,
    parse_driverctl,
    parse_rule,
)
from vfiomgr.value import Value
from vfiomgr.vgpu.mig.model import GpuPartition
from vfiomgr.vgpu.model import GpuMode, Vgpu, VgpuParent, WedgedFunction, mark_file, mark_of
from vfiomgr.vgpu.quota.model import FunctionQuotas, GpuQuotas

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vfiomgr.definitions.model.vgpu import VgpuDefinition
    from vfiomgr.vgpu.model import VgpuType

UNIDENTIFIED = "there is neither a modalias nor vendor, device and class"
"""Why a function is left out: nothing shows what it is."""
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


DeviceState = Literal["host", "vfio", "in-use", "vgpu", "no-driver"]
"""What a function is used for: by a driver of the host, by VFIO without a guest, by a guest that
has it open, as the carrier of active vGPUs, or by no driver."""


class DeviceUser(Value):
    """A process that has a device node open."""

    node: str
    pid: int
    command: str
    unit: str | None = None
    """The unit of systemd that it runs in: `gdm.service`, `machine-qemu-3-win.scope`."""
    functions: tuple[PciAddress, ...] = ()
    """The PCI functions below the node, where the node is not one of their own: block devices."""
    guest: str | None = None
    """What QEMU was told to call its guest: the domain of libvirt, the sandbox of Kata."""
    pod: str | None = None
    """The pod of such a sandbox, `namespace/name`, where its runtime keeps it."""

    def __str__(self) -> str:
        """`guest win (qemu-system-x86, PID 4711, machine-qemu-3-win.scope)`, or `bash (PID 7)`."""
        place = f"PID {self.pid}{f', {self.unit}' if self.unit else ''}"
        if self.pod:
            return f"pod {self.pod} ({self.command}, {place})"
        if self.guest:
            return f"guest {self.guest} ({self.command}, {place})"
        return f"{self.command} ({place})"


class HostUse(Value):
    """Something of the host itself that would break without the function."""

    address: PciAddress
    kind: Literal["mounted-disk", "default-route", "network", "persistence-mode"]
    what: str
    lift: str = ""
    """The command that ends this use; empty where none is known."""


class NodeFact(Value):
    """A node of VFIO and who may open it."""

    path: str
    access: NodeAccess


class HostSnapshot(Value, dict=True):
    """The facts of a host at one moment; devices, groups and vGPUs sorted by number."""

    kernel_release: str | None
    kernel_command_line: str | None
    boot_id: str | None
    cpu_vendor: str | None
    iommu: IommuState
    pci_drivers: tuple[str, ...]
    devices: tuple[PciDevice, ...]
    groups: tuple[IommuGroup, ...]
    vgpu_parents: tuple[VgpuParent, ...]
    vgpus: tuple[Vgpu, ...]
    origins: tuple[OriginalState, ...] = ()
    host_uses: tuple[HostUse, ...] | None = ()
    """None where the tree has no /proc to tell, as recordings have not."""
    users: tuple[DeviceUser, ...] | None = None
    """Open device nodes; None where nobody looked (it takes a walk through /proc, as root)."""
    vfio: VfioState = field(default_factory=VfioState)
    variants: tuple[VfioVariant, ...] = ()
    """Variant drivers of VFIO that this kernel has; read together with the users."""
    readiness: Readiness | None = None
    """What `vfiomgr check` judges; None where nobody asked for it."""
    reset_capabilities: tuple[ResetCapabilities, ...] | None = None
    """What configuration spaces say of resets; None where nobody looked (as root)."""
    files: tuple[TextFile, ...] = ()
    """The files that vfiomgr keeps below /etc, and those of driverctl."""
    nodes: tuple[NodeFact, ...] = ()
    initramfs: Initramfs | None = None
    """None where none of the tools is there that vfiomgr knows."""
    has_systemd: bool = False
    gpu_modes: tuple[GpuMode, ...] = ()
    """How GPUs divide their memory, where nvidia-smi was asked."""
    vgpu_marks: tuple[TextFile, ...] = ()
    """What vfiomgr wrote down of the vGPUs that it made in this boot."""
    made_functions: tuple[str, ...] = ()
    """Virtual functions that have the type which vfiomgr gave to them, and not a later one."""
    wedged: tuple[WedgedFunction, ...] = ()
    """Virtual functions that become no vGPU until all of their GPU are made anew."""
    has_sriov_manage: bool = False
    """Whether NVIDIA's program that makes virtual functions is installed."""
    vfio_modules: tuple[str, ...] | None = None
    """Modules with `vfio` in their names that this kernel has; read together with the users.

    None where its lists are not there.
    """
    pci_unlisted: str | None = None
    """Why its PCI functions could not be looked for; None where they could."""
    pci_unidentified: tuple[str, ...] = ()
    """Addresses of functions that are left out, since nothing shows what they are."""
    definitions: DefinitionFacts | None = None
    """What is kept of vGPUs that are to be; None where nobody looked."""
    gpu_partitions: tuple[GpuPartition, ...] = ()
    """How GPUs in MIG mode are divided, where nvidia-smi was asked."""
    quotas: tuple[GpuQuotas, ...] = ()
    """Of GPUs whose drivers share them out among plain virtual functions."""
    topology: HostTopology | None = None
    """NUMA nodes and processors; None where nobody looked."""
    cpu_address_bits: int | None = None
    """Width of the physical addresses of an x86 CPU; others do not tell."""
    cdi_files: tuple[CdiFile, ...] = ()
    """CDI specifications, whoever wrote them."""
    architecture: str | None = None
    """Of the CPU, as libvirt names it: `x86_64`, `aarch64`; None where nothing tells."""
    links: tuple[PciLink, ...] | None = None
    """Links of PCI Express; None where nobody looked."""

    @cached_property
    def _by_address(self) -> dict[PciAddress, PciDevice]:
        return {device.address: device for device in self.devices}

    @cached_property
    def persisted(self) -> tuple[PersistedBinding, ...]:
        """What vfiomgr's rules say, sorted by address."""
        texts = [file.text for file in self.files if file.path.startswith(RULES)]
        found = [binding for binding in map(parse_rule, texts) if binding is not None]
        return tuple(sorted(found, key=lambda binding: binding.address))

    @cached_property
    def driverctl_overrides(self) -> tuple[DriverctlOverride, ...]:
        """What driverctl keeps, sorted by address."""
        files = [file for file in self.files if file.path.startswith(DRIVERCTL)]
        found = [entry for entry in map(parse_driverctl, files) if entry is not None]
        return tuple(sorted(found, key=lambda entry: entry.address))

    @property
    def defined(self) -> DefinitionFacts:
        """What is kept of vGPUs that are to be; nothing where nobody looked."""
        return self.definitions or DefinitionFacts()

    @property
    def vgpu_definitions(self) -> tuple[VgpuDefinition, ...]:
        """The mediated devices that are defined, by parent and UUID."""
        return self.defined.vgpus

    @property
    def vgpu_definition_problems(self) -> tuple[DefinitionProblem, ...]:
        """Files that should define vGPUs, and do not."""
        return self.defined.problems

    def in_persistence_mode(self, address: PciAddress) -> bool | None:
        """Whether NVIDIA's driver keeps a GPU initialised; None where nobody asked it."""
        uses = self.host_uses or ()
        if any((use.address, use.kind) == (address, "persistence-mode") for use in uses):
            return True
        return None if self.host_uses is None or self.users is None else False

    def binding(self, address: PciAddress) -> PersistedBinding | None:
        """What vfiomgr's rule says about an address."""
        return next((b for b in self.persisted if b.address == address), None)

    def file(self, path: str) -> str | None:
        """The text of a file that vfiomgr keeps."""
        return next((file.text for file in self.files if file.path == path), None)

    def access(self, path: str) -> NodeAccess | None:
        """Who may open a node of VFIO."""
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
        """The function that sysfs calls so; other members of groups are none."""
        return self._by_name.get(name)

    def device(self, address: PciAddress) -> PciDevice:
        """The function at an address.

        Raises:
            UnknownDevice: there is none.

        """
        try:
            return self._by_address[address]
        except KeyError:
            if str(address) in self.pci_unidentified:
                message = f"cannot identify {address}: {UNIDENTIFIED}"
                hint = "record these files of it too, or look at it on the host: lspci -vv"
                raise UnknownDevice(message, hint) from None
            message = f"this host has no PCI device {address}"
            near = " or ".join(str(other) for other in self._near(address))
            meant = f"is {near} meant? " if near else ""
            hint = f"{meant}vfiomgr list --all shows the devices it has"
            raise UnknownDevice(message, hint) from None

    def _near(self, address: PciAddress) -> list[PciAddress]:
        """Functions of other domains at the same place; else the first one of the same slot."""
        place = (address.bus, address.device, address.function)
        same = [a for a in self._by_address if (a.bus, a.device, a.function) == place]
        return same or [device.address for device in self._by_slot.get(address.slot, ())[:1]]

    def parse_address(self, text: str) -> PciAddress:
        """Read an address as a user types it; the domain may be left out where it is plain.

        PCI IDs such as `10de:2235` are read too, where one function has them.

        Raises:
            UsageError: it is no address, or names several functions.

        """
        if identifiers_in(text) is None:
            return PciAddress.parse(text, self._by_address)
        first, *others = self.with_identifiers(text)
        if others:
            message = f"{text} is ambiguous: it names {', '.join(map(str, (first, *others)))}"
            raise UsageError(message, "give the address of one of them")
        return first

    def with_identifiers(self, text: str) -> tuple[PciAddress, ...]:
        """The functions with the PCI IDs `text`, such as `10de:2235`; at least one.

        Raises:
            UnknownDevice: there is none.

        """
        wanted = identifiers_in(text)
        found = tuple(d.address for d in self.devices if (d.vendor_id, d.device_id) == wanted)
        if not found:
            message = f"no such PCI device: {text}"
            raise UnknownDevice(message, "vfiomgr list --all lists the devices of this host")
        return found

    def matching(self, text: str) -> PciAddress:
        """The function whose name contains `text`, such as `A40`; virtual ones do not count.

        Raises:
            UsageError: there is none, or there are several.

        """
        low = text.lower()
        found = [d for d in self.devices if low in d.name.lower() and not d.physical_function]
        if not found:
            message = f"no PCI device has a name like {text!r}"
            raise UnknownDevice(message, "vfiomgr list --all lists the names of all devices")
        if len(found) > 1:
            named = ", ".join(f"{d.address} ({d.name})" for d in found)
            message = f"{text!r} is ambiguous: it matches {named}"
            raise UsageError(message, "give the address of one of them")
        return found[0].address

    def slot(self, device: PciDevice) -> tuple[PciDevice, ...]:
        """The functions that go to a guest together: no bridges; a virtual function goes alone."""
        if device.physical_function is not None:
            return (device,)
        return tuple(
            other
            for other in self._by_slot.get(device.address.slot, ())
            if other.physical_function is None and (other is device or not other.is_bridge)
        )

    def group_members(self, number: int | None) -> tuple[PciDevice, ...]:
        """The PCI functions of an IOMMU group."""
        if number is None:
            return ()
        return self._by_group.get(number, ())

    def is_viable(self, number: int) -> bool:
        """Whether a guest could own an IOMMU group now: nothing in it is on a host driver."""
        return not blockers(self.group_members(number))

    def origin(self, device: PciDevice) -> OriginalState | None:
        """The first state of this very device in this very boot, where it was recorded."""
        for origin in self._origins_by_address.get(device.address, ()):
            if origin.device.is_same_as(device.identity) and origin.boot_id == (self.boot_id or ""):
                return origin
        return None

    def resets_of(self, device: PciDevice) -> ResetCapabilities | None:
        """What the function's configuration space says of resets, where it could be read."""
        known = self.reset_capabilities or ()
        return next((found for found in known if found.address == device.address), None)

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
        """Whether the driver of a virtual function makes a vGPU of it, which then goes to a guest.

        On a VFIO driver such a function has no memory of its GPU, and no guest can use it.
        """
        if device.physical_function is None or device.is_on_vfio:
            return False
        name = str(device.address)
        return any(p.name == name and p.family != "sriov-vf" for p in self.vgpu_parents)

    def is_ready_for_guests(self, device: PciDevice) -> bool:
        """Whether a guest can open a function: on VFIO, or made a vGPU by the vendor's driver."""
        if self.is_vendor_function(device):
            return self.vgpu(str(device.address)) is not None
        return device.is_on_vfio

    def vgpu(self, uuid: str) -> Vgpu | None:
        """The active vGPU with this UUID, or on the virtual function with this address."""
        return self._vgpus_by_name.get(uuid.lower())

    def is_own(self, vgpu: Vgpu) -> bool:
        """Whether vfiomgr made it; of a virtual function that came anew since, it did not."""
        if vgpu.uuid is None and vgpu.name not in self.made_functions:
            return False
        file, text = mark_file(vgpu), mark_of(vgpu)
        return any((mark.path, mark.text) == (file, text) for mark in self.vgpu_marks)

    def gpu_mode(self, device: PciDevice) -> GpuMode | None:
        """How a GPU divides its memory, where somebody asked and its driver answered."""
        name = str(device.address)
        return next((mode for mode in self.gpu_modes if mode.gpu == name), None)

    def partition(self, gpu: str) -> GpuPartition | None:
        """How a GPU in MIG mode is divided, where nvidia-smi was asked and told."""
        return next((known for known in self.gpu_partitions if known.gpu == gpu), None)

    def quotas_of(self, device: PciDevice) -> GpuQuotas | None:
        """How a GPU is shared out among its virtual functions."""
        name = str(device.address)
        return next((found for found in self.quotas if found.gpu == name), None)

    def virtual_functions(self, physical: DeviceIdentity) -> list[PciDevice]:
        """The virtual functions of a physical one that are there, in their order."""
        device = self.device_named(str(physical.address))
        names = map(str, device.virtual_functions if device is not None else ())
        return [function for name in names if (function := self.device_named(name)) is not None]

    def function_quotas(self, device: PciDevice) -> FunctionQuotas | None:
        """What a virtual function gets of its GPU."""
        physical = self.device_named(str(device.physical_function))
        known = self.quotas_of(physical) if physical is not None else None
        if physical is None or known is None or device.address not in physical.virtual_functions:
            return None
        return known.function(physical.virtual_functions.index(device.address) + 1)

    def group(self, number: int | None) -> IommuGroup | None:
        """The IOMMU group of a number."""
        return None if number is None else self._groups_by_number.get(number)

    def guest_nodes(self, holder: PciDevice | Vgpu) -> frozenset[str]:
        """The nodes through which a guest holds a function or a vGPU: its group, its cdev."""
        nodes: set[str] = set()
        group = self.group(holder.iommu_group)
        if group is not None and (not isinstance(holder, PciDevice) or holder.is_for_guests):
            nodes.add(group.node)
        if holder.vfio_device is not None:
            nodes.add(VFIO_CDEVS / holder.vfio_device)
        return frozenset(nodes)

    def holders(self, holder: PciDevice | Vgpu) -> tuple[DeviceUser, ...]:
        """The processes that have a function or a vGPU open, on the host or for a guest."""
        if not isinstance(holder, PciDevice):
            return self.users_of(self.guest_nodes(holder))
        nodes = frozenset(holder.nodes) | self.guest_nodes(holder)
        return (*self.users_of(nodes), *self.users_below(holder))

    def users_below(self, device: PciDevice) -> tuple[DeviceUser, ...]:
        """The processes that have a disk of a function open."""
        return tuple(user for user in self.users or () if device.address in user.functions)

    def users_of(self, nodes: frozenset[str]) -> tuple[DeviceUser, ...]:
        """The processes that have one of the nodes open."""
        return tuple(user for user in self.users or () if user.node in nodes)


def _gathered(pairs: Iterable[tuple[_Key, _Value]]) -> dict[_Key, tuple[_Value, ...]]:
    """Values by key, in the order in which they came."""
    found: dict[_Key, list[_Value]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return {key: tuple(values) for key, values in found.items()}
