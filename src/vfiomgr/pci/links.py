"""Links of PCI Express: how fast and wide they run, and how fast and wide they can run."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from vfiomgr.paths import pci_device
from vfiomgr.pci.model import PciAddress
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vfiomgr.host.tree import HostTree
    from vfiomgr.paths import HostPath
    from vfiomgr.pci.model import PciDevice

_SPEED = re.compile(r"(\d{1,3}(?:\.\d{1,2})?) GT/s(?: PCIe)?")
_WIDEST = 32
"""Lanes; `max_link_width` of a function without a link reads 255 (PCIE_LNK_WIDTH_UNKNOWN)."""
_ASLEEP = "suspended"


class PciLink(Value):
    """The link of a function: of a port that leads down, the one below it; else the one above it.

    Speeds are in GT/s, widths in lanes; None where there is no link, or the kernel does not know.
    """

    address: PciAddress
    speed: float | None
    width: int | None
    max_speed: float | None
    max_width: int | None


def read_links(tree: HostTree, devices: Iterable[PciDevice]) -> tuple[PciLink, ...]:
    """The links of physical functions that are awake.

    Reading the attributes wakes a function that is suspended (current_link_speed_show in
    drivers/pci/pci-sysfs.c), and the registers of a virtual function are zero (SR-IOV 1.1, 3.5).
    """
    found = (
        _read_link(tree, device.address)
        for device in devices
        if device.physical_function is None
        and device.stuck is None
        and device.is_responsive
        and device.runtime_status != _ASLEEP
    )
    return tuple(link for link in found if link is not None)


def _read_link(tree: HostTree, address: PciAddress) -> PciLink | None:
    directory = pci_device(address)
    width = _width(tree.read(directory / "max_link_width"))
    if width is None:
        return None
    return PciLink(
        address=address,
        speed=_speed(tree, directory / "current_link_speed"),
        width=_width(tree.read(directory / "current_link_width")),
        max_speed=_speed(tree, directory / "max_link_speed"),
        max_width=width,
    )


def _speed(tree: HostTree, path: HostPath) -> float | None:
    """Of `8.0 GT/s PCIe`, and of `8 GT/s` before Linux 5.7; `Unknown` is None."""
    match = _SPEED.fullmatch(tree.read(path) or "")
    return float(match[1]) if match else None


def _width(text: str | None) -> int | None:
    lanes = int(text) if text is not None and text.isdecimal() else 0
    return lanes if 0 < lanes <= _WIDEST else None
