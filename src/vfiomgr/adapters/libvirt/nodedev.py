"""Mediated devices as libvirt knows them (https://libvirt.org/formatnode.html)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vfiomgr.model.pci import PciAddress

_PCI = re.compile(r"pci_([0-9a-f]{4,8})_([0-9a-f]{2})_([0-9a-f]{2})_([0-7])")


@dataclass(frozen=True, slots=True)
class MdevState:
    """What libvirt says of a mediated device besides its XML."""

    is_active: bool
    is_defined: bool
    starts_by_itself: bool | None
    """None where libvirt does not tell, as on a connection for reading."""


@dataclass(frozen=True, slots=True)
class NodeMdev:
    """A mediated device; libvirt's own name of it varies with its release, the UUID does not."""

    name: str
    uuid: str
    type: str
    parent: str
    """An address; of a parent that is no PCI function libvirt's name."""
    state: MdevState


def parent_name(parent: PciAddress) -> str:
    """What libvirt calls a PCI function: `pci_0000_65_00_0`."""
    return f"pci_{re.sub('[:.]', '_', str(parent))}"


def read_mdev(xml: str, state: MdevState) -> NodeMdev | None:
    """What libvirt prints of a mediated device; None of one that it says no UUID of."""
    root = ET.fromstring(xml)  # noqa: S314 - of the daemon that runs the guests
    capability = root.find("capability[@type='mdev']")
    uuid = None if capability is None else capability.findtext("uuid")
    kind = None if capability is None else capability.find("type")
    if uuid is None or kind is None:
        return None
    return NodeMdev(
        name=root.findtext("name", ""),
        uuid=uuid.strip().lower(),
        type=kind.get("id", ""),
        parent=_parent(root.findtext("parent", "")),
        state=state,
    )


def _parent(name: str) -> str:
    found = _PCI.fullmatch(name)
    return f"{found[1]}:{found[2]}:{found[3]}.{found[4]}" if found else name


def find_mdev(mdevs: Iterable[NodeMdev], uuid: str) -> NodeMdev | None:
    """The one with a UUID."""
    return next((mdev for mdev in mdevs if mdev.uuid == uuid.lower()), None)
