"""Accelerators beside GPUs: NPUs, AMD's compute partitions, and CXL devices.

AMD's XCP partitions are platform devices without a parent, so their DRM nodes are not below the PCI
function; the nodes of KFD's topology have the location of the function, with the number of the
partition in the bits of the PCI function (kfd_topology_add_device in amdkfd/kfd_topology.c).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from vfiomgr.paths import HostPath
from vfiomgr.pci.capabilities import CONFIG_END, extended_capabilities, word
from vfiomgr.pci.model import PciAddress, PciDevice, pci_device
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree

COMPUTE_PARTITION = "current_compute_partition"
"""The attribute of GPUs that can be divided: SPX, DPX, TPX, QPX or CPX (amdgpu_gfx.c)."""
_KFD = HostPath("/sys/class/kfd/kfd/topology/nodes")
_FUNCTION = 7
_CLASSES = ("02", "03", "05", "12")
"""Classes of functions that may be CXL devices: network, display, memory, accelerator."""
_DVSEC, _CXL_VENDOR, _CXL_DEVICE = 0x23, 0x1E98, 0
_CACHE, _MEMORY = 1 << 0, 1 << 2


class CxlDevice(Value):
    """A function with the DVSEC of a CXL device (CXL 3.1, 8.1.3; pci_regs.h)."""

    address: PciAddress
    has_cache: bool
    has_memory: bool

    @property
    def type(self) -> int:
        """1: caches host memory; 2: also has memory of its own, as accelerators; 3: only memory."""
        if not self.has_cache:
            return 3
        return 2 if self.has_memory else 1


def partition_nodes(tree: HostTree, name: str) -> Iterator[str]:
    """The DRM nodes of the partitions of a GPU on amdgpu."""
    address = PciAddress.parse(name)
    for number in tree.children(_KFD):
        text = tree.read(_KFD / number / "properties") or ""
        known = dict(line.split(" ", 1) for line in text.splitlines() if " " in line)
        minor = _number(known.get("drm_render_minor"))
        place = _number(known.get("location_id"))
        if not minor or place is None or _number(known.get("domain")) != address.domain:
            continue
        if place & ~_FUNCTION == address.routing_id & ~_FUNCTION:
            yield f"/dev/dri/renderD{minor}"


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.strip().isdecimal() else None


def read_cxl(tree: HostTree, devices: Iterable[PciDevice]) -> tuple[CxlDevice, ...]:
    """The CXL devices among functions that are awake; only root can read the registers."""
    found = (
        cxl_device(
            device.address,
            tree.read_bytes(pci_device(device.address) / "config", CONFIG_END) or b"",
        )
        for device in devices
        if device.class_code.startswith(_CLASSES)
        and device.physical_function is None
        and device.runtime_status != "suspended"
    )
    return tuple(device for device in found if device is not None)


def cxl_device(address: PciAddress, config: bytes) -> CxlDevice | None:
    """Read the DVSEC of a CXL device; None if the configuration space has none."""
    for identifier, at in extended_capabilities(config):
        vendor, number = word(config, at + 4), word(config, at + 8)
        if (identifier, vendor, number) == (_DVSEC, _CXL_VENDOR, _CXL_DEVICE):
            able = word(config, at + 10)
            return CxlDevice(
                address, has_cache=bool(able & _CACHE), has_memory=bool(able & _MEMORY)
            )
    return None
