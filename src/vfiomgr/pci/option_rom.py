"""Files with an option ROM: its images, and what makes it useless for a function."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import takewhile

from vfiomgr.value import Value

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
BLOCK = 512
"""The unit of sizes in bytes."""
_LAST = 1 << 7
BIOS, EFI = 0, 3
"""The code types of images for a BIOS and for UEFI."""
_EFI_SIGNATURE = b"\xf1\x0e\0\0"
_MACHINE_AT = 0x0A
"""Where an image for UEFI has its machine type (UEFI Specification, "EFI PCI Expansion ROM")."""


class RomImage(Value):
    """One image of a ROM; offset and size in bytes."""

    offset: int
    """From the beginning of the file."""
    size: int
    """According to its PCI data structure."""
    code_type: int
    """0 for a BIOS, 3 for UEFI; NVIDIA's own are 0x70 and 0xe0."""
    device_ids: tuple[str, ...]
    """The PCI IDs of the functions that it is for: `10de:1b80`."""
    is_last: bool
    """Whether it is marked as the last image."""
    machine: int | None = None
    """For UEFI: the machine type of its code (PE/COFF): 0x8664, 0xaa64."""


class OptionRom(Value):
    """A ROM (PCI Firmware Specification, chapter "PCI Expansion ROMs")."""

    offset: int | None
    """Where the first image begins, 0 in a ROM that QEMU can use; None if there is none."""
    images: tuple[RomImage, ...] = ()

    @property
    def ids(self) -> frozenset[str]:
        """The PCI IDs of the functions that it is for: `10de:1b80`."""
        return frozenset(one for image in self.images for one in image.device_ids)

    @property
    def has_efi(self) -> bool:
        """Whether one of its images is for UEFI."""
        return any(image.code_type == EFI for image in self.images)


def parse_rom(data: bytes) -> OptionRom:
    """Parse a file; dumps of some tools have a header before the first image."""
    start = data.find(_MAGIC)
    while start >= 0:
        if images := tuple(_images(data, start)):
            return OptionRom(start, images)
        start = data.find(_MAGIC, start + 1, _LONGEST_HEADER)
    return OptionRom(None)


def _images(data: bytes, at: int) -> Iterator[RomImage]:
    """The images up to the last one or a broken one."""
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
        names = tuple(f"{vendor:04x}:{one:04x}" for one in devices)
        is_efi = kind == EFI and data[at + 4 : at + 8] == _EFI_SIGNATURE
        machine = _POINTER.unpack_from(data, at + _MACHINE_AT)[0] if is_efi else None
        yield RomImage(at, blocks * BLOCK, kind, names, bool(flags & _LAST), machine)
        if flags & _LAST or not blocks:
            return
        at += blocks * BLOCK
