"""Completion of arguments and options, from what the selected host has.

A function here is what click calls `shell_complete`. What a candidate is (its help) is looked up by
those shells alone that show it. Capabilities with heavy imports have functions of their own.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

from vfiomgr.cli.options import complete_file
from vfiomgr.cli.session import session_of
from vfiomgr.definitions.facts import read_definitions
from vfiomgr.errors import UsageError, VfiomgrError
from vfiomgr.paths import MACHINE, MDEV_DEVICES, PCI_DEVICES, HostPath
from vfiomgr.pci.drivers import PLAIN, read_variants
from vfiomgr.pci.function import identifiers_of
from vfiomgr.pci.model import CLASS_ACCELERATOR, CLASS_BRIDGE, CLASS_DISPLAY, is_address
from vfiomgr.pci.names import Names
from vfiomgr.vgpu.facts import EMPTY, read_current

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import click
    from click.shell_completion import CompletionItem

    from vfiomgr.cli.session import Session
    from vfiomgr.host.tree import HostTree
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.vgpu.model import VgpuType

    Items = list[CompletionItem[str]]
    Describe = Callable[[], str]
    Candidates = Iterable[tuple[str, Describe | None]]
    """Words, each with what says what it is."""

_LIBVIRT = "pci_"
_FIRST = (CLASS_DISPLAY, CLASS_ACCELERATOR)
_ACCOUNTS = (HostPath("/etc/passwd"), HostPath("/etc/group"))


def _host_of(session: Session) -> HostSnapshot:
    """The devices of the host; a snapshot must be a regular file, since a FIFO can block."""
    if session.snapshot is not None and not os.path.isfile(session.snapshot):
        message = f"{session.snapshot} is not a file"
        raise UsageError(message)
    return session.scan_devices()


def continuing(
    context: click.Context, parameter: click.Parameter, incomplete: str, names: Candidates
) -> Items:
    """Those that continue what is typed, without those that an argument has already."""
    from click.shell_completion import CompletionItem  # noqa: PLC0415 - for shells alone

    typed = context.params.get(str(parameter.name)) or ()
    taken = frozenset(typed if isinstance(typed, tuple) else ())
    return [
        CompletionItem(name, describe=describe)
        for name, describe in dict(names).items()
        if name.startswith(incomplete) and name not in taken
    ]


def names_only(names: Iterable[str]) -> Iterator[tuple[str, None]]:
    """Candidates that say themselves what they are."""
    return ((name, None) for name in names)


def complete_host_file(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> Items:
    """Files of the host: below --root."""
    session = session_of(context)
    if session.root == MACHINE:
        return complete_file(context, parameter, incomplete)
    directory = incomplete.rpartition("/")[0]
    if incomplete and not incomplete.startswith("/"):
        return []
    tree = session.files
    paths = (f"{directory}/{name}" for name in tree.children(HostPath(directory or "/")))
    shown = (f"{path}/" if _is_directory(tree, path) else path for path in paths)
    return continuing(context, parameter, incomplete, names_only(shown))


def _is_directory(tree: HostTree, path: str) -> bool:
    real = tree.resolve(HostPath(path))
    status = None if real is None else tree.status(real)
    return status is not None and stat.S_ISDIR(status.st_mode)


def complete_address(context: click.Context, parameter: click.Parameter, incomplete: str) -> Items:
    """Addresses of the host's functions, as far as one is typed in the same way.

    In full, without the domain where that is plain, as libvirt writes them, or as a path.
    """
    if incomplete.startswith("/"):
        return complete_file(context, parameter, incomplete)
    names = dict(_functions(session_of(context)))
    return _addresses(context, parameter, incomplete, names)


def complete_assignable(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> Items:
    """Addresses of functions for guests: GPUs and accelerators first, no bridges."""
    if incomplete.startswith("/"):
        return complete_file(context, parameter, incomplete)
    session = session_of(context)
    codes = dict(_class_codes(session))
    names = dict(_functions(session))
    kept = [name for name in names if not codes.get(name, "").startswith(CLASS_BRIDGE)]
    kept.sort(key=lambda name: not codes.get(name, "").startswith(_FIRST))
    return _addresses(context, parameter, incomplete, {name: names[name] for name in kept})


def _class_codes(session: Session) -> Iterator[tuple[str, str]]:
    """The class of each function, without its leading 0x."""
    if session.snapshot is not None:
        yield from ((str(d.address), d.class_code) for d in _host_of(session).devices)
        return
    for address in _listed(session.tree):
        code = session.tree.read(PCI_DEVICES / address / "class") or ""
        yield address, code.removeprefix("0x")


def _addresses(
    context: click.Context,
    parameter: click.Parameter,
    incomplete: str,
    names: dict[str, Describe | None],
) -> Items:
    found = continuing(context, parameter, incomplete, names.items())
    if found:
        return found
    if incomplete.startswith(_LIBVIRT):
        named = ((_in_libvirt(name), describe) for name, describe in names.items())
        return continuing(context, parameter, incomplete, named)
    counted = Counter(_without_domain(name) for name in names)
    short = ((_without_domain(name), describe) for name, describe in names.items())
    plain = ((name, describe) for name, describe in short if counted[name] == 1)
    return continuing(context, parameter, incomplete, plain)


def _without_domain(name: str) -> str:
    return name.partition(":")[2] or name


def _in_libvirt(name: str) -> str:
    return _LIBVIRT + name.replace(":", "_").replace(".", "_")


def _functions(session: Session) -> Iterator[tuple[str, Describe | None]]:
    """All functions by address, and what they are."""
    if session.snapshot is not None:
        for device in _host_of(session).devices:
            yield str(device.address), partial(_named, device.name, device.driver)
        return
    names = Names(session.tree, session.machine)
    for address in _listed(session.tree):
        yield address, partial(_described, session.tree, names, address)


def _listed(tree: HostTree) -> list[str]:
    found = filter(is_address, tree.children(PCI_DEVICES))
    return sorted(found, key=lambda name: (len(name), name))


def _described(tree: HostTree, names: Names, address: str) -> str:
    directory = PCI_DEVICES / address
    found = identifiers_of(tree, directory, tree.read(directory / "modalias"))
    if found is None:
        return ""
    name, _ = names.of(directory, found.vendor_id, found.device_id, found.class_code)
    return _named(name, tree.link_name(directory / "driver"))


def _named(name: str, driver: str | None) -> str:
    return f"{name} ({driver or 'no driver'})"


def complete_gpu(context: click.Context, parameter: click.Parameter, incomplete: str) -> Items:
    """Addresses of GPUs and accelerators, without their virtual functions."""
    host = _host_of(session_of(context))
    names: dict[str, Describe | None] = {
        str(device.address): partial(_named, device.name, device.driver)
        for device in host.devices
        if device.class_code.startswith((CLASS_DISPLAY, CLASS_ACCELERATOR))
        and device.physical_function is None
    }
    return _addresses(context, parameter, incomplete, names)


def complete_sriov(context: click.Context, parameter: click.Parameter, incomplete: str) -> Items:
    """Addresses of functions with SR-IOV, and of the virtual ones that there are."""
    names: dict[str, Describe | None] = {
        str(device.address): partial(_named, device.name, device.driver)
        for device in _host_of(session_of(context)).devices
        if device.sriov_totalvfs or device.physical_function
    }
    return _addresses(context, parameter, incomplete, names)


def complete_vgpu(context: click.Context, parameter: click.Parameter, incomplete: str) -> Items:
    """Active vGPUs: UUIDs, and addresses of virtual functions that are vGPUs."""
    return _addresses(context, parameter, incomplete, dict(_vgpus(session_of(context))))


def _vgpus(session: Session) -> Iterator[tuple[str, Describe | None]]:
    if session.snapshot is not None:
        for vgpu in _host_of(session).vgpus:
            yield vgpu.name, partial(str, vgpu.type_name or vgpu.type)
        return
    tree = session.tree
    for uuid in tree.children(MDEV_DEVICES):
        yield uuid, partial(_type_of, tree, uuid)
    for address in _listed(tree):
        if (read_current(tree, PCI_DEVICES / address) or EMPTY) != EMPTY:
            yield address, None


def _type_of(tree: HostTree, uuid: str) -> str:
    directory = MDEV_DEVICES / uuid
    kind = tree.link_name(directory / "mdev_type") or ""
    return (tree.read(directory / "mdev_type/name") or kind) if kind else ""


def complete_device(context: click.Context, parameter: click.Parameter, incomplete: str) -> Items:
    """Addresses, and UUIDs of vGPUs."""
    session = session_of(context)
    vgpus = continuing(context, parameter, incomplete, _vgpus(session))
    addresses = complete_address(context, parameter, incomplete)
    listed = {item.value for item in vgpus}
    return [*vgpus, *(item for item in addresses if item.value not in listed)]


def complete_device_or_file(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> Items:
    """Files, and where there is a host, addresses and UUIDs of vGPUs."""
    try:
        devices = complete_device(context, parameter, incomplete)
    except VfiomgrError:
        devices = []
    files = complete_file(context, parameter, incomplete)
    return files + [item for item in devices if item.type != "file"]


def complete_board(context: click.Context, parameter: click.Parameter, incomplete: str) -> Items:
    """Addresses, or all boards."""
    every = continuing(context, parameter, incomplete, names_only(("all",)))
    return every + complete_address(context, parameter, incomplete)


def complete_definition(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> Items:
    """Defined vGPUs: UUIDs, and addresses of virtual functions."""
    session = session_of(context)
    if session.snapshot is not None:
        defined = _host_of(session).defined
    else:
        defined = read_definitions(session.tree, ())
    names: dict[str, Describe | None] = {
        vgpu.uuid: partial(str, f"{vgpu.type_id} on {vgpu.parent}") for vgpu in defined.vgpus
    }
    for gpu in defined.gpus:
        names |= {str(one.address): partial(str, one) for one in gpu.vgpus}
    return _addresses(context, parameter, incomplete, names)


def complete_defined_or_active(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> Items:
    """Active and defined vGPUs."""
    active = complete_vgpu(context, parameter, incomplete)
    listed = {item.value for item in active}
    defined = complete_definition(context, parameter, incomplete)
    return [*active, *(item for item in defined if item.value not in listed)]


def complete_parent(context: click.Context, parameter: click.Parameter, incomplete: str) -> Items:
    """Where vGPUs can be made: GPUs, then virtual functions and other devices."""
    host = _host_of(session_of(context))
    known = {str(device.address): device for device in host.devices}
    parents = host.vgpu_parents
    names: dict[str, Describe | None] = dict.fromkeys(
        (*(parent.gpu for parent in parents), *(parent.name for parent in parents))
    )
    for name in names:
        if name in known:
            names[name] = partial(_named, known[name].name, known[name].driver)
    return _addresses(context, parameter, incomplete, names)


def complete_type(context: click.Context, parameter: click.Parameter, incomplete: str) -> Items:
    """Types of vGPUs, of the typed --parent alone: by name, or as far as an identifier is typed."""
    parents = _host_of(session_of(context)).vgpu_parents
    wanted = str(context.params.get("parent") or "")
    chosen = [p for p in parents if wanted in _names_of_place(p.name, p.gpu)] if wanted else parents
    kinds = {kind.id: kind for parent in chosen for kind in parent.types}.values()
    for name_of in (_type_name, _type_identifier, _type_model):
        names = ((name_of(kind), partial(_type_help, kind)) for kind in kinds)
        found = continuing(context, parameter, incomplete, names)
        if found:
            return found
    return []


def _names_of_place(*names: str) -> set[str]:
    return {*names, *map(_without_domain, names)}


def _type_name(kind: VgpuType) -> str:
    return kind.short_name or kind.id


def _type_identifier(kind: VgpuType) -> str:
    return kind.id


def _type_model(kind: VgpuType) -> str:
    return kind.name or kind.id


def _type_help(kind: VgpuType) -> str:
    memory = f"{kind.framebuffer} MiB" if kind.framebuffer else ""
    return ", ".join(filter(None, (kind.name and str(kind), memory)))


def complete_numa_node(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> Items:
    """NUMA nodes that devices are on."""
    devices = _host_of(session_of(context)).devices
    nodes = sorted({d.numa_node for d in devices if d.numa_node is not None})
    return continuing(context, parameter, incomplete, names_only(map(str, nodes)))


def complete_driver(context: click.Context, parameter: click.Parameter, incomplete: str) -> Items:
    """Drivers that devices are bound to, and `none` if one has no driver."""
    devices = _host_of(session_of(context)).devices
    names = sorted({d.driver or "none" for d in devices})
    return continuing(context, parameter, incomplete, names_only(names))


def complete_group(context: click.Context, parameter: click.Parameter, incomplete: str) -> Items:
    """IOMMU groups."""
    devices = _host_of(session_of(context)).devices
    groups = sorted({d.iommu_group for d in devices if d.iommu_group is not None})
    return continuing(context, parameter, incomplete, names_only(map(str, groups)))


def complete_vendor(context: click.Context, parameter: click.Parameter, incomplete: str) -> Items:
    """IDs and short names of the vendors of devices."""
    devices = _host_of(session_of(context)).devices
    names = {d.short_name.partition(" ")[0].casefold() for d in devices}
    words = sorted({d.vendor_id for d in devices}) + sorted(names - {"device"})
    return continuing(context, parameter, incomplete.casefold(), names_only(words))


def complete_vfio_driver(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> Items:
    """vfio-pci, and the variant drivers of the kernel."""
    session = session_of(context)
    variants = () if session.snapshot is not None else read_variants(session.tree)
    names = (PLAIN, *(variant.driver_name for variant in variants))
    return continuing(context, parameter, incomplete, names_only(names))


def complete_owner(context: click.Context, parameter: click.Parameter, incomplete: str) -> Items:
    """USER, or GROUP after a colon."""
    session = session_of(context)
    if session.snapshot is not None:
        return []
    users, groups = (session.files.read_text(place) or "" for place in _ACCOUNTS)
    user, colon, _ = incomplete.partition(":")
    names = (line.partition(":")[0] for line in (groups if colon else users).splitlines())
    words = (f"{user}:{name}" if colon else name for name in names if name)
    return continuing(context, parameter, incomplete, names_only(words))
