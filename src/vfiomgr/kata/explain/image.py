"""The files that a Kata guest boots, and what can be seen in them."""

from __future__ import annotations

import stat
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING

from vfiomgr.paths import HostPath
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree


DEFAULT_ROOTFS_TYPE = "ext4"
"""Kata's default (defaultRootfsType, config-settings.go)."""
_SECTOR = 512
_SIGNATURE = b"\x55\xaa"
_FIRST_PARTITION = 0x1BE
_EROFS = (1024, bytes.fromhex("e2e1f5e0"))
_EXT = (1024 + 56, b"\x53\xef")
_XFS = (0, b"XFSB")
FILE_SYSTEMS = {"erofs": _EROFS, "ext4": _EXT, "xfs": _XFS}
"""The places of superblock numbers, for the file systems of the image builder."""
_SUPERBLOCK = 2048
ReadPart = Callable[[int, int], bytes]
"""Bytes of an image from an offset on; fewer at its end."""


class GuestFile(Value):
    """A file of the configuration."""

    key: str
    """`kernel`, `image` or `initrd`."""
    path: str
    resolved: str | None
    """The target of its links; None if the file does not exist."""
    size: int = 0
    file_system: str | None = None
    """The file system of an image's first partition; None if unknown."""
    is_regular: bool = True

    @property
    def is_for_nvidia(self) -> bool:
        """Whether it is for NVIDIA GPUs, by the naming of Kata's own builds."""
        return "nvidia" in f"{self.path} {self.resolved or ''}".lower()


class GuestImage(Value):
    """The files and settings of a guest."""

    source: str
    """The configuration."""
    hypervisor: str
    files: tuple[GuestFile, ...]
    rootfs_type: str | None
    """As configured; None for the default."""
    guest_hook_path: str
    vfio_mode: str
    mistyped: tuple[tuple[str, str], ...] = ()
    """Keys with values of a wrong type, and what these are: `3, not a string`."""

    def file(self, key: str) -> GuestFile | None:
        """The file of a key; None if it is not set."""
        return next((file for file in self.files if file.key == key), None)

    @property
    def root(self) -> GuestFile | None:
        """The file with the guest's root file system."""
        return self.file("image") or self.file("initrd")


def file_system_of(read: ReadPart) -> str | None:
    """The file system of an image: in its first partition, or in the image without partitions.

    tools/osbuilder/image-builder/image_builder.sh: an MS-DOS partition table at the start leads to
    the root, even if a second one, for DAX, follows 2 MiB later.
    """
    start = _partition_start(read(0, _SECTOR))
    superblock = read(start, _SUPERBLOCK)
    for name, (offset, magic) in FILE_SYSTEMS.items():
        if superblock[offset : offset + len(magic)] == magic:
            return name
    return None


def _partition_start(sector: bytes) -> int:
    """The offset of the first partition in bytes; 0 without a partition table."""
    entry = sector[_FIRST_PARTITION : _FIRST_PARTITION + 16]
    if sector[-2:] != _SIGNATURE or len(sector) < _SECTOR or not entry[4]:
        return 0
    (first,) = struct.unpack_from("<I", entry, 8)
    return int(first) * _SECTOR


def read_guest_file(tree: HostTree, key: str, path: str) -> GuestFile:
    """The state of a file; for an image with its file system."""
    resolved = tree.resolve(HostPath(path)) if path.startswith("/") else None
    status = None if resolved is None else tree.status(resolved)
    if resolved is None or status is None:
        return GuestFile(key, path, None)
    is_regular = stat.S_ISREG(status.st_mode)
    kind = None
    if key == "image" and is_regular:
        kind = file_system_of(lambda start, length: tree.read_part(resolved, start, length))
    return GuestFile(key, path, str(resolved), status.st_size, kind, is_regular)
