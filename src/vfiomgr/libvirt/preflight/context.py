"""What the rules of a preflight use: a domain, its devices on this host, and facts from libvirt."""

from __future__ import annotations

import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from msgspec import field
from msgspec.structs import replace

from vfiomgr.errors import Refusal
from vfiomgr.libvirt.hook import GuestNeeds, GuestRecord, needs_of
from vfiomgr.libvirt.model import (
    EXPANDER,
    ROOT_PORT,
    Domain,
    DomainHostdev,
    Hypervisor,
    KnownDomain,
)
from vfiomgr.libvirt.preflight.host_files import NO_FILES, LibvirtFiles
from vfiomgr.pci.model import PciAddress, PciDevice
from vfiomgr.snapshot.model import HostSnapshot
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.guests.model import GuestAddress
    from vfiomgr.libvirt.desktop import SharedMemory
    from vfiomgr.libvirt.model import DomainIommu, PciController
    from vfiomgr.libvirt.preflight.desktop_files import DesktopFiles
    from vfiomgr.units import Version
    from vfiomgr.vgpu.model import Vgpu

ROOT_BUS = 0
"""The index of pcie-root."""
SWITCH_PORT = "pcie-switch-downstream-port"
UNMANAGED = "managed='no'"
MANAGED = "managed='yes'"


class AssignedFunction(Value):
    """A PCI function of a domain, as written in the domain and as seen on the host."""

    hostdev: DomainHostdev
    device: PciDevice

    is_of_vendor: bool = False
    """Whether it is assigned to guests while on its vendor's driver."""

    @property
    def is_bound(self) -> bool:
        """Whether it is already on vfio-pci or a variant of it."""
        return self.device.is_on_vfio


class Claim(Value):
    """A libvirt domain that has or claims a device."""

    domain: KnownDomain
    running: DomainHostdev | None
    defined: DomainHostdev | None

    @property
    def is_held(self) -> bool:
        """Whether the domain has it now."""
        return self.running is not None and self.domain.is_active


Claims = Mapping[str, Sequence[Claim]]
"""Which domains have or claim which devices, by address or UUID."""


def claims_of(hypervisor: Hypervisor | None) -> Claims:
    """The claims of all domains, collected once for all checked domains."""
    found: dict[str, list[Claim]] = defaultdict(list)
    for domain in hypervisor.domains if hypervisor else ():
        for name, running, defined in domain.devices():
            found[name].append(Claim(domain, running, defined))
    return found


