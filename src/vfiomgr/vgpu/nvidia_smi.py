"""GPU modes, GPU instances (MIG) and vGPU types, from the tables of nvidia-smi.

Columns grow with the names in them, and rows of old drivers begin with one or two bars; names have
no blanks. If there is nothing to list, nvidia-smi exits with status 6 (NVML: not found).

Its output has addresses with an eight-digit domain, the spelling `Heterogenous` in one place,
`Not Supported`, which contains `Supported`, and `N/A` for values that do not apply.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.errors import HostError, ProgramFailed, UsageError
from vfiomgr.expressions import expression
from vfiomgr.paths import MDEV_DEVICES, PCI_DEVICES
from vfiomgr.pci.model import PciAddress, PciDevice
from vfiomgr.vgpu.facts import ask
from vfiomgr.vgpu.instance_model import GpuInstance, GpuPartition, InstanceProfile, by_start
from vfiomgr.vgpu.model import GpuMode, VgpuParent, VgpuType, describe_type

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree
    from vfiomgr.vgpu.model import Vgpu


_NOT_FOUND = 6
_PROFILE = expression(
    r"^\|+\s*(?P<gpu>\d+)\s+MIG\s+(?P<name>\S+)\s+(?P<id>\d+)\s+(?P<free>\d+)/(?P<total>\d+)"
    r"(?:\s+(?P<memory>[\d.]+)\s+\S+\s+(?P<sm>\d+)\s+(?P<decoders>\d+)\s+(?P<encoders>\d+))?"
)
"""`|   0  MIG 1g.5gb+me     20     1/1        4.75       No     14     1     0   |`."""
_ENGINES = expression(r"^\|+\s+(?P<copy>\d+)\s+(?P<jpeg>\d+)\s+(?P<flow>\d+)\s*\|+\s*$")
"""The next line, without a name: copy engines (which instances may share), JPEG, optical flow."""
_INSTANCE = expression(r"^\|+\s*(\d+)\s+MIG\s+(\S+)\s+(\d+)\s+(\d+)\s+(\d+):(\d+)\s*\|")
"""`|   0  MIG 3g.20gb            9        2          0:4     |`: profile, instance, place."""
_COMPUTE = expression(r"^\|+\s*(\d+)\s+(\d+)\s+MIG\s+(\S+)\s+\d+\s+\d+\b")
"""`|   0      3       MIG 1c.2g.10gb       0         1          1:1     |`: the instance first."""
_PLACES = expression(r"^GPU\s+(\d+)\s+Profile ID\s+(\d+)\s+Placements?\s*:\s*\{([\d,]*)\}:(\d+)")
"""`GPU  0 Profile ID 14 Placements: {0,2,4}:2`."""
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
    found: list[GpuPartition] = []
    for index, gpu in by_index.items():
        if gpu in divided and index in profiles:
            busy = (replace(o, processes=running.get((gpu, o.id), ())) for o in made.get(index, ()))
            found.append(GpuPartition(gpu, profiles[index], tuple(busy)))
    return tuple(found)


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
    return tree.read_number(directory / "nvidia/gpu_instance_id")


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
    for gpu, lines in _sections(log):
        instance, process = "", ""
        for line in lines:
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


_FIELD = expression(r"^(?P<indent>\s*)(?P<key>\S.*?)\s*(?::(?:\s+(?P<value>.*?))?)?\s*$")
_GPU = expression(r"^GPU\s+([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7])\s*$")
_TYPE_ID = "vGPU Type ID"
_FLAGS = {"enabled": True, "disabled": False}
_SUPPORT = {"supported": True, "not supported": False}
_VENDOR = "vendor-vfio"
_DEVICE_API = "vfio-pci"

_Fields = dict[tuple[str, str], str]


def read_log(tree: HostTree, devices: Sequence[PciDevice]) -> str:
    """Read all GPU modes from nvidia-smi; nothing if it is not installed or fails."""
    return ask(tree, devices, "-q") or ""


def parse_modes(log: str) -> tuple[GpuMode, ...]:
    """The modes of all GPUs that nvidia-smi lists."""
    return tuple(_modes(log))


def with_memory(modes: tuple[GpuMode, ...], parents: Sequence[VgpuParent]) -> tuple[GpuMode, ...]:
    """Add the memory for vGPUs: the largest total of the vGPUs of one type.

    nvidia-smi's own total is smaller, because the driver reserves some memory.
    """
    if not modes:
        return modes
    known: dict[str, int] = {}
    for parent in {(p.gpu, id(p.types)): p for p in parents}.values():
        sizes = (
            (kind.framebuffer or 0) * (kind.max_instances or 0)
            for kind in parent.types
            if kind.instance_profile is None
        )
        known[parent.gpu] = max(known.get(parent.gpu, 0), *sizes, 0)
    return tuple(replace(mode, framebuffer=known.get(mode.gpu) or None) for mode in modes)


def read_mode(tree: HostTree, address: PciAddress) -> GpuMode | None:
    """Read the modes of one GPU after a change."""
    text = tree.run(("nvidia-smi", "-q", "-i", str(address))) or ""
    return next((mode for mode in _modes(text) if mode.gpu == str(address)), None)


def read_persistence(tree: HostTree, address: PciAddress) -> bool | None:
    """Whether a GPU is in persistence mode."""
    text = tree.run(("nvidia-smi", "-q", "-i", str(address))) or ""
    for gpu, fields in _by_gpu(text):
        if gpu == str(address):
            return _FLAGS.get(fields.get(("", "Persistence Mode"), "").lower())
    return None


def with_known_types(
    tree: HostTree,
    devices: Sequence[PciDevice],
    parents: tuple[VgpuParent, ...],
    vgpus: tuple[Vgpu, ...],
    divided: frozenset[str] = frozenset(),
) -> tuple[tuple[VgpuParent, ...], tuple[Vgpu, ...]]:
    """Add all types of their GPUs to vendor-vfio parents, and names to their vGPUs.

    A virtual function lists only the types that are available now, and none while it is a vGPU.
    Mediated types of GPUs in MIG mode (`divided`) get the profile of their GPU instances.
    """
    if all(parent.family != _VENDOR and parent.gpu not in divided for parent in parents):
        return parents, vgpus
    known = dict(_types(ask(tree, devices, "vgpu", "-s", "-v") or ""))
    completed = tuple(_completed(parent, known.get(parent.gpu, ()), divided) for parent in parents)
    names = {(p.name, k.id): k.name for p in completed if p.family == _VENDOR for k in p.types}
    named = (
        replace(vgpu, type_name=vgpu.type_name or names.get((vgpu.parent, vgpu.type)))
        for vgpu in vgpus
    )
    return completed, tuple(named)


def _completed(
    parent: VgpuParent, known: Sequence[VgpuType], divided: frozenset[str]
) -> VgpuParent:
    if not known or (parent.family != _VENDOR and parent.gpu not in divided):
        return parent
    if parent.family != _VENDOR:  # sysfs does not show the profiles of GPU instances
        by_number = {kind.number: kind for kind in known}
        pairs = ((kind, by_number.get(kind.number, kind)) for kind in parent.types)
        types = (
            replace(k, instance_profile=o.instance_profile, per_instance=o.per_instance)
            for k, o in pairs
        )
        return replace(parent, types=tuple(types))
    kinds = {kind.id: kind for kind in (*parent.types, *known)}
    available = tuple(parent.offers(number) for number in kinds)
    return replace(parent, types=tuple(kinds.values()), available=available)


def _modes(text: str) -> Iterator[GpuMode]:
    for gpu, fields in _by_gpu(text):
        mixed = fields.get(("GPU Virtualization Mode", "vGPU Heterogeneous Mode"), "")
        yield GpuMode(
            gpu=gpu,
            heterogeneous=_FLAGS.get(mixed.lower()),
            mig=_FLAGS.get(fields.get(("MIG Mode", "Current"), "").lower()),
            framebuffer=None,
            mixes_sizes=_mixes_sizes(fields),
            pending_mig=_FLAGS.get(fields.get(("MIG Mode", "Pending"), "").lower()),
        )


def _mixes_sizes(fields: _Fields) -> bool | None:
    """Whether the GPU can be heterogeneous; older drivers report it only for the driver."""
    said = fields.get(("vGPU Device Capability", "Heterogeneous Time-Slice Sizes"))
    for name in ("Heterogenous Multi-vGPU", "Heterogeneous Multi-vGPU"):
        for section in ("vGPU Device Capability", "vGPU Driver Capability"):
            said = said or fields.get((section, name))
    return _SUPPORT.get((said or "").lower())


def _types(text: str) -> Iterator[tuple[str, tuple[VgpuType, ...]]]:
    for gpu, lines in _sections(text):
        found: list[dict[str, str]] = []
        for line in lines:
            key, _, value = (part.strip() for part in line.partition(":"))
            if key == _TYPE_ID:
                found.append({})
            if found:
                found[-1].setdefault(key, value)
        yield gpu, tuple(kind for fields in found if (kind := _type(fields)) is not None)


def _type(fields: dict[str, str]) -> VgpuType | None:
    number = _number(fields[_TYPE_ID])
    if number is None:
        return None
    kind = describe_type(str(number), fields.get("Name") or None, None, _DEVICE_API)
    return replace(
        kind,
        framebuffer=_number(fields.get("FB Memory")) or kind.framebuffer,
        heads=_number(fields.get("Display Heads")),
        max_instances=_number(fields.get("Max Instances")),
        instance_profile=_number(fields.get("GPU Instance Profile ID")),
        per_instance=_number(fields.get("Max Instances Per GI")),
    )


def _number(text: str | None) -> int | None:
    """Parse `1519`, `0x5ef` or `3072 MiB`; None for `N/A`."""
    found = re.match(r"0[xX][0-9A-Fa-f]+|[0-9]+", text or "")
    return int(found[0], 0 if found[0][:2].lower() == "0x" else 10) if found else None


def _by_gpu(text: str) -> Iterator[tuple[str, _Fields]]:
    """The fields of each GPU by section and name; leading fields apply to all GPUs."""
    head = text[: found.start()] if (found := re.search(r"(?m)^GPU\s", text)) else text
    common = _fields(head.splitlines())
    for gpu, lines in _sections(text):
        yield gpu, common | _fields(lines)


def _fields(lines: Iterable[str]) -> _Fields:
    """The values by their heading; a heading has no value itself."""
    found: _Fields = {}
    headings: list[tuple[int, str]] = []
    for line in lines:
        match = _FIELD.match(line)
        if match is None:
            continue
        depth = len(match["indent"])
        headings = [heading for heading in headings if heading[0] < depth]
        if match["value"] is None:
            headings.append((depth, match["key"]))
        else:
            found.setdefault((headings[-1][1] if headings else "", match["key"]), match["value"])
    return found


def _sections(text: str) -> Iterator[tuple[str, list[str]]]:
    """The lines below each `GPU 00000000:41:00.0`, by sysfs address."""
    lines: list[str] = []
    gpu: str | None = None
    for line in text.splitlines():
        match = _GPU.match(line)
        if match is None:
            lines.append(line)
            continue
        if gpu is not None:
            yield gpu, lines
        gpu, lines = _sysfs_name(match[1]), []
    if gpu is not None:
        yield gpu, lines
