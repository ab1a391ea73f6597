"""Uses of disks of PCI functions: file systems, swap, volumes, exports."""

from __future__ import annotations

import os
import time
import warnings
from functools import partial
from shlex import quote
from typing import TYPE_CHECKING, Final

from vfiomgr.host import bounded
from vfiomgr.paths import HostPath
from vfiomgr.snapshot.model import HostUse
from vfiomgr.snapshot.uses.below import BLOCK, block_device, functions_below, node_of
from vfiomgr.snapshot.uses.mounts import PROC, read_mounts
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from vfiomgr.host.tree import HostTree
    from vfiomgr.pci.model import PciAddress
    from vfiomgr.snapshot.uses.mounts import Mount


_ZFS = PROC / "spl/kstat/zfs"
_BTRFS = HostPath("/sys/fs/btrfs")
_BLOCK_NUMBERS = HostPath("/sys/dev/block")
_EXPORTS = HostPath("/sys/kernel/config/nvmet/subsystems")
_KIND: Final = "mounted-disk"


def read_disk_uses(tree: HostTree, *, everywhere: bool) -> tuple[HostUse, ...]:
    """The uses of disks; `everywhere` reads the mount namespaces of all processes, as root."""
    direct = (*_mounted(tree, everywhere=everywhere), *_swaps(tree), *_exported(tree))
    uses = tuple(dict.fromkeys(direct))
    used = {use.address for use in uses}
    volumes = dict.fromkeys(use for use in _volume_uses(tree) if use.address not in used)
    return (*uses, *volumes)


def _mounted(tree: HostTree, *, everywhere: bool) -> Iterator[HostUse]:
    for mount in read_mounts(tree, everywhere=everywhere):
        for device in _mounted_device(tree, mount):
            for address in functions_below(tree, device):
                yield HostUse(address, _KIND, mount.what, mount.lift)


def _mounted_device(tree: HostTree, mount: Mount) -> Iterator[HostPath]:
    """The block device of a mount.

    Its node in another namespace may be another device here, so its number is tried first there.
    """
    number = None if mount.number is None else _BLOCK_NUMBERS / mount.number
    has_number = number is not None and tree.exists(number)
    if mount.pid is not None and number is not None and has_number:
        yield number
    elif mount.source.startswith("/dev/"):
        found = tuple(block_device(tree, mount.source))
        yield from found or ([number] if number is not None else [])


def _swaps(tree: HostTree) -> Iterator[HostUse]:
    for line in (tree.read_text(PROC / "swaps") or "").splitlines()[1:]:
        for source in line.split()[:1]:
            for device in block_device(tree, source) if source.startswith("/dev/") else ():
                for address in functions_below(tree, device):
                    yield HostUse(address, _KIND, f"{source} as swap", f"swapoff {quote(source)}")


def _exported(tree: HostTree) -> Iterator[HostUse]:
    """Disks that this kernel exports over NVMe-oF, without a claim (nvmet)."""
    for subsystem in tree.children(_EXPORTS):
        namespaces = _EXPORTS / subsystem / "namespaces"
        for number in tree.children(namespaces):
            source = tree.read(namespaces / number / "device_path") or ""
            enable = namespaces / number / "enable"
            if not source.startswith("/dev/") or tree.read(enable) != "1":
                continue
            what = f"{source} as NVMe-oF namespace {number} of {subsystem}"
            for device in block_device(tree, source):
                for address in functions_below(tree, device):
                    yield HostUse(address, _KIND, what, f"echo 0 > {quote(enable)}")


def _volume_uses(tree: HostTree) -> Iterator[HostUse]:
    """Disks and partitions that belong to a volume, a RAID or a pool, mounted or not."""
    for pool in tree.children(_BTRFS):
        for name in tree.children(_BTRFS / pool / "devices"):
            for address in functions_below(tree, BLOCK / name):
                yield HostUse(address, _KIND, f"/dev/{name} as part of btrfs {pool}")
    has_zfs = bool(tree.children(_ZFS))
    for name in tree.children(BLOCK):
        holders = tree.children(BLOCK / name / "holders")
        whole = [f"part of {_named(tree, holder)}" for holder in holders]
        if has_zfs and _is_zfs_member(tree, name):
            whole.append("part of a ZFS pool")
        for address in functions_below(tree, BLOCK / name) if whole else ():
            yield HostUse(address, _KIND, f"{node_of(name)} as {', '.join(whole)}")


