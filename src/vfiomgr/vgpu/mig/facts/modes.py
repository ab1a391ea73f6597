"""GPU modes and vGPU types from nvidia-smi.

Its output has addresses with an eight-digit domain, the spelling `Heterogenous` in one place,
`Not Supported`, which contains `Supported`, and `N/A` for values that do not apply.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.errors import UsageError
from vfiomgr.pci.model import PciAddress
from vfiomgr.vgpu.facts.nvidia import ask
from vfiomgr.vgpu.model import GpuMode, VgpuParent, VgpuType, describe_type

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from vfiomgr.host.tree import HostTree
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.vgpu.model import Vgpu

_FIELD = re.compile(r"^(?P<indent>\s*)(?P<key>\S.*?)\s*(?::(?:\s+(?P<value>.*?))?)?\s*$")
_GPU = re.compile(r"^GPU\s+([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7])\s*$")
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
    known: dict[str, int] = {}
    for parent in parents:
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
    kinds = {parent.name: parent.types for parent in completed if parent.family == _VENDOR}
    return completed, tuple(_named(vgpu, kinds.get(vgpu.parent, ())) for vgpu in vgpus)


def _named(vgpu: Vgpu, kinds: Sequence[VgpuType]) -> Vgpu:
    name = next((kind.name for kind in kinds if kind.id == vgpu.type), None)
    return replace(vgpu, type_name=vgpu.type_name or name)


def _completed(
    parent: VgpuParent, known: Sequence[VgpuType], divided: frozenset[str]
) -> VgpuParent:
    if not known or (parent.family != _VENDOR and parent.gpu not in divided):
        return parent
    if parent.family != _VENDOR:
        by_number = {kind.number: kind for kind in known}
        return replace(parent, types=tuple(_backed(kind, by_number) for kind in parent.types))
    kinds = {kind.id: kind for kind in (*parent.types, *known)}
    available = tuple(parent.offers(number) for number in kinds)
    return replace(parent, types=tuple(kinds.values()), available=available)


def _backed(kind: VgpuType, known: dict[str, VgpuType]) -> VgpuType:
    """Add the GPU instance profile to a mediated type, which sysfs does not show."""
    other = known.get(kind.number, kind)
    return replace(kind, instance_profile=other.instance_profile, per_instance=other.per_instance)


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


def _sysfs_name(text: str) -> str | None:
    try:
        return str(PciAddress.parse(text))
    except UsageError:
        return None
