"""GPU instances (MIG) from the tables of nvidia-smi, which name GPUs by index.

Columns grow with the names in them, and rows of old drivers begin with one or two bars; names have
no blanks. If there is nothing to list, nvidia-smi exits with status 6 (NVML: not found).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.errors import HostError, ProgramFailed, UsageError
from vfiomgr.paths import MDEV_DEVICES, PCI_DEVICES
from vfiomgr.pci.model import PciAddress
from vfiomgr.vgpu.facts.nvidia import ask
from vfiomgr.vgpu.mig.model import GpuInstance, GpuPartition, InstanceProfile, by_start

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from vfiomgr.host.tree import HostTree
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.vgpu.model import Vgpu, VgpuParent

_NOT_FOUND = 6
_PROFILE = re.compile(
    r"^\|+\s*(?P<gpu>\d+)\s+MIG\s+(?P<name>\S+)\s+(?P<id>\d+)\s+(?P<free>\d+)/(?P<total>\d+)"
    r"(?:\s+(?P<memory>[\d.]+)\s+\S+\s+(?P<sm>\d+)\s+(?P<decoders>\d+)\s+(?P<encoders>\d+))?"
)
"""`|   0  MIG 1g.5gb+me     20     1/1        4.75       No     14     1     0   |`."""
_ENGINES = re.compile(r"^\|+\s+(?P<copy>\d+)\s+(?P<jpeg>\d+)\s+(?P<flow>\d+)\s*\|+\s*$")
"""The next line, without a name: copy engines (which instances may share), JPEG, optical flow."""
_INSTANCE = re.compile(r"^\|+\s*(\d+)\s+MIG\s+(\S+)\s+(\d+)\s+(\d+)\s+(\d+):(\d+)\s*\|")
"""`|   0  MIG 3g.20gb            9        2          0:4     |`: profile, instance, place."""
_COMPUTE = re.compile(r"^\|+\s*(\d+)\s+(\d+)\s+MIG\s+(\S+)\s+\d+\s+\d+\b")
"""`|   0      3       MIG 1c.2g.10gb       0         1          1:1     |`: the instance first."""
_PLACES = re.compile(r"^GPU\s+(\d+)\s+Profile ID\s+(\d+)\s+Placements?\s*:\s*\{([\d,]*)\}:(\d+)")
"""`GPU  0 Profile ID 14 Placements: {0,2,4}:2`."""
_GPU = re.compile(r"^GPU\s+([0-9A-Fa-f]+:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7])\s*$")
_MIB_PER_GIB = 1024

_Processes = dict[tuple[str, int], tuple[str, ...]]


def read_partitions(
    tree: HostTree, devices: Sequence[PciDevice], divided: frozenset[str], log: str
) -> tuple[GpuPartition, ...]:
    """Read the GPU instances of the GPUs in MIG mode (`divided`), if nvidia-smi reports all.

    `log` is the output of `nvidia-smi -q`, whose list of processes names their instances.
    """
    if not divided:
        return ()
    query = ("--query-gpu=index,pci.bus_id", "--format=csv,noheader")
    by_index = dict(_indexes(ask(tree, devices, *query) or ""))
    profiles = parse_profiles(_ask(tree, "-lgip") or "", _ask(tree, "-lgipp") or "")
    instances, compute = _ask(tree, "-lgi"), _ask(tree, "-lci")
    if instances is None or compute is None:
        return ()  # what is there is not known, which is not the same as nothing
    made = parse_instances(instances, compute)
    running = parse_processes(log)
    return tuple(
        GpuPartition(gpu, profiles[index], _with_processes(gpu, made.get(index, ()), running))
        for index, gpu in by_index.items()
        if gpu in divided and index in profiles
    )


def read_instances(tree: HostTree, address: PciAddress) -> tuple[GpuInstance, ...]:
    """Read the GPU instances of one GPU after a change.

    Raises:
        HostError: nvidia-smi does not report them.

    """
    texts = [_ask(tree, question, "-i", str(address)) for question in ("-lgi", "-lci")]
    if None in texts:
        message = f"cannot read the GPU instances of {address}: nvidia-smi does not report them"
        raise HostError(message, f"find the cause with: nvidia-smi mig -lgi -i {address}")
    found = parse_instances(*(text or "" for text in texts))
    return next(iter(found.values()), ())


def with_places(
    tree: HostTree, vgpus: tuple[Vgpu, ...], parents: Iterable[VgpuParent], divided: frozenset[str]
) -> tuple[Vgpu, ...]:
    """Add the GPU instances of vGPUs, if the driver reports them (ENXIO: not yet)."""
    here = {parent.name for parent in parents if parent.gpu in divided}
    return tuple(
        replace(vgpu, gpu_instance=_gpu_instance(tree, vgpu)) if vgpu.parent in here else vgpu
        for vgpu in vgpus
    )


def _gpu_instance(tree: HostTree, vgpu: Vgpu) -> int | None:
    directory = (PCI_DEVICES if vgpu.uuid is None else MDEV_DEVICES) / vgpu.name
    text = tree.read(directory / "nvidia/gpu_instance_id")
    return int(text) if text and text.isdecimal() else None


def parse_profiles(table: str, places: str) -> dict[int, tuple[InstanceProfile, ...]]:
    """Read `-lgip` and `-lgipp`, by GPU index."""
    found: dict[int, list[InstanceProfile]] = {}
    latest: list[InstanceProfile] = []
    for line in table.splitlines():
        match = _PROFILE.match(line)
        if match is not None:
            latest = found.setdefault(int(match["gpu"]), [])
            latest.append(_profile(match))
        elif latest and latest[-1].engines and (more := _ENGINES.match(line)) is not None:
            engines = (*latest[-1].engines[:3], int(more["jpeg"]), int(more["flow"]))
            latest[-1] = replace(latest[-1], engines=engines)
    where = dict(_places(places))
    return {
        gpu: tuple(
            replace(known, starts=starts, size=size)
            for known in profiles
            for starts, size in [where.get((gpu, known.id), ((), 0))]
        )
        for gpu, profiles in found.items()
    }


def _profile(match: re.Match[str]) -> InstanceProfile:
    engines = (match["sm"], match["decoders"], match["encoders"])
    return InstanceProfile(
        id=int(match["id"]),
        name=match["name"],
        memory=None if match["memory"] is None else int(float(match["memory"]) * _MIB_PER_GIB),
        free=int(match["free"]),
        total=int(match["total"]),
        engines=() if match["sm"] is None else tuple(map(int, engines)),
    )


def _places(text: str) -> Iterator[tuple[tuple[int, int], tuple[tuple[int, ...], int]]]:
    for line in text.splitlines():
        match = _PLACES.match(line)
        if match is not None:
            starts = tuple(int(start) for start in match[3].split(",") if start)
            yield (int(match[1]), int(match[2])), (starts, int(match[4]))


def parse_instances(table: str, compute: str) -> dict[int, tuple[GpuInstance, ...]]:
    """Read `-lgi` and `-lci`, by GPU index."""
    parts: dict[tuple[int, int], list[str]] = {}
    for line in compute.splitlines():
        match = _COMPUTE.match(line)
        if match is not None:
            parts.setdefault((int(match[1]), int(match[2])), []).append(match[3])
    found: dict[int, list[GpuInstance]] = {}
    for line in table.splitlines():
        match = _INSTANCE.match(line)
        if match is not None:
            gpu, profile, number, start, size = (int(match[n]) for n in (1, 3, 4, 5, 6))
            names = tuple(parts.get((gpu, number), ()))
            made = GpuInstance(number, profile, match[2], start, size, names)
            found.setdefault(gpu, []).append(made)
    return {gpu: by_start(tuple(made)) for gpu, made in found.items()}


def parse_processes(log: str) -> _Processes:
    """Read the processes in `-q`, by GPU address and GPU instance number."""
    found: _Processes = {}
    gpu, instance, process = "", "", ""
    for line in log.splitlines():
        if (match := _GPU.match(line)) is not None:
            gpu = _sysfs_name(match[1]) or ""
        key, _, value = (part.strip() for part in line.partition(":"))
        if key == "GPU instance ID":
            instance = value
        elif key == "Process ID":
            process = value
        elif key == "Name" and process:
            if instance.isdecimal():
                name = value.rpartition("/")[2] or "a process"
                place = (gpu, int(instance))
                found[place] = (*found.get(place, ()), f"{name} (PID {process})")
            process = ""
    return found


def _with_processes(
    gpu: str, instances: Iterable[GpuInstance], running: _Processes
) -> tuple[GpuInstance, ...]:
    return tuple(replace(one, processes=running.get((gpu, one.id), ())) for one in instances)


def _ask(tree: HostTree, *question: str) -> str | None:
    """Run nvidia-smi; empty output if it found nothing, None if it failed."""
    command = ("nvidia-smi", "mig", *question)
    text = tree.run(command)
    if text is not None or not tree.runs_programs:
        return text
    try:
        tree.call(*command)
    except ProgramFailed as error:
        return "" if error.status == _NOT_FOUND else None
    return None


def _indexes(text: str) -> Iterator[tuple[int, str]]:
    for line in text.splitlines():
        index, _, name = (part.strip() for part in line.partition(","))
        address = _sysfs_name(name)
        if index.isdecimal() and address is not None:
            yield int(index), address


def _sysfs_name(text: str) -> str | None:
    try:
        return str(PciAddress.parse(text))
    except UsageError:
        return None
