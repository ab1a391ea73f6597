"""Requests about virtual functions: their number, and their quotas."""

from __future__ import annotations

from typing import ClassVar

from vfiomgr.engine.request import Request
from vfiomgr.pci.model import PciAddress
from vfiomgr.value import Value
from vfiomgr.vgpu.mig.model import InstancePlace
from vfiomgr.vgpu.quota.model import VfQuota


class SetVirtualFunctions(Request, Value):
    """Have a number of virtual functions on a physical one; those that exist all go."""

    address: PciAddress
    count: int
    autoprobe: bool = False
    """Let the host's drivers take the new ones."""
    autoprobe_after: bool | None = None
    """None: as it is; else what a run that was cut off had found."""
    heterogeneous_after: bool | None = None
    """As `autoprobe_after`: whether vGPUs of different sizes may be on the new ones."""
    instances_after: tuple[InstancePlace, ...] | None = None
    """As `autoprobe_after`: the GPU instances (MIG), which go with the functions of a GPU."""
    share: VfQuota | None = None
    """What each of them gets of the GPU; None: what its driver gives."""
    priority_after: str | None = None
    """As `autoprobe_after`: of the physical function, which has that of all others for a moment."""
    kind: ClassVar[str] = "set-virtual-functions"

    needs_gpu_modes: ClassVar[bool] = True

    @property
    def named_functions(self) -> tuple[PciAddress, ...]:
        """The one that it is about."""
        return (self.address,)


class ChangeQuotas(Request, Value):
    """Give the functions of a GPU, or one of them, another share of it while they are there."""

    address: PciAddress
    """One virtual function, or the physical one, for all of its virtual ones."""
    share: VfQuota
    is_physical: bool = False
    """Of the physical function itself."""
    priority_after: str | None = None
    """None: the physical function's own is as it is; else what a run that was cut off had found."""
    kind: ClassVar[str] = "change-quotas"

    @property
    def named_functions(self) -> tuple[PciAddress, ...]:
        """The one that it is about."""
        return (self.address,)
