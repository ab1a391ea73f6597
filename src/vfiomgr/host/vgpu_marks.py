"""The marks of vGPUs that vfiomgr made."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.model.persistence import TextFile
from vfiomgr.model.vgpu_mark import MARKS

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree


def read_marks(tree: HostTree) -> tuple[TextFile, ...]:
    """All marks, also of vGPUs that are gone."""
    # A file that a killed process had not put in place yet begins with a dot.
    names = (name for name in tree.children(MARKS) if not name.startswith("."))
    texts = ((MARKS / name, tree.read_text(MARKS / name)) for name in names)
    return tuple(TextFile(file, text) for file, text in texts if text is not None)
