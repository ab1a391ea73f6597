"""What is known of each host of a fleet: a summary of its snapshot, small enough to keep."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Generic, Literal, Protocol, TypeVar, get_args

from msgspec.structs import replace

from vfiomgr.units import counted
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot

GpuState = Literal["free", "used", "unknown", "unavailable"]
"""Whether a guest could have the entire GPU now: `unknown` if its users could not be read,
`unavailable` if `bind` would refuse it for another reason than its users."""
STATES: tuple[GpuState, ...] = get_args(GpuState)


class Capacity(Value):
    """How many more vGPUs of a type, or GPU instances of a profile (MIG), fit on a GPU."""

    name: str
    """`A40-8Q`, `1g.5gb`."""
    more: int
    is_certain: bool = True
    """False if the driver does not report all that the number needs: it is at most this."""


class Gpu(Value):
    """A GPU or an accelerator of a host."""

    address: str
    name: str
    """The model: `NVIDIA A40`."""
    ids: str
    """PCI IDs: `10de:2235`."""
    numa_node: int | None
    unit: int
    """GPUs with the same number share IOMMU groups: only one guest can have them."""
    state: GpuState
    why: str = ""
    """Its users, or why no guest can have it."""
    vgpus: int = 0
    """Active vGPUs."""
    types: tuple[Capacity, ...] = ()
    """vGPU types that it offers."""
    instances: tuple[Capacity, ...] = ()
    """Profiles of its GPU instances, if it is in MIG mode and nvidia-smi was asked."""
    serial: str | None = None
    """Its serial number; None if unknown."""


class Node(Value):
    """A NUMA node."""

    number: int
    cpus: int
    memory_bytes: int | None
    free_bytes: int
    free_pages: dict[int, int]
    """Bytes of free huge pages, by their size."""


class HostSummary(Value):
    """A host of a fleet."""

    name: str
    """The name of the host, or of the file if the snapshot does not have it."""
    time: str | None
    """When the snapshot was created; None if unknown."""
    gpus: tuple[Gpu, ...]
    nodes: tuple[Node, ...]
    kernel: str | None = None
    guests: tuple[str, ...] = ()
    layout: str | None = None
    """The name of the installed layout."""
    drift: tuple[str, ...] | None = None
    """What differs from the layout; None without one, or if this is unknown."""
    drift_unknown: str | None = None
    """Why it is unknown whether the host matches the layout."""
    path: str = ""
    """The file of its snapshot."""

    def count(self, state: GpuState) -> int:
        """The number of GPUs in a state."""
        return sum(gpu.state == state for gpu in self.gpus)

    @property
    def cards(self) -> dict[str, str]:
        """The addresses of its GPUs, with their serial numbers; empty if unknown."""
        return {gpu.address: gpu.serial or "" for gpu in self.gpus}

    @property
    def models(self) -> str:
        """`8 x NVIDIA A40, NVIDIA L4`."""
        return counted_names(gpu.name for gpu in self.gpus)


class Unreadable(Value):
    """A file that cannot be read as a snapshot, or of one of two hosts with the same name."""

    path: str
    why: str


class Outdated(Value):
    """A file with an older snapshot of a host, which is not used."""

    path: str
    host: str
    newer: str


class Dated(Protocol):
    """What is derived from the snapshot of a host."""

    @property
    def name(self) -> str:
        """The name of the host."""

    @property
    def time(self) -> str | None:
        """When the snapshot was created; None if unknown."""

    @property
    def path(self) -> str:
        """Its file."""

    @property
    def cards(self) -> Mapping[str, str]:
        """The addresses of its GPUs, with their serial numbers; empty if unknown."""


_D = TypeVar("_D", bound=Dated)


class Fleet(Value, Generic[_D]):
    """The hosts of some directories, each by its newest snapshot."""

    hosts: tuple[_D, ...]
    unreadable: tuple[Unreadable, ...]
    outdated: tuple[Outdated, ...]


def fleet_of(found: Iterable[tuple[str, _D | Unreadable]]) -> Fleet[_D]:
    """The fleet of what is derived from files; of each host only the newest snapshot counts.

    A snapshot without a time is the oldest. Hosts are the same if their names are. If their GPUs
    differ too much for that, it is unknown which host is meant, so that none of them counts.
    """
    by_name: dict[str, list[_D]] = {}
    hosts, unreadable, outdated = [], [], []
    for path, one in found:
        if isinstance(one, Unreadable):
            unreadable.append(one)
        else:
            by_name.setdefault(one.name, []).append(replace(one, path=path))  # type: ignore[type-var]
    for name in sorted(by_name, key=natural):
        *older, latest = sorted(by_name[name], key=lambda d: (d.time or "", d.path))
        others = [one for one in older if _are_two_hosts(one.cards, latest.cards)]
        outdated += [Outdated(d.path, name, latest.path) for d in older if d not in others]
        unreadable += [_conflict(name, one, latest) for one in others]
        if others:
            unreadable.append(_conflict(name, latest, others[-1]))
        else:
            hosts.append(latest)
    return Fleet(tuple(hosts), tuple(unreadable), tuple(outdated))


def _are_two_hosts(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Whether GPUs differ by more than added, removed or replaced cards of one host."""
    if not (one.keys() <= other.keys() or other.keys() <= one.keys()):
        return True
    same = [one[name] == other[name] for name in one if one[name] and other.get(name)]
    return bool(same) and not any(same)


def _conflict(name: str, one: Dated, other: Dated) -> Unreadable:
    remedy = "remove the file that is out of date, or give one of the hosts another name"
    return Unreadable(
        one.path, f"{one.path}: {other.path} has other GPUs, and also the name {name}: {remedy}"
    )


def cards_of(host: HostSnapshot) -> dict[str, str]:
    """The addresses of the GPUs of a host, with their serial numbers; empty if unknown."""
    return {str(d.address): d.serial or "" for d in host.devices if is_counted(d)}


def is_counted(device: PciDevice) -> bool:
    """Whether a function is a GPU or an accelerator; its virtual functions are vGPUs."""
    is_part = device.physical_function is not None or device.is_nvswitch
    return device.is_graphics_or_accelerator and not is_part


def name_of_file(path: str) -> str:
    """`gpu07` for `/srv/fleet/gpu07.json.gz`."""
    return path.rpartition("/")[2].removesuffix(".gz").removesuffix(".json")


def natural(name: str) -> list[tuple[int, str]]:
    """The sort key of names with numbers: gpu2 before gpu10."""
    parts = re.split(r"(\d+)", name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def counted_names(names: Iterable[str]) -> str:
    """`8 x NVIDIA A40, NVIDIA L4`; empty without names."""
    known = list(names)
    counts = {name: known.count(name) for name in dict.fromkeys(known)}
    return ", ".join(f"{n} x {name}" if n > 1 else name for name, n in counts.items())


def hosts(count: int) -> str:
    """`1 host`, `2 hosts`."""
    return counted(count, "host")
