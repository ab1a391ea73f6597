"""The PCI topology of a host as people draw it: NUMA nodes, root complexes, ports and functions.

`tree_of` makes a tree of a snapshot, without asking the host; `model` folds what few people look
for and puts the rest into words; `render` writes it as text, SVG or HTML.
"""

from typing import TYPE_CHECKING

from vfiomgr import importing

if TYPE_CHECKING:
    from vfiomgr.topology.build import tree_of

__all__ = ["tree_of"]

if not TYPE_CHECKING:
    __getattr__ = importing(__name__, {"tree_of": "build"})
