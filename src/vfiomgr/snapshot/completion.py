"""Completion of arguments and options, from what the selected host has.

A function here is what click calls `shell_complete`. What a candidate is (its help) is looked up by
those shells alone that show it.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from vfiomgr.cli.options import complete_file, continuing, names_only
from vfiomgr.errors import UsageError
from vfiomgr.paths import MACHINE, PCI_DEVICES, HostPath
from vfiomgr.pci.bars import BarSize
from vfiomgr.pci.drivers import PLAIN, read_variants
from vfiomgr.pci.function import identifiers_of
from vfiomgr.pci.model import CLASS_ACCELERATOR, CLASS_BRIDGE, CLASS_DISPLAY, is_address
from vfiomgr.pci.names import Names
from vfiomgr.snapshot.session import Session, session_of

if TYPE_CHECKING:
    import click

    from vfiomgr.cli.options import Describe, Items
    from vfiomgr.host.tree import HostTree
    from vfiomgr.snapshot.model import HostSnapshot

_LIBVIRT = "pci_"
_FIRST = (CLASS_DISPLAY, CLASS_ACCELERATOR)
_ACCOUNTS = (HostPath("/etc/passwd"), HostPath("/etc/group"))


def devices_of(session: Session) -> HostSnapshot:
    """The devices of the host; a snapshot must be a regular file, since a FIFO can block."""
    if session.snapshot is not None and not os.path.isfile(session.snapshot):
        message = f"{session.snapshot} is not a file"
        raise UsageError(message)
    return session.scan_devices()


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
    return complete_addresses(context, parameter, incomplete, names)


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
    return complete_addresses(context, parameter, incomplete, {name: names[name] for name in kept})


def _class_codes(session: Session) -> Iterator[tuple[str, str]]:
    """The class of each function, without its leading 0x."""
    if session.snapshot is not None:
        yield from ((str(d.address), d.class_code) for d in devices_of(session).devices)
        return
    for address in listed_addresses(session.tree):
        code = session.tree.read(PCI_DEVICES / address / "class") or ""
        yield address, code.removeprefix("0x")


def complete_addresses(
    context: click.Context,
    parameter: click.Parameter,
    incomplete: str,
    names: dict[str, Describe | None],
) -> Items:
    """Of these addresses, and other names, those that continue what is typed, in the same form."""
    found = continuing(context, parameter, incomplete, names.items())
    if found:
        return found
    if incomplete.startswith(_LIBVIRT):
        named = ((_in_libvirt(name), describe) for name, describe in names.items())
        return continuing(context, parameter, incomplete, named)
    counted = Counter(without_domain(name) for name in names)
    short = ((without_domain(name), describe) for name, describe in names.items())
    plain = ((name, describe) for name, describe in short if counted[name] == 1)
    return continuing(context, parameter, incomplete, plain)


def without_domain(name: str) -> str:
    """An address without its domain."""
    return name.partition(":")[2] or name


def _in_libvirt(name: str) -> str:
    return _LIBVIRT + name.replace(":", "_").replace(".", "_")


def _functions(session: Session) -> Iterator[tuple[str, Describe | None]]:
    """All functions by address, and what they are."""
    if session.snapshot is not None:
        for device in devices_of(session).devices:
            yield str(device.address), partial(described, device.name, device.driver)
        return
    names = Names(session.tree, session.machine)
    for address in listed_addresses(session.tree):
        yield address, partial(_described, session.tree, names, address)


def listed_addresses(tree: HostTree) -> list[str]:
    """The addresses of all functions, sorted."""
    found = filter(is_address, tree.children(PCI_DEVICES))
    return sorted(found, key=lambda name: (len(name), name))


def _described(tree: HostTree, names: Names, address: str) -> str:
    directory = PCI_DEVICES / address
    found = identifiers_of(tree, directory, tree.read(directory / "modalias"))
    if found is None:
        return ""
    name, _ = names.of(directory, found.vendor_id, found.device_id, found.class_code)
    return described(name, tree.link_name(directory / "driver"))


def described(name: str, driver: str | None) -> str:
    """What a function is: its name, and its driver."""
    return f"{name} ({driver or 'no driver'})"


def complete_gpu(context: click.Context, parameter: click.Parameter, incomplete: str) -> Items:
    """Addresses of GPUs and accelerators, without their virtual functions."""
    host = devices_of(session_of(context))
    names: dict[str, Describe | None] = {
        str(device.address): partial(described, device.name, device.driver)
        for device in host.devices
        if device.class_code.startswith((CLASS_DISPLAY, CLASS_ACCELERATOR))
        and device.physical_function is None
    }
    return complete_addresses(context, parameter, incomplete, names)


def complete_sriov(context: click.Context, parameter: click.Parameter, incomplete: str) -> Items:
    """Addresses of functions with SR-IOV, and of the virtual ones that there are."""
    names: dict[str, Describe | None] = {
        str(device.address): partial(described, device.name, device.driver)
        for device in devices_of(session_of(context)).devices
        if device.sriov_totalvfs or device.physical_function
    }
    return complete_addresses(context, parameter, incomplete, names)


def complete_board(context: click.Context, parameter: click.Parameter, incomplete: str) -> Items:
    """Addresses, or all boards."""
    every = continuing(context, parameter, incomplete, names_only(("all",)))
    return every + complete_address(context, parameter, incomplete)


def complete_numa_node(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> Items:
    """NUMA nodes that devices are on."""
    devices = devices_of(session_of(context)).devices
    nodes = sorted({d.numa_node for d in devices if d.numa_node is not None})
    return continuing(context, parameter, incomplete, names_only(map(str, nodes)))


def complete_driver(context: click.Context, parameter: click.Parameter, incomplete: str) -> Items:
    """Drivers that devices are bound to, and `none` if one has no driver."""
    devices = devices_of(session_of(context)).devices
    names = sorted({d.driver or "none" for d in devices})
    return continuing(context, parameter, incomplete, names_only(names))


def complete_group(context: click.Context, parameter: click.Parameter, incomplete: str) -> Items:
    """IOMMU groups."""
    devices = devices_of(session_of(context)).devices
    groups = sorted({d.iommu_group for d in devices if d.iommu_group is not None})
    return continuing(context, parameter, incomplete, names_only(map(str, groups)))


def complete_vendor(context: click.Context, parameter: click.Parameter, incomplete: str) -> Items:
    """IDs and short names of the vendors of devices."""
    devices = devices_of(session_of(context)).devices
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


def complete_bar(context: click.Context, parameter: click.Parameter, incomplete: str) -> Items:
    """The sizes of the resizable BARs of the devices that are named, or of all devices."""
    session = session_of(context)
    named: tuple[str, ...] = context.params.get("addresses") or ()
    devices = devices_of(session).devices
    if named:
        wanted = set(map(str, session.addresses(named)))
        devices = tuple(device for device in devices if str(device.address) in wanted)
    sizes = (str(BarSize(b.index, size)) for d in devices for b in d.bars for size in b.sizes or ())
    return continuing(context, parameter, incomplete, names_only(dict.fromkeys(sizes)))


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
