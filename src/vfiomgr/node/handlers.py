"""The handlers of Kata that a node has, for its labels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.kata.explain.facts import read_handlers

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree


def kata_handlers(tree: HostTree) -> tuple[str, ...]:
    """The names of Kata's handlers in the configuration of containerd or CRI-O, sorted."""
    return tuple(
        sorted(entry.name for entry in read_handlers(tree, None).handlers if entry.is_kata)
    )
