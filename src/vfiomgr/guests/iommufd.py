"""The VFIO backend of new devices: iommufd where kernel and QEMU have it.

Kernels since 6.6 have /dev/iommu (CONFIG_IOMMUFD) and one device node per function
(CONFIG_VFIO_DEVICE_CDEV). QEMU cannot map BARs of other devices through iommufd, so devices of a
guest cannot reach each other's memory (P2P DMA in docs/devel/vfio-iommufd.rst of QEMU).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from msgspec.structs import replace

from vfiomgr.guests.model import DeviceRequest, GuestDevice
from vfiomgr.paths import IOMMU_NODE, VFIO_CDEVS, HostPath
from vfiomgr.pci.iommu import read_vfio_state
from vfiomgr.pci.model import CLASS_NETWORK, PciDevice, is_vfio_driver
from vfiomgr.units import Version
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.snapshot.source import HostSource

_DEV = HostPath("/dev")
Optioned = TypeVar("Optioned", DeviceRequest, GuestDevice)
QEMU_IOMMUFD = Version(9, 0)
"""The QEMU whose vfio-pci has the property iommufd (IOMMUFDProperties in qapi/qom.json)."""
OTHER_KERNEL = "boot a kernel with CONFIG_VFIO_GROUP"
"""The remedy on a kernel without VFIO groups for what only works with them."""
FEWEST_PEERS = 2
"""Devices from which on one can reach the memory of another."""


class VfioBackend(Value):
    """Whether devices use iommufd, and the reason."""

    has_iommufd: bool
    why: str = ""


NO_BACKEND = VfioBackend(has_iommufd=False)
"""No choice: a user made it, or iommufd is not possible."""


def lacks_iommufd(qemu: Version | None) -> bool:
    """Whether that QEMU is known to lack iommufd; false if it is unknown."""
    return qemu is not None and qemu < QEMU_IOMMUFD


def is_supported_by_kernel(
    host: HostSource, seen: HostSnapshot, units: Sequence[GuestDevice]
) -> bool:
    """Whether the kernel has /dev/iommu, and a device node for each function that a guest sees."""
    given = [unit for unit in units if unit.is_seen]
    functions = [function for unit in given for function in unit.functions]
    return all(unit.functions for unit in given) and _has_kernel(host, seen, functions)


def backend_for(units: Sequence[GuestDevice], qemu: Version | None, support: str) -> VfioBackend:
    """The backend of devices on such a kernel; `support` names what else supports iommufd."""
    if qemu is None:
        why = "using VFIO groups: QEMU's version is unknown (set --qemu-version)"
        return VfioBackend(has_iommufd=False, why=why)
    if lacks_iommufd(qemu):
        return NO_BACKEND
    peers = [unit for unit in units if unit.is_seen and any(map(is_peer, unit.functions))]
    if len(peers) >= FEWEST_PEERS:
        shown = ", ".join(unit.name for unit in peers)
        why = f"using VFIO groups: with iommufd {shown} could not access each other's memory"
        return VfioBackend(has_iommufd=False, why=f"{why} (PCI P2P DMA); --iommufd overrides this")
    why = f"using iommufd: {support} QEMU {qemu} support it (--no-iommufd for VFIO groups)"
    return VfioBackend(has_iommufd=True, why=why)


def with_iommufd(device: Optioned) -> Optioned:
    """The device with iommufd, unless it is not assigned to the guest."""
    options = device.options
    if options.is_unassigned:
        return device
    return replace(device, options=replace(options, has_iommufd=True))


def is_peer(function: PciDevice) -> bool:
    """Whether it may use P2P DMA with others: GPUs, accelerators, network adapters."""
    is_network = function.class_code.startswith(CLASS_NETWORK)
    return function.is_graphics_or_accelerator or is_network


def _has_kernel(host: HostSource, seen: HostSnapshot, functions: Sequence[PciDevice]) -> bool:
    """Whether the kernel has /dev/iommu, and a device node for each of the functions."""
    if not functions or not has_iommu(host, seen):
        return False
    bound = [f for f in functions if is_vfio_driver(f.driver) or f.vfio_device is not None]
    if not all(function.vfio_cdev for function in bound):
        return False
    return len(bound) == len(functions) or has_cdevs(host, seen)


def has_iommu(host: HostSource, seen: HostSnapshot) -> bool | None:
    """Whether the kernel has /dev/iommu; None if this is unknown: a recording without /dev."""
    if host.snapshot is not None:
        facts = seen.readiness
        return facts.has_node(IOMMU_NODE) if facts is not None and facts.has_dev else None
    if not host.tree.exists(IOMMU_NODE):
        return False if host.tree.children(_DEV) else None
    from vfiomgr.check.facts import has_node  # noqa: PLC0415 - most hosts do not need it

    return has_node(host.tree, IOMMU_NODE)


def has_cdevs(host: HostSource, seen: HostSnapshot) -> bool:
    """Whether the kernel has a device node of VFIO, or was built with them."""
    if host.snapshot is not None:
        from vfiomgr.check.platform_rules import cdev_evidence  # noqa: PLC0415 - for snapshots

        return seen.readiness is not None and any(cdev_evidence(seen, seen.readiness))
    if host.tree.children(VFIO_CDEVS):
        return True
    shown = read_vfio_state(host.tree).has_cdevs
    if shown is not None:
        return shown
    from vfiomgr.check.facts import read_config  # noqa: PLC0415 - few hosts need it

    release = host.tree.read(HostPath("/proc/sys/kernel/osrelease"))
    _, config = read_config(host.tree, release)
    return config.get("VFIO_DEVICE_CDEV") == "y"
