"""What is known of each host of a fleet: a summary of its snapshot, small enough to keep."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Generic, Literal, Protocol, TypeVar, get_args

from msgspec.structs import replace

from vfiomgr.units import counted
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterable

GpuState = Literal["free", "used", "unknown", "unavailable"]
"""Whether a guest could have the entire GPU now: `unknown` if its users could not be read,
`unavailable` if `bind` would refuse it for another reason than its users."""
STATES: tuple[GpuState, ...] = get_args(GpuState)


class Capacity(Value):
    """How many more vGPUs of a type, or GPU instances of a profile (MIG), a GPU has room for."""

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
    """What differs from the layout; None without one."""
    path: str = ""
    """The file of its snapshot."""

    def count(self, state: GpuState) -> int:
        """The number of GPUs in a state."""
        return sum(gpu.state == state for gpu in self.gpus)

    @property
    def models(self) -> str:
        """`8 x NVIDIA A40, NVIDIA L4`."""
        return counted_names(gpu.name for gpu in self.gpus)


class Unreadable(Value):
    """A file that is no readable snapshot: its host is unknown."""

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


_D = TypeVar("_D", bound=Dated)


class Fleet(Value, Generic[_D]):
    """The hosts of some directories, each by its newest snapshot."""

    hosts: tuple[_D, ...]
    unreadable: tuple[Unreadable, ...]
    outdated: tuple[Outdated, ...]


def fleet_of(found: Iterable[tuple[str, _D | Unreadable]]) -> Fleet[_D]:
    """The fleet of what is derived from files; of each host only the newest snapshot counts.

    A snapshot without a time is the oldest. Hosts are the same if their names are.
    """
    newest: dict[str, _D] = {}
    unreadable, outdated = [], []
    for path, one in found:
        if isinstance(one, Unreadable):
            unreadable.append(one)
            continue
        latest: _D = replace(one, path=path)  # type: ignore[type-var]
        other = newest.get(one.name)
        if other is not None:
            older, latest = sorted((other, latest), key=lambda d: (d.time or "", d.path))
            outdated.append(Outdated(older.path, older.name, latest.path))
        newest[one.name] = latest
    hosts = tuple(newest[name] for name in sorted(newest, key=natural))
    return Fleet(hosts, tuple(unreadable), tuple(outdated))


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
