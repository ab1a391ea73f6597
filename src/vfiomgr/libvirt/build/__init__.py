"""The parts of a guest: devices and their places, memory and CPUs."""

from typing import TYPE_CHECKING

from vfiomgr import importing

if TYPE_CHECKING:
    from vfiomgr.libvirt.build import numa
    from vfiomgr.libvirt.build.plan import plan_guest

__all__ = ["numa", "plan_guest"]

if not TYPE_CHECKING:
    __getattr__ = importing(__name__, {"numa": "", "plan_guest": "plan"})
