"""Finds the PCI functions below a block or network device."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from vfiomgr.paths import HostPath
from vfiomgr.pci.model import PciAddress

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.host.tree import HostTree

BLOCK = HostPath("/sys/class/block")
NETWORK = HostPath("/sys/class/net")
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_NVME_SUBSYSTEM = re.compile(r"/sys/devices/virtual/nvme-subsystem/[^/]+")
"""The subsystems above NVMe namespaces with several paths; their links lead to the controllers."""
_NVME = re.compile(r"nvme\d+")
_NODES = "/dev/"


def functions_below(tree: HostTree, device: HostPath) -> Iterator[PciAddress]:
    """The PCI functions below a block or network device, through bonds, LVM and RAID.

    All functions on its path count: a disk behind a VMD controller depends on both.
    """
    real = tree.resolve(device)
    for address in _ADDRESS.findall(real or ""):
        yield PciAddress.parse(address)
    for lower in (*_lower_devices(tree, device), *_nvme_paths(tree, real or "")):
        yield from functions_below(tree, lower)


def _lower_devices(tree: HostTree, device: HostPath) -> Iterator[HostPath]:
    """The devices below a volume, a RAID, a loop device, a bond or a bridge."""
    for name in tree.children(device / "slaves"):
        yield device / "slaves" / name
    for name in tree.children(device):
        if name.startswith("lower_"):
            yield NETWORK / name.removeprefix("lower_")
    backing = tree.read(device / "loop/backing_file")
    if backing is not None and backing.startswith(_NODES):
        yield from block_device(tree, backing)


def _nvme_paths(tree: HostTree, real: str) -> Iterator[HostPath]:
    """The controllers of a namespace with several paths."""
    if subsystem := _NVME_SUBSYSTEM.match(real):
        paths = HostPath(subsystem[0])
        yield from (paths / name for name in tree.children(paths) if _NVME.fullmatch(name))


def block_device(tree: HostTree, node: str) -> Iterator[HostPath]:
    """The block device of a node below /dev; None if there is no such node."""
    real = tree.resolve(HostPath(node))
    if real is not None:
        yield BLOCK / real.removeprefix(_NODES).replace("/", "!")


def node_of(name: str) -> HostPath:
    """The kernel's node of the block device with this name in sysfs."""
    return HostPath(_NODES + name.replace("!", "/"))
