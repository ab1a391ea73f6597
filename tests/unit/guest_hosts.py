"""Hosts for guests: two sockets, GPUs with large BARs, and wanted for domains on them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from tests.unit.devices import host_of, pci_device, with_facts
from vfiomgr.guests.model import DeviceRequest
from vfiomgr.libvirt.build.model import DomainRequest
from vfiomgr.libvirt.build.plan import plan_domain
from vfiomgr.pci.memory import HostTopology, HugepagePool, NumaNode
from vfiomgr.pci.model import Bar
from vfiomgr.units import GIB, Version

if TYPE_CHECKING:
    from vfiomgr.libvirt.build.model import DomainPlan
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot

GPU, AUDIO = "0000:17:00.0", "0000:17:00.1"
NEAR = "0000:31:00.0"
"""Another root complex of the same node."""
FAR = "0000:ca:00.0"
"""On the other node."""
OLD, NEW = Version(9, 0), Version(12, 2)
PAGE = 1 << 30


def bar(size: int, *, is_prefetchable: bool = True, index: int = 0) -> Bar:
    """A 64-bit BAR of memory."""
    return Bar(index, 0, size, is_memory=True, is_64bit=True, is_prefetchable=is_prefetchable)


def gpu(address: str, group: int, node: int | None = 0, size: int = 32 * GIB) -> PciDevice:
    """A GPU on vfio-pci, below a root complex of the number of its bus."""
    device = pci_device(address)
    return replace(
        device,
        driver="vfio-pci",
        iommu_group=group,
        numa_node=node,
        bridge_path=f"pci0000:{device.address.bus - 1:02x}/0000:{device.address.bus - 1:02x}:01.0",
        bars=(bar(1 << 24, is_prefetchable=False), bar(size, index=1), bar(32 << 20, index=3)),
    )


def node(number: int, cpus: range, gib: int = 256, free: int = 200, pages: int = 0) -> NumaNode:
    """A node with pages of 1 GiB."""
    pool = (HugepagePool(PAGE, pages, pages),) if pages else ()
    distances = (10, 21) if number == 0 else (21, 10)
    return NumaNode(number, tuple(cpus), gib * GIB, free * GIB, pool, distances)


TOPOLOGY = HostTopology(
    (node(0, range(16), pages=64), node(1, range(16, 32), pages=32)), boot_cpu_threads=(0, 8)
)


def two_sockets(*more: PciDevice) -> HostSnapshot:
    """A GPU with audio and another on node 0, below two root complexes, and one on node 1."""
    registers = (bar(1 << 14, is_prefetchable=False),)
    audio = replace(gpu(AUDIO, 10), class_code="040300", device_id="2291", bars=registers)
    devices = (gpu(GPU, 10), audio, gpu(NEAR, 11), gpu(FAR, 12, 1), *more)
    return with_facts(host_of(*devices), topology=TOPOLOGY, cpu_address_bits=46)


def wanted(*names: str, **changes: Any) -> DomainRequest:
    """A guest of 64 GiB and 8 CPUs with these devices."""
    devices = tuple(DeviceRequest(name) for name in names)
    return replace(DomainRequest("guest", 64 * GIB, 8, devices), **changes)


def planned(
    *names: str,
    host: HostSnapshot | None = None,
    libvirt: Version = OLD,
    qemu: Version | None = None,
    **changes: Any,
) -> DomainPlan:
    """The plan of a wanted."""
    return plan_domain(host or two_sockets(), wanted(*names, **changes), libvirt, qemu)