def _named(tree: HostTree, holder: str) -> str:
    """A volume with its own name: `dm-0 (vg-root)`."""
    name = tree.read(BLOCK / holder / "dm/name")
    return f"{holder} ({name})" if name else holder


def _is_zfs_member(tree: HostTree, name: str) -> bool:
    """According to udev; the kernel module of ZFS does not show holders."""
    number = tree.read(BLOCK / name / "dev") or ""
    known = tree.read_text(HostPath("/run/udev/data") / f"b{number}") or ""
    return "E:ID_FS_TYPE=zfs_member" in known.splitlines()


def disks_below(tree: HostTree) -> dict[str, tuple[PciAddress, ...]]:
    """The names of all block devices above PCI functions, with these functions."""
    found = {name: tuple(functions_below(tree, BLOCK / name)) for name in tree.children(BLOCK)}
    return {name: addresses for name, addresses in found.items() if addresses}


_PAUSES = (0.0, 0.02, 0.1)
"""Seconds before each attempt: another vfiomgr that looks has a claim too, for microseconds."""
_CLAIMED, _FREE = "claimed", "free"


class _Answers(Value):
    """The kernel's answers about disks, by name."""

    claimed: frozenset[str]
    silent: frozenset[str]
    unopened: frozenset[str]


def read_claims(tree: HostTree, known: Collection[PciAddress]) -> Iterator[HostUse]:
    """Disks and partitions that are claimed or do not answer, of functions that are not `known`.

    Those with known users are not opened: an open with O_EXCL makes a concurrent mount fail.
    """
    disks = {
        name: functions
        for name, functions in disks_below(tree).items()
        if not set(functions) <= set(known) and not _is_hidden(tree, name)
    }
    answers = _ask(tree, disks)
    if answers.unopened and tree.is_machine and os.geteuid() == 0:
        nodes = ", ".join(sorted(map(node_of, answers.unopened)))
        warnings.warn(f"cannot test whether disks are in use: cannot open {nodes}", stacklevel=2)
    for name, addresses in disks.items():
        what = _what(name, tree.children(BLOCK / name), answers)
        for address in addresses if what else ():
            if address not in known:
                yield HostUse(address, "mounted-disk", what, f"lsof {quote(node_of(name))}")


def _is_hidden(tree: HostTree, name: str) -> bool:
    """Whether it has no node: a path of an NVMe disk with several paths (GENHD_FL_HIDDEN)."""
    return tree.read(BLOCK / name / "hidden") == "1"


def _what(name: str, parts: Collection[str], answers: _Answers) -> str:
    """The description of a disk; empty if a partition of it has the claim."""
    if not answers.claimed.isdisjoint(parts):
        return ""
    if name in answers.claimed:
        return f"{node_of(name)}, claimed by something without a visible mount, volume or swap"
    if name in answers.silent:
        return f"{node_of(name)} does not answer; whether it is in use is unknown"
    return ""


def _ask(tree: HostTree, names: Iterable[str]) -> _Answers:
    """Which disks are claimed in every attempt, and which do not answer."""
    left = frozenset(names)
    silent, unopened = frozenset[str](), frozenset[str]()
    for pause in _PAUSES:
        if not left:
            break
        if pause:
            time.sleep(pause)
        answers = bounded.ask_each(tree, {n: partial(_look, tree, n) for n in sorted(left)})
        silent |= left - answers.keys()
        unopened |= {name for name, found in answers.items() if found == (None,)}
        left = frozenset(name for name, found in answers.items() if found == (_CLAIMED,))
    return _Answers(left, silent, unopened)


def _look(tree: HostTree, name: str) -> tuple[str | None]:
    number = tree.read(BLOCK / name / "dev")
    is_claimed = None if number is None else tree.is_claimed(node_of(name), number)
    return (None if is_claimed is None else _CLAIMED if is_claimed else _FREE,)
