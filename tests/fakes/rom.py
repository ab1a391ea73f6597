"""Option ROMs: what `rom` of a function answers, and images to put there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.fakes.sysfs import READ_WRITE, UNASSIGNED, Sysfs, read_file

if TYPE_CHECKING:
    from tests.fakes.functions import Functions
    from vfiomgr.paths import HostPath


class Roms:
    """The attribute `rom`, by functions that have one.

    pci_write_rom (drivers/pci/pci-sysfs.c) disables reading for "0", and enables it for all else;
    pci_read_rom then answers, and EINVAL before.
    """

    def __init__(self, sysfs: Sysfs, functions: Functions) -> None:
        self._sysfs = sysfs
        self._functions = functions

    def add(self, address: str, data: bytes) -> None:
        """Give a function a ROM, which is not readable yet."""
        directory = self._functions.directory(address)
        assert directory is not None
        self._sysfs.put_bytes(directory / "rom", data, READ_WRITE | UNASSIGNED)

    def enable(self, directory: HostPath, text: str) -> None:
        """Enable or disable reading."""
        data = read_file(self._sysfs.real(directory / "rom"))
        is_off = text in ("0", "0\n")
        self._sysfs.put_bytes(
            directory / "rom", data, READ_WRITE | UNASSIGNED if is_off else READ_WRITE
        )


def rom_image(
    ids: str = "10de:25b6",
    kind: int = 3,
    last: int = 0x80,
    devices: bytes = b"",
    machine: int | None = None,
) -> bytes:
    """An image of one block, with its PCI data structure at 0x1c, whose bytes add up to 0."""
    vendor, device = (int(one, 16).to_bytes(2, "little") for one in ids.split(":"))
    data = b"PCIR" + vendor + device + bytes((24 if devices else 0, 0, 24, 0, 3, 0, 0, 3))
    data += bytes((1, 0, 0, 0, kind, last, 0, 0)) + devices
    head = b"\x55\xaa\x01"
    if machine is not None:
        head += b"\0\xf1\x0e\0\0\x0b\0" + machine.to_bytes(2, "little")
    whole = (head.ljust(0x18, b"\0") + b"\x1c\0\0\0" + data).ljust(511, b"\0")
    return whole + bytes((-sum(whole) % 256,))
