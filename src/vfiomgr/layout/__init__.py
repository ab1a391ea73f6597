"""A host as a document: planned, applied, asserted, exported and reverted.

`schema` and `document` read the file, `select` gives each device to the first rule that selects
it, and `compare` looks at the host in parts that can be changed by themselves: `functions`,
`sriov`, `vgpus`, with `groups` for what several rules of one IOMMU group may not both want. What
concerns functions that do not exist yet is planned once they do. `boot` installs a layout for
every boot, `watch` keeps it.
"""

from typing import TYPE_CHECKING

from vfiomgr.public import importing

if TYPE_CHECKING:
    from vfiomgr.layout.apply import apply_parts, watch_layout
    from vfiomgr.layout.named import ApplyLayout

__all__ = ["ApplyLayout", "apply_parts", "watch_layout"]

if not TYPE_CHECKING:
    __getattr__ = importing(
        __name__, {"ApplyLayout": "named", "apply_parts": "apply", "watch_layout": "apply"}
    )
