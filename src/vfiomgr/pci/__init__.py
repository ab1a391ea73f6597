"""PCI functions, IOMMU groups, drivers and memory, as sysfs shows them.

`function` reads the directory of one function, `facts` reads all functions of a host.
"""

from typing import TYPE_CHECKING

from vfiomgr import importing

if TYPE_CHECKING:
    from vfiomgr.pci import guest_support

__all__ = ["guest_support"]

if not TYPE_CHECKING:
    __getattr__ = importing(__name__, {"guest_support": ""})
