"""Facts about quotas of virtual functions, from the drivers of Intel GPUs.

They are read only for GPUs on these drivers that support virtual functions.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr import paths
from vfiomgr.expressions import expression
from vfiomgr.pci.model import PciDevice, pci_device
from vfiomgr.vgpu.quota.model import (
    AUTO,
    QUANTITIES,
    SHARED,
    FunctionQuotas,
    GpuQuotas,
    QuotaAttribute,
    parse_record,
    record_file,
)

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree
    from vfiomgr.paths import HostPath

    _Places = Callable[[HostTree, HostPath], Iterator[HostPath]]

DRM_DEBUG = paths.HostPath("/sys/kernel/debug/dri")
_FUNCTION = expression(r"pf|vf([1-9][0-9]*)")
_TILE = expression(r"gt[0-9]*")
_DEBUG_TILE = expression(r"tile[0-9]+")
_DEBUG_GT = expression(r"gt[0-9]+")
_CARD = expression(r"card[0-9]+")
_MANAGER = expression(r"vram[0-9]+_mm")
_SIZE = expression(r"^\s*size: ([0-9]+)\s*$", re.MULTILINE)
"""The first matching line (ttm_resource_manager_debug)."""
_I915_DIRECTORIES = ("iov", "prelim_iov")
"""The second one is of Intel's backports (intel-i915-dkms), with the same attributes."""
_LIMIT = 1 << 16


def read_quotas(tree: HostTree, devices: Iterable[PciDevice]) -> tuple[GpuQuotas, ...]:
    """Read the quotas of all GPUs whose drivers support them."""
    found = (
        _read(tree, device)
        for device in devices
        if device.sriov_totalvfs and device.driver in ("xe", "i915") and not device.stuck
    )
    return tuple(quotas for quotas in found if quotas is not None)


def _read(tree: HostTree, device: PciDevice) -> GpuQuotas | None:
    if device.driver == "i915":
        return _read_i915(tree, device)
    directory = pci_device(device.address) / "sriov_admin"
    functions = tuple(_functions(tree, directory, _profile))
    if not functions:
        return _read_debugfs(tree, device)
    return GpuQuotas(
        gpu=str(device.address),
        interface="xe",
        directory=directory,
        functions=functions,
        memory=_vram(tree, device),
        originals=parse_record(tree.read_text(record_file(device.address))),
    )


def _read_i915(tree: HostTree, device: PciDevice) -> GpuQuotas | None:
    drm = pci_device(device.address) / "drm"
    cards = (name for name in tree.children(drm) if _CARD.fullmatch(name))
    for directory in (drm / card / name for card in cards for name in _I915_DIRECTORIES):
        functions = tuple(_functions(tree, directory, _tiles))
        if functions:
            supplies = tuple(_supplies(tree, directory))
            free = [a.number or 0 for a in supplies if a.kind == "lmem_free"]
            taken = [function.memory or 0 for function in functions if function.number]
            return GpuQuotas(
                gpu=str(device.address),
                interface="i915",
                directory=directory,
                functions=functions,
                memory=sum(free) + sum(taken) if free else None,
                supplies=supplies,
                auto=tree.read(directory / AUTO) or None,
                originals=parse_record(tree.read_text(record_file(device.address))),
            )
    return None


def _functions(tree: HostTree, directory: HostPath, below: _Places) -> Iterator[FunctionQuotas]:
    """Read the quotas of each function in a directory, by number."""
    names = [match for name in tree.children(directory) if (match := _FUNCTION.fullmatch(name))]
    for match in sorted(names, key=lambda match: int(match[1] or 0)):
        attributes = tuple(
            a for place in below(tree, directory / match[0]) for a in _attributes(tree, place)
        )
        named = tuple(_below(directory, attribute) for attribute in attributes)
        yield FunctionQuotas(int(match[1] or 0), named)


def _profile(_tree: HostTree, function: HostPath) -> Iterator[HostPath]:
    yield function / "profile"


def _tiles(tree: HostTree, function: HostPath) -> Iterator[HostPath]:
    yield from (function / name for name in tree.children(function) if _TILE.fullmatch(name))


def _attributes(tree: HostTree, place: HostPath) -> Iterator[QuotaAttribute]:
    for name in tree.children(place):
        if name in QUANTITIES or name in SHARED:
            status = tree.status(place / name)
            is_writable = status is None or bool(status.st_mode & stat.S_IWUSR)
            yield QuotaAttribute(place / name, tree.read(place / name) or None, is_writable)


def _below(directory: HostPath, attribute: QuotaAttribute) -> QuotaAttribute:
    return replace(attribute, name=attribute.name.removeprefix(f"{directory}/"))


def _supplies(tree: HostTree, directory: HostPath) -> Iterator[QuotaAttribute]:
    """Read the remaining resources, without those reserved for the host."""
    for place in _tiles(tree, directory / "pf"):
        for name in tree.children(place / "available"):
            if name.endswith("_free"):
                spare = tree.read_number(place / name.replace("_free", "_spare")) or 0
                free = tree.read_number(place / "available" / name) or 0
                yield QuotaAttribute(f"{place.name}/{name}", str(max(0, free - spare)))


# ---- debugfs


def _read_debugfs(tree: HostTree, device: PciDevice) -> GpuQuotas | None:
    """Read xe before Linux 6.19, which requires root and debugfs."""
    directory = DRM_DEBUG / str(device.address)
    found: dict[int, list[QuotaAttribute]] = {}
    for place in _debug_places(tree, directory):
        match = _FUNCTION.fullmatch(place.name)
        if match is not None:
            own = found.setdefault(int(match[1] or 0), [])
            own += _debug_attributes(tree, directory, place)
    if not any(found.values()):
        return None
    return GpuQuotas(
        gpu=str(device.address),
        interface="debugfs",
        directory=directory,
        functions=tuple(FunctionQuotas(n, tuple(found[n])) for n in sorted(found)),
        memory=_vram(tree, device),
    )


def _debug_places(tree: HostTree, directory: HostPath) -> list[HostPath]:
    """`sriov/vf1` as of Linux 6.18; before that `gt0/vf1`, `gt1/vf1`."""
    roots = [directory / "sriov"]
    if not tree.children(roots[0]):
        roots = [directory / n for n in tree.children(directory) if _DEBUG_GT.fullmatch(n)]
    return [root / name for root in roots for name in tree.children(root)]


def _debug_attributes(
    tree: HostTree, directory: HostPath, function: HostPath
) -> Iterator[QuotaAttribute]:
    tiles = [function / n for n in tree.children(function) if _DEBUG_TILE.fullmatch(n)]
    engines = [t / n for t in tiles for n in tree.children(t) if _DEBUG_GT.fullmatch(n)]
    for place in (*tiles, *engines) or (function,):
        for attribute in _attributes(tree, place):
            # For compatibility, engines also link to the memory of their tile.
            if not (place in engines and QUANTITIES.get(attribute.kind) == "memory"):
                yield _below(directory, attribute)


def _vram(tree: HostTree, device: PciDevice) -> int | None:
    """Read the memory of all tiles in bytes, which xe shows only in debugfs."""
    directory = DRM_DEBUG / str(device.address)
    texts = [
        tree.read_text(directory / name, _LIMIT) or ""
        for name in tree.children(directory)
        if _MANAGER.fullmatch(name)
    ]
    sizes = [int(match[1]) for text in texts if (match := _SIZE.search(text))]
    return sum(sizes) if sizes and len(sizes) == len(texts) else None
