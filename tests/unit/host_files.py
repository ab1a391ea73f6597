"""Host trees from a text: one `path: content` or `path -> target` a line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.host.tree import HostTree

if TYPE_CHECKING:
    from pathlib import Path


def tree_of(root: Path, text: str) -> HostTree:
    """Make the files and links below `root`."""
    for line in filter(None, (line.strip() for line in text.splitlines())):
        name, arrow, target = line.partition(" -> ")
        if arrow:
            link = root / name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(target)
        else:
            name, _, content = line.partition(": ")
            file = root / name.rstrip(":")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content.replace("\\n", "\n") + "\n")
    return HostTree(root)
