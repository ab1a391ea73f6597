"""Whether somebody has a disk for itself: what no table shows, the kernel knows.

A file system, swap, a volume, a RAID, ZFS or a program that formats a disk claims it
(bd_prepare_to_claim in block/bdev.c), in whatever namespace it was told to, and an open with
O_EXCL fails with EBUSY then. Such an open is asked for by a child: that of a disk that has died
may never return (scsi_block_when_processing_errors in drivers/scsi/scsi_error.c).
"""

from __future__ import annotations

import os
import time
import warnings
from dataclasses import dataclass
from functools import partial
from shlex import quote
from typing import TYPE_CHECKING

from vfiomgr.host import bounded
from vfiomgr.host.below import BLOCK, node_of
from vfiomgr.host.disk_uses import disks_below
from vfiomgr.model.snapshot import HostUse

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from vfiomgr.host.tree import HostTree
    from vfiomgr.model.pci import PciAddress

_PAUSES = (0.0, 0.02, 0.1)
"""Seconds before each look: another vfiomgr that looks has a claim as well, for microseconds."""
_CLAIMED, _FREE = "claimed", "free"


@dataclass(frozen=True, slots=True)
class _Answers:
    """What the kernel says of disks, by their names."""

    claimed: frozenset[str]
    silent: frozenset[str]
    unopened: frozenset[str]


def read_claims(tree: HostTree, known: Collection[PciAddress]) -> Iterator[HostUse]:
    """Disks and partitions that are claimed, or give no answer, of functions that are not `known`.

    Those of known users are not opened: an open with O_EXCL makes a mount at that moment fail.
    """
    disks = {
        name: functions
        for name, functions in disks_below(tree).items()
        if not set(functions) <= set(known) and not _is_hidden(tree, name)
    }
    answers = _ask(tree, disks)
    if answers.unopened and tree.is_machine and os.geteuid() == 0:
        nodes = ", ".join(sorted(map(node_of, answers.unopened)))
        warnings.warn(f"cannot see whether a disk is in use: cannot open {nodes}", stacklevel=2)
    for name, addresses in disks.items():
        what = _what(name, tree.children(BLOCK / name), answers)
        for address in addresses if what else ():
            if address not in known:
                yield HostUse(address, "mounted-disk", what, f"lsof {quote(node_of(name))}")


def _is_hidden(tree: HostTree, name: str) -> bool:
    """Whether it has no node: a path of an NVMe disk with several (GENHD_FL_HIDDEN)."""
    return tree.read(BLOCK / name / "hidden") == "1"


def _what(name: str, parts: Collection[str], answers: _Answers) -> str:
    """What is to be said of a disk; nothing where a partition of it has the claim."""
    if not answers.claimed.isdisjoint(parts):
        return ""
    if name in answers.claimed:
        return f"{node_of(name)}, claimed by something that shows no mount, volume or swap here"
    if name in answers.silent:
        return f"{node_of(name)} does not answer, so whether it is in use cannot be seen"
    return ""


def _ask(tree: HostTree, names: Iterable[str]) -> _Answers:
    """Which are claimed as often as one looks, and which give no answer."""
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
