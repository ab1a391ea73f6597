"""Requests about virtual functions: their number and their quotas."""

from __future__ import annotations

from typing import ClassVar

from vfiomgr.engine.request import Checkpoint, Request
from vfiomgr.pci.model import PciAddress
from vfiomgr.value import Value
from vfiomgr.vgpu.mig.model import InstancePlace
from vfiomgr.vgpu.quota.model import VfQuota


class FunctionsCheckpoint(Checkpoint):
    """The state of a physical function before a change; None for unchanged values."""

    autoprobe: bool | None = None
    """Whether host drivers bind new virtual functions."""
    heterogeneous: bool | None = None
    """Whether vGPUs of different sizes were allowed."""
    instances: tuple[InstancePlace, ...] | None = None
    """The GPU instances (MIG), which are removed with the functions of a GPU."""
    priority: str | None = None
    """The priority of the physical function, which changes temporarily."""


class QuotasCheckpoint(Checkpoint):
    """The state of the physical function before quotas change."""

    priority: str | None = None
    """Its priority, which changes temporarily; None if unchanged."""


class SetVirtualFunctions(Request, Value):
    """Set the number of virtual functions; existing ones are removed."""

    address: PciAddress
    count: int
    autoprobe: bool = False
    """Let host drivers bind the new functions."""
    share: VfQuota | None = None
    """The quotas of each function; None to let the driver decide."""
    kind: ClassVar[str] = "set-virtual-functions"
    checkpoint = FunctionsCheckpoint

    needs_gpu_modes: ClassVar[bool] = True

    @property
    def named_functions(self) -> tuple[PciAddress, ...]:
        """The function that the request names."""
        return (self.address,)


class ChangeQuotas(Request, Value):
    """Change the quotas of existing functions of a GPU."""

    address: PciAddress
    """One virtual function, or the physical function for all of its virtual functions."""
    share: VfQuota
    is_physical: bool = False
    """Change the quotas of the physical function itself."""
    kind: ClassVar[str] = "change-quotas"
    checkpoint = QuotasCheckpoint

    @property
    def named_functions(self) -> tuple[PciAddress, ...]:
        """The function that the request names."""
        return (self.address,)
