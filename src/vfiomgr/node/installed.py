"""The layout of a node, as far as it says which devices are offered."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from vfiomgr.layout.document import choose_layout, read_layouts
from vfiomgr.node.layouts import resource_rules
from vfiomgr.persistence.installed_layout import FILE, RECORD, parse_record

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree
    from vfiomgr.layout.model import Layout
    from vfiomgr.node.model import ResourceRule
    from vfiomgr.snapshot.model import HostSnapshot


def installed_rules(
    tree: HostTree, seen: HostSnapshot, name: str | None
) -> tuple[ResourceRule, ...] | None:
    """The rules of the installed layout, or of the one with this name in its file.

    None without a file, or if no rule has a resource.

    Raises:
        InvalidDocument: the file is malformed, or has no such layout.

    """
    text = tree.read_text(FILE)
    if text is None:
        return None
    installed = parse_record(tree.read_text(RECORD))
    chosen = name or (None if installed is None else installed.name)
    return resource_rules(seen, _layout(text, chosen))


@lru_cache(maxsize=1)
def _layout(text: str, name: str | None) -> Layout:
    return choose_layout(read_layouts(text, FILE), name)[1]