class PreflightContext(Value, dict=True):
    """A domain before its start."""

    host: HostSnapshot
    domain: Domain
    claims: Claims = field(default_factory=dict)
    hypervisor: Hypervisor | None = None
    """None if libvirt was not queried."""
    files: Mapping[str, bool] | None = None
    """The existing files among those that the domain names; None if not checked."""
    is_of_libvirt: bool = True
    """Whether libvirt starts the domain; false for a guest that a user starts."""
    host_files: LibvirtFiles | None = NO_FILES
    """What the rules use of libvirt's files on the host; None if they cannot be read."""
    blocked_reasons: tuple[str, ...] | None = None
    """Why QEMU of the running domain refuses a migration; None if it was not asked."""

    @property
    def desktop_files(self) -> DesktopFiles | None:
        """The files of a desktop guest; None if they are on another host, or were not read."""
        return None if self.host_files is None else self.host_files.desktop

    @cached_property
    def hostdevs(self) -> tuple[DomainHostdev, ...]:
        """The PCI functions and mediated devices of the domain, each once."""
        found = {device.name: device for device in reversed(self.domain.hostdevs) if device.name}
        return tuple(device for device in self.domain.hostdevs if device is found.get(device.name))

    @cached_property
    def functions(self) -> tuple[AssignedFunction, ...]:
        """The PCI functions of the domain that this host has."""
        found = []
        for hostdev in self.hostdevs:
            device = self.host.device_named(hostdev.name) if hostdev.kind == "pci" else None
            if device is not None:
                is_of_vendor = self.host.vgpus.is_vendor_function(device)
                found.append(AssignedFunction(hostdev, device, is_of_vendor))
        return tuple(found)

    @cached_property
    def seen(self) -> tuple[AssignedFunction, ...]:
        """The functions that the guest sees."""
        return tuple(taken for taken in self.functions if taken.hostdev.is_seen)

    @cached_property
    def seen_hostdevs(self) -> tuple[DomainHostdev, ...]:
        """The devices that the guest sees."""
        return tuple(hostdev for hostdev in self.hostdevs if hostdev.is_seen)

    @cached_property
    def waiting(self) -> tuple[AssignedFunction, ...]:
        """Functions that must be bound before a guest can use them; vGPUs of a vendor excluded."""
        return tuple(
            taken
            for taken in self.functions
            if not (taken.is_bound or taken.device.is_bridge or taken.is_of_vendor)
        )

    @cached_property
    def hook_needs(self) -> GuestNeeds:
        """What vfiomgr's hook must make available at the start, if the domain enables it."""
        if self.domain.hook is None:
            return GuestNeeds()
        functions: list[PciAddress] = []
        vgpus: list[str] = []
        for hostdev in self.hostdevs:
            alone = replace(self.domain, hostdevs=(hostdev,))
            try:
                needs = needs_of(self.host, alone, GuestRecord("", alone.name))
            except Refusal:
                continue  # an unknown vGPU, which other rules report
            functions += needs.functions
            vgpus += needs.vgpus
        return GuestNeeds(tuple(functions), tuple(vgpus), self.domain.hook)

    @cached_property
    def vgpus(self) -> tuple[tuple[DomainHostdev, Vgpu], ...]:
        """The active mediated devices of the domain."""
        pairs = ((h, self.host.vgpus.named(h.name)) for h in self.hostdevs if h.kind == "mdev")
        return tuple((hostdev, vgpu) for hostdev, vgpu in pairs if vgpu is not None)

    @cached_property
    def addresses(self) -> frozenset[PciAddress]:
        """The addresses of its PCI functions, whether the host has them or not."""
        return frozenset(h.address for h in self.domain.hostdevs if h.address is not None)

    @cached_property
    def groups(self) -> frozenset[int]:
        """The IOMMU groups of its functions."""
        numbers = (taken.device.iommu_group for taken in self.functions)
        return frozenset(number for number in numbers if number is not None)

    @property
    def takes_functions(self) -> bool:
        """Whether it has a PCI function."""
        return any(hostdev.kind == "pci" for hostdev in self.hostdevs)

    @property
    def is_session(self) -> bool:
        """Whether the libvirt of a user starts it, and not the system daemon."""
        return self.hypervisor is not None and "/session" in self.hypervisor.uri

    @property
    def libvirt(self) -> Version | None:
        """The libvirt that will start it, if known."""
        return self.hypervisor.libvirt if self.hypervisor else None

    @property
    def qemu(self) -> Version | None:
        """The QEMU that will run it, if known."""
        return self.hypervisor.qemu if self.hypervisor else None

    @property
    def known_domains(self) -> tuple[KnownDomain, ...]:
        """The domains of its libvirt; none if it was not queried."""
        return self.hypervisor.domains if self.hypervisor else ()

    def claims_of_others(self, device: str) -> list[Claim]:
        """The other domains that have or claim a device."""
        return [c for c in self.claims.get(device, ()) if not self._is_itself(c.domain)]

    @cached_property
    def itself(self) -> KnownDomain | None:
        """What libvirt reports about this domain."""
        return next(filter(self._is_itself, self.known_domains), None)

    @cached_property
    def controllers(self) -> dict[int, PciController]:
        """The PCI controllers of the guest by index, which is the bus below them."""
        return {controller.index: controller for controller in self.domain.controllers}

    @cached_property
    def times_taken(self) -> Counter[tuple[int, int, int]]:
        """How many devices use a place of the guest: bus, slot, function."""
        return Counter(map(place, self.domain.taken))

    def uses_iommufd(self, hostdev: DomainHostdev) -> bool:
        """Whether QEMU gets iommufd for a device: its own setting precedes that of the domain."""
        asked = self.domain.has_iommufd if hostdev.iommufd is None else hostdev.iommufd
        return hostdev.kind == "pci" and asked

    def model_at(self, bus: int) -> str | None:
        """The model of the controller above a bus of the guest."""
        controller = self.controllers.get(bus)
        return controller.model if controller else None

    def root_of(self, place: GuestAddress | None) -> int | None:
        """The index of the root bus or the expander that a place is behind; None if unknown."""
        for _ in range(len(self.controllers) + 1):  # controllers may form a cycle
            if place is None:
                return None
            if place.bus == ROOT_BUS or self.model_at(place.bus) == EXPANDER:
                return place.bus
            controller = self.controllers.get(place.bus)
            place = None if controller is None else controller.guest
        return None

    @cached_property
    def seen_by_root(self) -> Mapping[int | None, list[DomainHostdev]]:
        """The devices that the guest sees, by the root bus or expander that they are behind."""
        found: dict[int | None, list[DomainHostdev]] = defaultdict(list)
        for hostdev in self.seen_hostdevs:
            found[self.root_of(hostdev.guest)].append(hostdev)
        return found

    def is_single_slot(self, bus: int) -> bool:
        """Whether a bus of the guest has only slot 0: below a PCI Express port."""
        return self.model_at(bus) in (ROOT_PORT, SWITCH_PORT)

    def at(self, line: int) -> str:
        """The place in the domain: `gpu.xml:12`."""
        return f"{self.domain.source}:{line}"

    def cite(self, hostdev: DomainHostdev, *attributes: str) -> str:
        """The element as evidence: `gpu.xml:12: <hostdev> of 0000:01:00.0, managed='no'`."""
        element = f"{self.at(hostdev.line)}: <{hostdev.element}> of {hostdev.name}"
        return ", ".join((element, *attributes))

    def cite_iommu(self, iommu: DomainIommu) -> str:
        """The element as evidence: `guest.xml:12: <iommu model='smmuv3'>, pciBus='1'`."""
        bus = "" if iommu.bus is None else f", pciBus='{iommu.bus}'"
        return f"{self.at(iommu.line)}: <iommu model='{iommu.model}'>{bus}"

    def cite_shared(self, memory: SharedMemory) -> str:
        """The element as evidence: `guest.xml:12: <shmem name='looking-glass'>`."""
        return f"{self.at(memory.line)}: <shmem name='{memory.name}'>"

    def cite_memory(self) -> str:
        """The memory size of the domain, as evidence."""
        size = shown_size(self.domain.memory.total_bytes)
        return f"{self.at(self.domain.line('memory'))}: {size} of memory"

    def cite_managed(self, hostdev: DomainHostdev) -> str:
        """The element with its managed attribute."""
        if hostdev.element == "qemu:arg":
            return self.cite(hostdev)
        return self.cite(hostdev, MANAGED if hostdev.managed else UNMANAGED)

    def cite_libvirt(self) -> str:
        """The libvirt that will start the domain, as evidence."""
        return f"{self.hypervisor.uri if self.hypervisor else ''}: libvirt {self.libvirt}"

    @property
    def guest(self) -> str:
        """What messages call it."""
        return "the domain" if self.is_of_libvirt else "the guest"

    def fix(self, in_domain: str, in_arguments: str) -> str:
        """A remedy: what to write in the domain, or in the arguments of a guest without libvirt."""
        return in_domain if self.is_of_libvirt else in_arguments

    def removal(self, hostdev: DomainHostdev) -> str:
        """How to remove a device from the domain, or from the guest of another monitor."""
        if not self.is_of_libvirt:
            return f"omit {hostdev.name}"
        if hostdev.element == "qemu:arg":
            return f"remove it from <qemu:commandline> in line {hostdev.line}"
        name = shlex.quote(self.domain.name)
        if hostdev.element == "disk":
            target = shlex.quote(hostdev.disk_target or "TARGET")
            return f"virsh detach-disk {name} {target} --config"
        if self._is_known:
            return f"vfiomgr libvirt detach {name} {hostdev.name} --config"
        return f"{self.edit} --remove {hostdev.name}"

    @property
    def edit(self) -> str:
        """The command that edits the definition in libvirt, or the file."""
        place = self.domain.name if self._is_known else self.domain.source
        return f"vfiomgr libvirt edit {shlex.quote(place)}"

    def completion(self, device: PciDevice) -> str:
        """How to add all functions of a slot to the domain, as one device."""
        address, name = device.address, shlex.quote(self.domain.name)
        if not self.is_of_libvirt:
            return f"pass {address} without the option only"
        if self._is_known:
            again = f"vfiomgr libvirt attach {name} {address} --config"
            return f"vfiomgr libvirt detach {name} {address} --config, then {again}"
        source = shlex.quote(self.domain.source)
        return f"vfiomgr libvirt edit {source} --remove {address} --add {address}"

    @property
    def _is_known(self) -> bool:
        """Whether it is a domain in libvirt, and not a file."""
        known = self.itself
        versions = () if known is None else (known.defined, known.running)
        return any(one is not None and one.source == self.domain.source for one in versions)

    def _is_itself(self, other: KnownDomain) -> bool:
        """Compare by UUID if both have one: a file may be the next definition of a domain."""
        if self.domain.uuid is not None and other.uuid:
            return other.uuid.lower() == self.domain.uuid.lower()
        return other.name == self.domain.name


def place(address: GuestAddress) -> tuple[int, int, int]:
    """The place of a function, without its other properties."""
    return (address.bus, address.slot, address.function)


def sysfs(device: PciDevice) -> str:
    """The directory of a function, for evidence."""
    return f"/sys/bus/pci/devices/{device.address}"


def driver_of(device: PciDevice) -> str:
    """The driver of a function, as evidence."""
    return f"{sysfs(device)}/driver: {device.driver or 'none'}"


def addresses(devices: Iterable[PciDevice]) -> str:
    """Addresses as command arguments."""
    return " ".join(str(device.address) for device in devices)


def shown_size(count: int) -> str:
    """`128 GiB`, `1.5 TiB`."""
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:.4g} {name}"
    return f"{count} bytes"
