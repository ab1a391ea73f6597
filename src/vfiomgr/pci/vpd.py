"""Vital product data: the serial number of a board (PCI Local Bus 3.0, appendix I)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.paths import pci_device

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.host.tree import HostTree
    from vfiomgr.pci.model import PciAddress

_LIMIT = 1024
"""Bytes to read: reading is slow (four at a time), and the serial number is near the start."""
_LARGE = 0x80
_READ_ONLY = 0x90
_FIELD_HEADER = 3
_SERIAL = b"SN"
_ASLEEP = "suspended"


def read_serial(tree: HostTree, address: PciAddress) -> str | None:
    """The serial number; None if there is none, the function sleeps, or reading is denied."""
    directory = pci_device(address)
    if tree.read(directory / "power/runtime_status") == _ASLEEP:
        return None
    return serial_of(tree.read_bytes(directory / "vpd", _LIMIT) or b"")


def serial_of(data: bytes) -> str | None:
    """The field SN of the read-only section."""
    for tag, section in _resources(data):
        if tag != _READ_ONLY:
            continue
        for keyword, value in _fields(section):
            if keyword == _SERIAL:
                return value.decode("ascii", errors="replace").strip(" \0") or None
    return None


def _resources(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Tag and content of each large resource, up to the first small one, which is the end."""
    position = 0
    while position + _FIELD_HEADER <= len(data) and data[position] & _LARGE:
        length = int.from_bytes(data[position + 1 : position + _FIELD_HEADER], "little")
        start = position + _FIELD_HEADER
        yield data[position], data[start : start + length]
        position = start + length


def _fields(section: bytes) -> Iterator[tuple[bytes, bytes]]:
    position = 0
    while position + _FIELD_HEADER <= len(section):
        length = section[position + 2]
        start = position + _FIELD_HEADER
        yield section[position : position + 2], section[start : start + length]
        position = start + length
