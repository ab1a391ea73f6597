"""The PCI topology of a host as people draw it: NUMA nodes, root complexes, ports and functions.

`build` makes a tree of a snapshot, without asking the host; `model` folds what few people look for
and puts the rest into words; `render` writes it as text, SVG, HTML or DOT.
"""

from typing import TYPE_CHECKING

from vfiomgr import importing

if TYPE_CHECKING:
    from vfiomgr.topology.build import build

__all__ = ["build"]

if not TYPE_CHECKING:
    __getattr__ = importing(__name__, {"build": "build"})
