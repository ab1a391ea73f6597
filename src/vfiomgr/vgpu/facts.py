"""Facts about vGPUs: mediated devices, and those of NVIDIA's vendor driver.

Parents are listed in /sys/class/mdev_bus; a recorded host may lack that class, so the functions
with `mdev_supported_types` and the parents of active devices count too.

The virtual function stays on the driver `nvidia`; a type's number in `current_vgpu_type` makes it a
vGPU (NVIDIA's vgpu-vfio host driver, Linux 6.8 and later; one file of it is public).

Mediated devices: drivers/vfio/mdev/mdev_sysfs.c, Documentation/driver-api/vfio-mediated-device.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr import paths
from vfiomgr.errors import UsageError
from vfiomgr.expressions import expression
from vfiomgr.host.bounded import in_parts
from vfiomgr.host.programs import PROGRAM_PATH
from vfiomgr.pci.iommu import group_number
from vfiomgr.pci.model import PciAddress, PciDevice, pci_device
from vfiomgr.users.model import HostUse, Report, UnknownUsers, warn
from vfiomgr.vgpu.model import (
    Family,
    Vgpu,
    VgpuParent,
    VgpuType,
    describe_type,
    function_vgpu,
    types_called,
)

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree
    from vfiomgr.paths import HostPath
    from vfiomgr.pci.function import Functions


_ENABLED = "Enabled"
_MODES = (_ENABLED, "Disabled")
_QUERY = ("--query-gpu=pci.bus_id,persistence_mode", "--format=csv,noheader")


def ask(tree: HostTree, devices: Sequence[PciDevice], *question: str) -> str | None:
    """Run nvidia-smi; None if it is not installed or did not answer.

    It is not run while a device is stuck in the kernel, because it might hang too.
    """
    return tree.run(("nvidia-smi", *question)) if _can_ask(devices) else None


def _can_ask(devices: Sequence[PciDevice]) -> bool:
    gpus = any(device.driver == "nvidia" for device in devices)
    return gpus and not any(device.stuck for device in devices)


def _is_installed(program: str) -> bool:
    from shutil import which  # noqa: PLC0415 - slow to import

    return which(program, path=PROGRAM_PATH) is not None


def persistence_uses(
    tree: HostTree, devices: Sequence[PciDevice], report: Report = warn
) -> Iterator[HostUse]:
    """GPUs in persistence mode, whose use count is not visible as an open file.

    If one GPU fell off the bus, nvidia-smi fails, but may have printed the lines of others.
    """
    answer = tree.ask(("nvidia-smi", *_QUERY)) if _can_ask(devices) else None
    modes = dict(_modes(answer.output if answer else ""))
    if (answer is None or answer.status) and tree.is_machine and _is_installed("nvidia-smi"):
        on_it = (d for d in devices if d.driver == "nvidia" and d.stuck is None)
        mode_of = {d.address: modes.get(d.physical_function or d.address) for d in on_it}
        gpus = tuple(address for address, mode in mode_of.items() if mode not in _MODES)
        why = "nvidia-smi does not report the persistence mode of GPUs"
        lift = "run nvidia-smi to see why; after an update of the driver, reboot"
        for device in [d for d in devices if d.stuck][:1]:
            why = (
                f"cannot run nvidia-smi while {device} is stuck in the kernel: {device.stuck} has "
                "not returned"
            )
            lift = "stop its users, or check dmesg and reboot, then run: vfiomgr recover"
        if gpus:
            report(UnknownUsers("persistence-mode", why, lift, gpus))
    for address, mode in modes.items():
        if mode == _ENABLED:
            yield HostUse(address, "persistence-mode", "nvidia-smi shows it as enabled")


def _modes(text: str) -> Iterator[tuple[PciAddress, str]]:
    for line in text.splitlines():
        name, _, mode = line.partition(",")
        with suppress(UsageError):  # not a GPU's line: nvidia-smi also prints warnings
            yield PciAddress.parse(name), mode.strip()


TYPES = "mdev_supported_types"


def read_mdevs(
    tree: HostTree,
    functions: Functions,
    devices: Iterable[PciDevice],
    only_types: frozenset[str] | None = None,
) -> tuple[tuple[VgpuParent, ...], tuple[Vgpu, ...]]:
    """Read all parents of mediated devices by name, and all active devices by UUID.

    With `only_types`, virtual functions are asked how many are left of these types, and of those
    of active devices, but of no others: a GPU has dozens of both.
    """
    active = {
        uuid: directory
        for uuid in tree.children(paths.MDEV_DEVICES)
        if (directory := tree.resolve(paths.MDEV_DEVICES / uuid))
    }
    if only_types is not None:
        of_active = (tree.link_name(place / "mdev_type") for place in active.values())
        only_types |= set(filter(None, of_active))
    types = _Types(tree, only_types)
    holders = {mdev.parent for mdev in active.values()}
    parents = _read_parents(tree, functions, devices, holders, types)
    carrying = (parent for parent in parents if parent.path in holders)
    names = {(p.path, kind.id): kind.name for p in carrying for kind in p.types}
    found = (_read_mdev(tree, uuid, place, names) for uuid, place in active.items())
    return parents, tuple(found)


def _read_parents(
    tree: HostTree,
    functions: Functions,
    devices: Iterable[PciDevice],
    active: Iterable[HostPath],
    types: _Types,
) -> tuple[VgpuParent, ...]:
    """All parents of mediated devices, sorted by name; any function may be one."""
    by_name = {str(device.address): device for device in devices}
    names = set(tree.children(paths.MDEV_PARENTS))
    names.update(name for name in by_name if TYPES in functions.of(name).entries)
    places = {  # the links of the class resolve slower
        name: (paths.PCI_DEVICES if name in by_name else paths.MDEV_PARENTS) / name
        for name in names
    }
    places.update((directory.name, directory) for directory in active)

    def read(part: Iterable[str]) -> list[VgpuParent | None]:
        return [_read_parent(tree, places[name], by_name.get(name), types) for name in part]

    found = list(filter(None, in_parts(tree, read, sorted(places))))
    siblings = {(p.gpu, p.driver) for p in found if p.is_virtual_function}
    silent = (d for d in by_name.values() if (str(d.physical_function), d.driver) in siblings)
    found += _unlisted(tree, silent, tuple(found), "mdev")
    return tuple(sorted(found, key=lambda p: p.name))


def _unlisted(
    tree: HostTree, devices: Iterable[PciDevice], parents: Iterable[VgpuParent], family: Family
) -> Iterator[VgpuParent]:
    """The devices that the driver does not serve now, as parents whose types are unknown."""
    named = {parent.name for parent in parents}
    for device in devices:
        name = str(device.address)
        if name not in named:
            place = tree.resolve(paths.PCI_DEVICES / name) or paths.PCI_DEVICES / name
            gpu = str(device.physical_function)
            yield VgpuParent(name, place, family, device.driver, gpu, (), ())


def _read_parent(
    tree: HostTree,
    place: HostPath,
    function: PciDevice | None,
    types: _Types,
) -> VgpuParent | None:
    """A parent at a place that may be a link; None if it is gone."""
    directory = tree.resolve(place)
    if directory is None:
        return None
    physical = function.physical_function if function else None
    gpu = str(physical or directory.name)
    place = directory / TYPES
    ids = tree.children(place)
    kinds, named = types.of(gpu, _model(function), place, ids)
    available: dict[str, int | None] = dict.fromkeys(ids)
    for type_id in named.intersection(ids) if physical else ids:
        available[type_id] = tree.read_number(place / type_id / "available_instances")
    return VgpuParent(
        name=directory.name,
        path=directory,
        family="mdev",
        driver=function.driver if function else tree.link_name(directory / "driver"),
        gpu=gpu,
        types=kinds,
        available=tuple(available.values()),
    )


def _model(function: PciDevice | None) -> tuple[str, ...]:
    """What a driver decides by which types a function offers; nothing if it is not known."""
    if function is None or function.driver is None:
        return ()
    return function.driver, function.vendor_id, function.device_id, function.subsystem_id


class _Types:
    """Types of parents, read once for all virtual functions of a GPU, as one driver serves them.

    Those that a request is not about are read once for all GPUs of one model.
    """

    def __init__(self, tree: HostTree, only: frozenset[str] | None) -> None:
        self._tree = tree
        self._only = only
        self._known: dict[tuple[str, ...], tuple[tuple[VgpuType, ...], frozenset[str]]] = {}
        self._of_models: dict[tuple[str, ...], tuple[VgpuType, ...]] = {}

    def of(
        self, gpu: str, model: tuple[str, ...], place: HostPath, ids: Sequence[str]
    ) -> tuple[tuple[VgpuType, ...], frozenset[str]]:
        """The types listed in `place`, and the identifiers of those that a request is about."""
        key = (gpu, *ids)
        if key not in self._known:
            known = self._of_models.get((*model, *ids), ())
            asked = self._asked(known)
            unasked = {kind.id: kind for kind in known if kind.id not in asked}
            kinds = tuple(unasked.get(i) or _read_type(self._tree, place / i) for i in ids)
            if model:
                self._of_models[*model, *ids] = kinds
            self._known[key] = kinds, self._asked(kinds)
        return self._known[key]

    def _asked(self, kinds: tuple[VgpuType, ...]) -> frozenset[str]:
        only = self._only
        named = kinds if only is None else [k for n in only for k in types_called(kinds, n)]
        return frozenset(kind.id for kind in named)


def _read_type(tree: HostTree, directory: HostPath) -> VgpuType:
    return describe_type(
        directory.name,
        tree.read(directory / "name") or None,
        tree.read(directory / "description") or None,
        tree.read(directory / "device_api") or None,
    )


def read_mdev(tree: HostTree, uuid: str) -> Vgpu | None:
    """Read an active mediated device; None if there is none with this UUID."""
    directory = tree.resolve(paths.MDEV_DEVICES / uuid)
    return None if directory is None else _read_mdev(tree, uuid, directory, {})


def _read_mdev(
    tree: HostTree,
    uuid: str,
    directory: HostPath,
    names: Mapping[tuple[str, str], str | None],
) -> Vgpu:
    """Read a parent; `names` are the type names read so far, by parent path."""
    parent = directory.parent
    type_id = tree.link_name(directory / "mdev_type") or ""
    name = names.get((parent, type_id))
    if name is None and type_id and (parent, type_id) not in names:
        name = tree.read(parent / TYPES / type_id / "name") or None
    return Vgpu(
        uuid=uuid,
        family="mdev",
        parent=parent.name,
        type=type_id,
        type_name=name,
        driver=tree.link_name(directory / "driver"),
        iommu_group=group_number(tree, directory),
        vfio_device=next(iter(tree.children(directory / "vfio-dev")), None),
        numa_node=tree.read_number(parent / "numa_node"),
    )


DIRECTORY = "nvidia"
CURRENT = "current_vgpu_type"
CREATABLE = "creatable_vgpu_types"
_LINE = expression(r"^\s*([0-9]+)\s*:\s*(\S.*?)\s*$", re.MULTILINE)
"""`1148  : NVIDIA L40S-2Q`; a header has no number."""
_LIMIT = 1 << 16
EMPTY = "0"
_DEVICE_API = "vfio-pci"


def read_vendor_vgpus(
    tree: HostTree, functions: Functions, devices: Iterable[PciDevice]
) -> tuple[tuple[VgpuParent, ...], tuple[Vgpu, ...]]:
    """Read the virtual functions that can be vGPUs, and the active vGPUs."""
    devices = tuple(devices)
    parents: list[VgpuParent] = []
    vgpus: list[Vgpu] = []
    for device in devices:
        if device.physical_function is None or device.driver is None or device.stuck is not None:
            continue
        function = functions.of(str(device.address))
        if DIRECTORY not in function.entries:
            continue
        current = read_current(tree, function.directory)
        if current is None:
            continue
        parents.append(_parent(tree, device))
        if current != EMPTY:
            vgpus.append(function_vgpu(device, "vendor-vfio", current, None))
    gpus = {parent.gpu for parent in parents}
    served = (device for device in devices if str(device.physical_function) in gpus)
    parents += _unlisted(tree, served, tuple(parents), "vendor-vfio")
    # Virtual functions that are no vGPUs still list the names of types.
    names = {known.id: known.name for parent in parents for known in parent.types}
    named = (replace(vgpu, type_name=names.get(vgpu.type)) for vgpu in vgpus)
    return tuple(parents), tuple(named)


def creatable_types(tree: HostTree, directory: HostPath) -> tuple[VgpuType, ...]:
    """The types that a driver offers for a virtual function now; none if it already has a type."""
    text = tree.read_text(directory / DIRECTORY / CREATABLE, _LIMIT) or ""
    return tuple(describe_type(n, name, None, _DEVICE_API) for n, name in _LINE.findall(text))


def read_current(tree: HostTree, directory: HostPath) -> str | None:
    """The number of the current type of a virtual function, `0` for none; None without the file."""
    text = tree.read(directory / DIRECTORY / CURRENT)
    return text.strip() if text and text.strip().isdecimal() else None


def _parent(tree: HostTree, device: PciDevice) -> VgpuParent:
    directory = pci_device(device.address)
    types = creatable_types(tree, directory)
    return VgpuParent(
        name=str(device.address),
        path=tree.resolve(directory) or directory,
        family="vendor-vfio",
        driver=device.driver,
        gpu=str(device.physical_function),
        types=types,
        available=(1,) * len(types),
    )
