"""Files with an option ROM: its images, and what makes it useless for a function."""

from __future__ import annotations

import struct
from itertools import takewhile
from typing import TYPE_CHECKING

from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterator

LARGEST = 4 << 20
"""Bytes of a file that are read; the ROMs of graphics cards have up to 2 MiB."""
_LONGEST_HEADER = 256 << 10
"""Bytes before the first image; the headers of dumps have less than 64 KiB."""
_MAGIC = b"\x55\xaa"
_POINTER = struct.Struct("<H")
_POINTER_AT = 0x18
_DATA = struct.Struct("<4sHHHHBxxxHHBB")
"""PCIR: vendor, device, device list, length, revision; blocks, level, code type, indicator."""
_WITH_LIST = 3
"""The first revision of PCIR in which the device list is one."""
_LONGEST_LIST = 128
"""Bytes of a device list, which ends with 0."""
_BLOCK = 512
_LAST = 1 << 7
_EFI = 3


class OptionRom(Value):
    """A ROM (PCI Firmware Specification, chapter "PCI Expansion ROMs")."""

    offset: int | None
    """Where the first image begins, 0 in a ROM that QEMU can use; None if there is none."""
    ids: frozenset[str] = frozenset()
    """The PCI IDs of the functions that it is for: `10de:1b80`."""
    has_efi: bool = False
    """Whether one of its images is for UEFI."""


def parse_rom(data: bytes) -> OptionRom:
    """Parse a file; dumps of some tools have a header before the first image."""
    start = data.find(_MAGIC)
    while start >= 0:
        if images := tuple(_images(data, start)):
            ids = frozenset(one for found, _ in images for one in found)
            return OptionRom(start, ids, any(kind == _EFI for _, kind in images))
        start = data.find(_MAGIC, start + 1, _LONGEST_HEADER)
    return OptionRom(None)


def _images(data: bytes, at: int) -> Iterator[tuple[tuple[str, ...], int]]:
    """The PCI IDs and the code type of each image, up to the last one or a broken one."""
    while data[at : at + 2] == _MAGIC and len(data) >= at + _POINTER_AT + _POINTER.size:
        place = at + _POINTER.unpack_from(data, at + _POINTER_AT)[0]
        if data[place : place + 4] != b"PCIR" or len(data) < place + _DATA.size:
            return
        _, vendor, device, more, _, revision, blocks, _, kind, flags = _DATA.unpack_from(
            data, place
        )
        devices = [device]
        if revision >= _WITH_LIST and more:
            rest = data[place + more : place + more + _LONGEST_LIST]
            numbers = _POINTER.iter_unpack(rest[: len(rest) // 2 * 2])
            devices += takewhile(bool, (number for (number,) in numbers))
        yield tuple(f"{vendor:04x}:{one:04x}" for one in devices), kind
        if flags & _LAST or not blocks:
            return
        at += blocks * _BLOCK
