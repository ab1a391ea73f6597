"""Write the arguments of QEMU for guests with devices of this host; libvirt is not needed.

In Python: `arguments_for`, and `check` for what would prevent the start.
"""

from typing import TYPE_CHECKING

from vfiomgr import importing

if TYPE_CHECKING:
    from vfiomgr.qemu.named import arguments_for, check

__all__ = ["arguments_for", "check"]

if not TYPE_CHECKING:
    __getattr__ = importing(__name__, {"arguments_for": "named", "check": "named"})
