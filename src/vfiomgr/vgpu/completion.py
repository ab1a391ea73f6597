"""Completion of vGPUs, their types and their parents, from what the selected host has."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from vfiomgr.cli.options import complete_file, continuing
from vfiomgr.errors import VfiomgrError
from vfiomgr.paths import MDEV_DEVICES, PCI_DEVICES
from vfiomgr.snapshot.completion import (
    complete_address,
    complete_addresses,
    described,
    devices_of,
    listed_addresses,
    without_domain,
)
from vfiomgr.snapshot.session import Session, session_of
from vfiomgr.vgpu.facts import EMPTY, read_current

if TYPE_CHECKING:
    import click

    from vfiomgr.cli.options import Describe, Items
    from vfiomgr.host.tree import HostTree
    from vfiomgr.vgpu.model import VgpuType


def complete_vgpu(context: click.Context, parameter: click.Parameter, incomplete: str) -> Items:
    """Active vGPUs: UUIDs, and addresses of virtual functions that are vGPUs."""
    return complete_addresses(context, parameter, incomplete, dict(_vgpus(session_of(context))))


def _vgpus(session: Session) -> Iterator[tuple[str, Describe | None]]:
    if session.snapshot is not None:
        for vgpu in devices_of(session).vgpus.active:
            yield vgpu.name, partial(str, vgpu.type_name or vgpu.type)
        return
    tree = session.tree
    for uuid in tree.children(MDEV_DEVICES):
        yield uuid, partial(_type_of, tree, uuid)
    for address in listed_addresses(tree):
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


def complete_parent(context: click.Context, parameter: click.Parameter, incomplete: str) -> Items:
    """Where vGPUs can be made: GPUs, then virtual functions and other devices."""
    host = devices_of(session_of(context))
    known = {str(device.address): device for device in host.devices}
    parents = host.vgpus.parents
    names: dict[str, Describe | None] = dict.fromkeys(
        (*(parent.gpu for parent in parents), *(parent.name for parent in parents))
    )
    for name in names:
        if name in known:
            names[name] = partial(described, known[name].name, known[name].driver)
    return complete_addresses(context, parameter, incomplete, names)


def complete_type(context: click.Context, parameter: click.Parameter, incomplete: str) -> Items:
    """Types of vGPUs, of the typed --parent alone: by name, or as far as an identifier is typed."""
    parents = devices_of(session_of(context)).vgpus.parents
    wanted = str(context.params.get("parent") or "")
    chosen = []
    for parent in parents:
        places = {parent.name, parent.gpu}
        if not wanted or wanted in places | set(map(without_domain, places)):
            chosen.append(parent)
    kinds = list({kind.id: kind for parent in chosen for kind in parent.types}.values())
    helps = [partial(_type_help, kind) for kind in kinds]
    for forms in (
        [kind.short_name or kind.id for kind in kinds],
        [kind.id for kind in kinds],
        [kind.name or kind.id for kind in kinds],
    ):
        named = zip(forms, helps, strict=True)
        if found := continuing(context, parameter, incomplete, named):
            return found
    return []


def _type_help(kind: VgpuType) -> str:
    memory = f"{kind.framebuffer} MiB" if kind.framebuffer else ""
    return ", ".join(filter(None, (kind.name and str(kind), memory)))
