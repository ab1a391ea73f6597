"""Bind PCI functions to VFIO drivers, unbind them, and reset them.

`plan` finds which functions must move together; `guards` holds the safety checks and their
remedies. Only `watch` acts without a plan: it writes the driver_override of a function that the
kernel has just found, before the kernel looks for a driver.
"""

from typing import TYPE_CHECKING

from vfiomgr import importing

if TYPE_CHECKING:
    from vfiomgr.passthrough import readiness_hints
    from vfiomgr.passthrough.watch import watch_machine

__all__ = ["readiness_hints", "watch_machine"]

if not TYPE_CHECKING:
    __getattr__ = importing(__name__, {"readiness_hints": "", "watch_machine": "watch"})
