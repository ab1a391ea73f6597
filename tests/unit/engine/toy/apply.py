"""What steps on labels do to the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.unit.engine.toy.steps import LABELS, SetLabel, label_file
from vfiomgr.engine.registry import performs

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree


@performs(SetLabel)
def set_label(tree: HostTree, step: SetLabel) -> None:
    """Write the label, or remove it."""
    if step.after is None:
        tree.remove(label_file(step.device))
    else:
        tree.make_directory(LABELS)
        tree.replace(label_file(step.device), step.after.encode())
