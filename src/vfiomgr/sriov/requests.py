"""Requests about virtual functions: their number, and their quotas."""

from __future__ import annotations

from typing import ClassVar

from vfiomgr.engine.request import Checkpoint, Request
from vfiomgr.pci.model import PciAddress
from vfiomgr.value import Value
from vfiomgr.vgpu.mig.model import InstancePlace
from vfiomgr.vgpu.quota.model import VfQuota


class FunctionsCheckpoint(Checkpoint):
    """A physical function before its virtual ones change; None: as it is."""

    autoprobe: bool | None = None
    """Whether the host's drivers took new virtual functions."""
    heterogeneous: bool | None = None
    """Whether vGPUs of different sizes could be on the virtual functions."""
    instances: tuple[InstancePlace, ...] | None = None
    """The GPU instances (MIG), which go with the functions of a GPU."""
    priority: str | None = None
    """Of the physical function, which has that of all others for a moment."""


class QuotasCheckpoint(Checkpoint):
    """The physical function before quotas change."""

    priority: str | None = None
    """Its own, which all have for a moment; None: as it is."""


class SetVirtualFunctions(Request, Value):
    """Have a number of virtual functions on a physical one; those that exist all go."""

    address: PciAddress
    count: int
    autoprobe: bool = False
    """Let the host's drivers take the new ones."""
    share: VfQuota | None = None
    """What each of them gets of the GPU; None: what its driver gives."""
    kind: ClassVar[str] = "set-virtual-functions"
    checkpoint = FunctionsCheckpoint

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
    kind: ClassVar[str] = "change-quotas"
    checkpoint = QuotasCheckpoint

    @property
    def named_functions(self) -> tuple[PciAddress, ...]:
        """The one that it is about."""
        return (self.address,)
