"""Layouts: the state of a host as a document; planned, applied, asserted, exported, reverted.

`document` reads the file into a `model`, `parts` assigns each device to the first rule that selects
it, and `compare` splits the host into parts that can be changed separately (`functions`, `vgpus`),
and finds conflicts of rules about one IOMMU group. What concerns functions that do not exist yet is
planned once they do. `boot` installs a layout for every boot, `watch` keeps it.
"""

from typing import TYPE_CHECKING

from vfiomgr import importing

if TYPE_CHECKING:
    from vfiomgr.layout.named import ApplyLayout
    from vfiomgr.layout.revert import reversion
    from vfiomgr.layout.watch import apply_parts, watch_layout

__all__ = ["ApplyLayout", "apply_parts", "reversion", "watch_layout"]

if not TYPE_CHECKING:
    __getattr__ = importing(
        __name__,
        dict.fromkeys(__all__, "watch") | {"ApplyLayout": "named", "reversion": "revert"},
    )
