"""What a Kata guest boots: the files that its configuration names, and what is seen of them."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

DEFAULT_ROOTFS_TYPE = "ext4"
"""What Kata takes where the configuration does not say (defaultRootfsType, config-settings.go)."""
_SECTOR = 512
_SIGNATURE = b"\x55\xaa"
_FIRST_PARTITION = 0x1BE
_EROFS = (1024, bytes.fromhex("e2e1f5e0"))
_EXT = (1024 + 56, b"\x53\xef")
_XFS = (0, b"XFSB")
FILE_SYSTEMS = {"erofs": _EROFS, "ext4": _EXT, "xfs": _XFS}
"""Where the superblocks of those that the image builder makes have their numbers."""
_SUPERBLOCK = 2048
ReadPart = Callable[[int, int], bytes]
"""The bytes of an image from a place on; fewer where it ends."""


@dataclass(frozen=True, slots=True)
class GuestFile:
    """A file that the configuration names."""

    key: str
    """`kernel`, `image` or `initrd`."""
    path: str
    resolved: str | None
    """Where its links lead; None where there is no such file."""
    size: int = 0
    file_system: str | None = None
    """Of an image: that of its first partition; None where it is not known."""
    is_regular: bool = True

    @property
    def is_for_nvidia(self) -> bool:
        """Whether its name says so: Kata's own builds for GPUs have it in theirs."""
        return "nvidia" in f"{self.path} {self.resolved or ''}".lower()


@dataclass(frozen=True, slots=True)
class GuestImage:
    """What the guest of a configuration is made of."""

    source: str
    """The configuration."""
    hypervisor: str
    files: tuple[GuestFile, ...]
    rootfs_type: str | None
    """As it is set; None for the default."""
    guest_hook_path: str
    vfio_mode: str
    mistyped: tuple[str, ...] = ()
    """What is said of these with values of a wrong type."""

    def file(self, key: str) -> GuestFile | None:
        """The file of a key; None where the configuration names none."""
        return next((file for file in self.files if file.key == key), None)

    @property
    def root(self) -> GuestFile | None:
        """What holds the guest's root file system."""
        return self.file("image") or self.file("initrd")


def file_system_of(read: ReadPart) -> str | None:
    """The file system of an image: in its first partition, or of the whole where it has none.

    tools/osbuilder/image-builder/image_builder.sh: a table of MS-DOS at the start leads to the root
    also where a second one, for DAX, is 2 MiB behind it.
    """
    start = _partition_start(read(0, _SECTOR))
    superblock = read(start, _SUPERBLOCK)
    for name, (offset, magic) in FILE_SYSTEMS.items():
        if superblock[offset : offset + len(magic)] == magic:
            return name
    return None


def _partition_start(sector: bytes) -> int:
    """Where the first partition begins, in bytes; 0 where there is no table."""
    entry = sector[_FIRST_PARTITION : _FIRST_PARTITION + 16]
    if sector[-2:] != _SIGNATURE or len(sector) < _SECTOR or not entry[4]:
        return 0
    (first,) = struct.unpack_from("<I", entry, 8)
    return int(first) * _SECTOR
