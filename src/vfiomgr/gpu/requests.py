"""Requests about a GPU as a whole: its modes, its MIG instances, who has it."""

from __future__ import annotations

from typing import ClassVar, Literal

from vfiomgr.diagnostic import Override
from vfiomgr.engine.request import Request
from vfiomgr.pci.model import PciAddress
from vfiomgr.value import Value
from vfiomgr.vgpu.mig.model import InstancePlace

GpuUse = Literal["host", "passthrough", "vgpu"]
"""Who has a GPU: its host driver, one guest, or guests that share it."""


class SetGpuMode(Request, Value):
    """Let a GPU divide its memory otherwise; None of a mode means: as it is."""

    address: PciAddress
    heterogeneous: bool | None = None
    mig: bool | None = None
    functions_after: int | None = None
    """None: as many virtual functions as there are; else what a run that was cut off had found."""
    kind: ClassVar[str] = "set-gpu-mode"

    needs_gpu_modes: ClassVar[bool] = True

    @property
    def named_functions(self) -> tuple[PciAddress, ...]:
        """The one that it is about."""
        return (self.address,)


class SetMigInstances(Request, Value):
    """Have these GPU instances (MIG) on a GPU and no others; none without any."""

    address: PciAddress
    instances: tuple[tuple[str, int], ...] = ()
    """Profiles, by name or number, and how many of each."""
    kind: ClassVar[str] = "divide-gpu"

    needs_gpu_modes: ClassVar[bool] = True

    @property
    def named_functions(self) -> tuple[PciAddress, ...]:
        """The one that it is about."""
        return (self.address,)


class SwitchGpu(Request, Value):
    """Give a GPU, whole, to the host or to a guest, or make it ready to be divided into vGPUs."""

    address: PciAddress
    to: GpuUse
    functions: int | None = None
    """For vGPUs: so many virtual functions; None for as many as it makes."""
    heterogeneous: bool | None = None
    allow: frozenset[Override] = frozenset()
    vgpus: tuple[str, ...] = ()
    """The vGPUs that a run which was cut off was to remove."""
    autoprobe_after: bool | None = None
    """None: as it is; else what a run that was cut off had found."""
    instances_after: tuple[InstancePlace, ...] | None = None
    """As `autoprobe_after`, for vGPUs: the GPU instances (MIG)."""
    only: bool = False
    """Leave the other functions of the slot where they are."""
    autoprobe: bool = False
    """Let the host's drivers take new virtual functions."""
    kind: ClassVar[str] = "switch-gpu"

    needs_gpu_modes: ClassVar[bool] = True

    @property
    def named_functions(self) -> tuple[PciAddress, ...]:
        """The one that it is about."""
        return (self.address,)
