"""The attributes of devices, by which claims select them, and their memory.

Names without a domain belong to the driver. Values that change often have no place here: each
change is a write to the API server. The link is known while the device is awake.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.node.dra.counters import MEMORY
from vfiomgr.node.dra.model import LONGEST_TEXT, STANDARD, AttributeValue
from vfiomgr.snapshot.hardware import memory_of
from vfiomgr.units import MIB
from vfiomgr.vgpu.model import describe_type

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vfiomgr.node.model import NodeUnit
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.vgpu.capacity import Gpu
    from vfiomgr.vgpu.model import VgpuType

BUS_ID = f"{STANDARD}/pciBusID"
ROOT = f"{STANDARD}/pcieRoot"
NUMA_NODE = f"{STANDARD}/numaNode"
MDEV_UUID = "mdevUUID"
"""The name that KubeVirt reads (pkg/dra/utils.go)."""
FUNCTION = "function"
"""The family of devices that are not vGPUs."""

_Known = dict[str, "AttributeValue | None"]


def unit_attributes(host: HostSnapshot, unit: NodeUnit) -> dict[str, AttributeValue]:
    """The attributes of a unit of the inventory; unknown ones are left out."""
    found: _Known = {
        ROOT: unit.pcie_path[0] if unit.pcie_path else None,
        NUMA_NODE: unit.numa_nodes[0] if len(unit.numa_nodes) == 1 else None,
        "driver": unit.driver,
        "iommuGroup": unit.group,
        "viable": None if unit.group is None else host.is_viable(unit.group),
    }
    vgpu = host.vgpus.named(unit.id)
    family = _FAMILIES.get(unit.kind, FUNCTION) if vgpu is None else vgpu.family
    device = host.device_named(str(unit.addresses[0])) if unit.addresses else None
    if unit.kind == "mdev":
        found |= {MDEV_UUID: unit.id}
    else:
        vendor, _, model = unit.pci_ids[0].partition(":") if unit.pci_ids else ("", "", "")
        bus_id = str(unit.addresses[0]) if unit.addresses else None
        found |= {BUS_ID: bus_id, "vendor": vendor, "device": model}
        found |= {"resetMethods": " ".join(device.reset_method) if device else None}
    if unit.kind != "function":
        found |= {"gpu": str(unit.parent or (vgpu.parent if vgpu else ""))}
        found |= {"vgpuType": _short(describe_type(unit.type, unit.type or None))}
    physical = host.device_named(str(unit.parent)) or device
    return _known({**_of_gpu(host, physical), **found, "family": family})


def vgpu_attributes(host: HostSnapshot, gpu: Gpu, kind: VgpuType) -> dict[str, AttributeValue]:
    """The attributes of a vGPU that can be created."""
    found: _Known = {
        NUMA_NODE: gpu.numa_node,
        "driver": gpu.parents[0].driver,
        "family": gpu.family,
        "gpu": gpu.name,
        "vgpuType": _short(kind),
    }
    if gpu.device is not None:
        found[ROOT] = gpu.device.bridges[0]
    return _known({**_of_gpu(host, gpu.device), **found})


def unit_memory(host: HostSnapshot, unit: NodeUnit) -> dict[str, int]:
    """The memory of a unit as a capacity, if it is known."""
    device = host.device_named(unit.id)
    if unit.kind == "quota":
        quotas = None if device is None else host.function_quotas(device)
        size = None if quotas is None else quotas.memory
    elif unit.kind == "function":
        known = None if device is None else memory_of(host, device)
        size = known.mib * MIB if known is not None and known.is_certain else None
    else:
        vgpu = host.vgpus.named(unit.id)
        kinds = host.vgpus.types_of(str(unit.parent or (vgpu.parent if vgpu else "")))
        wanted = vgpu.type if vgpu else ""
        kind = next((k for k in kinds if k.id == wanted), describe_type(wanted, unit.type or None))
        size = None if kind.framebuffer is None else kind.framebuffer * MIB
    return {MEMORY: size} if size else {}


def type_memory(kind: VgpuType) -> dict[str, int]:
    """The memory of a vGPU that can be created."""
    return {MEMORY: kind.framebuffer * MIB} if kind.framebuffer else {}


_FAMILIES = {"mdev": "mdev", "vendor": "vendor-vfio", "quota": "sriov-vf"}
"""The family of vGPUs that are not active any more, by the kind of their units."""


def _short(kind: VgpuType) -> str | None:
    """`A40-4Q`; the ID of a type without a name."""
    return kind.short_name or kind.id or None


def _of_gpu(host: HostSnapshot, device: PciDevice | None) -> _Known:
    """What a vGPU has in common with its GPU."""
    if device is None:
        return {}
    return {
        "vendor": device.vendor_id,
        "device": device.device_id,
        "model": device.short_name,
        "link": _link(host, device),
    }


def _link(host: HostSnapshot, device: PciDevice) -> str | None:
    """`16 GT/s x16`: the highest speed, since GPUs lower their speed when they are idle."""
    found = next((link for link in host.links or () if link.address == device.address), None)
    if found is None or found.max_speed is None or found.width is None:
        return None
    return f"{found.max_speed:g} GT/s x{found.width}"


def _known(found: Mapping[str, AttributeValue | None]) -> dict[str, AttributeValue]:
    """The values that are known; texts are cut to the limit, which counts bytes."""
    return {
        name: _cut(value) if isinstance(value, str) else value
        for name, value in found.items()
        if value is not None and value != ""
    }


def _cut(text: str) -> str:
    return text.encode()[:LONGEST_TEXT].decode(errors="ignore")
