"""Hosts of a fleet: summaries, and snapshots in files."""

from __future__ import annotations

import gzip
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from tests.unit.devices import host_of, pci_device, with_facts
from tests.unit.guest_hosts import TOPOLOGY
from vfiomgr.fleet.model import Gpu, HostSummary, Node
from vfiomgr.snapshot.created import Created
from vfiomgr.snapshot.document import write_snapshot
from vfiomgr.units import GIB
from vfiomgr.users.model import DeviceUser

if TYPE_CHECKING:
    from pathlib import Path

    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot

TIME = "2026-11-29T08:00:00Z"
A40, L4 = "10de:2235", "10de:27b8"
_NAMES = {"2235": "NVIDIA Corporation GA102GL [A40]", "27b8": "NVIDIA Corporation AD104GL [L4]"}


def a_gpu(number: int = 0, **facts: Any) -> Gpu:
    """A free A40 of its own unit on node 0."""
    plain = Gpu(f"0000:{number + 1:02x}:00.0", "NVIDIA A40", A40, 0, number, "free")
    return replace(plain, **facts)


def a_host(*gpus: Gpu, name: str = "gpu1", **facts: Any) -> HostSummary:
    """A host with these GPUs and two nodes of 32 CPUs and 128 GiB of free memory."""
    nodes = tuple(Node(n, 32, 256 * GIB, 128 * GIB, {}) for n in (0, 1))
    return replace(HostSummary(name, TIME, gpus, nodes), **facts)


def a_card(number: int, device_id: str = "2235", **facts: Any) -> PciDevice:
    """A GPU on vfio-pci, alone in its group; the first two on node 0."""
    plain = replace(
        pci_device(f"0000:{number + 1:02x}:00.0"),
        name=_NAMES[device_id],
        device_id=device_id,
        driver="vfio-pci",
        iommu_group=number + 1,
        numa_node=number // 2,
    )
    return replace(plain, **facts)


def a_snapshot(*devices: PciDevice, **guests: int) -> HostSnapshot:
    """A host with two nodes; a guest has the device of its number."""
    host = with_facts(host_of(*devices), topology=TOPOLOGY)
    users = tuple(
        DeviceUser(f"/dev/vfio/{devices[number].iommu_group}", 7, "qemu", None, (), guest)
        for guest, number in guests.items()
    )
    return with_facts(host, users=users)


def write(directory: Path, name: str, host: HostSnapshot, time: str | None = TIME) -> Path:
    """Write the snapshot of a host, compressed."""
    file = directory / f"{name}.json.gz"
    text = write_snapshot(host, created=Created(time, name, "1.0.0"))
    file.write_bytes(gzip.compress(text.encode()))
    return file
