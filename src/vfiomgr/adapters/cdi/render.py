"""A CDI specification (https://github.com/cncf-tags/container-device-interface SPEC.md)."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from vfiomgr.errors import UsageError
from vfiomgr.model import path

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vfiomgr.model.iommu import IommuGroup
    from vfiomgr.model.pci import PciDevice
    from vfiomgr.model.snapshot import HostSnapshot

DEFAULT_KIND = "vfiomgr.io/vfio"
_KIND = re.compile(r"[A-Za-z]([A-Za-z0-9_.-]*[A-Za-z0-9])?/[A-Za-z]([A-Za-z0-9_.-]*[A-Za-z0-9])?")
_VERSION = "0.5.0"
_VERSION_WITH_DOTTED_CLASS = "0.6.0"
"""Kata's Go runtime reads with CDI 0.6.0, so nothing newer is written."""


def render_spec(host: HostSnapshot, kind: str) -> str:
    """The specification of all VFIO groups that a guest can take, as JSON.

    Virtual functions that the vendor's own driver has made vGPUs are among them.

    A device is one IOMMU group, named by the address of its first display or accelerator
    function (of its first function where there is none), since a group goes to one guest whole.

    Raises:
        UsageError: the kind is not `vendor/class`.

    """
    if not _KIND.fullmatch(kind):
        message = f"{kind!r} is no CDI kind"
        raise UsageError(message, "write it as vendor/class, e.g. nvidia.com/pgpu")
    dotted = "." in kind.partition("/")[2]
    document = {
        "cdiVersion": _VERSION_WITH_DOTTED_CLASS if dotted else _VERSION,
        "kind": kind,
        "devices": [
            _device(group.number, functions) for group, functions in guest_ready_groups(host)
        ],
    }
    return json.dumps(document, indent=2) + "\n"


def guest_ready_groups(
    host: HostSnapshot,
) -> Iterable[tuple[IommuGroup, tuple[PciDevice, ...]]]:
    """The groups that a guest can take whole, with the functions that it gets.

    One function that is no vGPU yet spoils a group: Kata opens all that is in it, and the vendor's
    driver answers ENODEV there.
    """
    for group in host.groups:
        members = host.group_members(group.number)
        functions = tuple(device for device in members if host.is_ready_for_guests(device))
        if any(d not in functions and host.is_vendor_function(d) for d in members):
            continue
        if functions and host.is_viable(group.number) and not group.is_noiommu:
            yield group, functions


def _device(group: int, functions: Sequence[PciDevice]) -> dict[str, object]:
    first = next((d for d in functions if d.is_graphics_or_accelerator), functions[0])
    nodes = [str(path.VFIO_NODES / "vfio"), str(path.vfio_group_node(group))]
    return {
        "name": str(first.address),
        "containerEdits": {"deviceNodes": [{"path": node} for node in nodes]},
    }
