"""Requests about a GPU as a whole: its modes, its MIG instances, who has it."""

from __future__ import annotations

from typing import ClassVar, Literal

from vfiomgr.diagnostic import Override
from vfiomgr.engine.request import Checkpoint, Request
from vfiomgr.pci.model import PciAddress
from vfiomgr.value import Value
from vfiomgr.vgpu.mig.model import InstancePlace

GpuUse = Literal["host", "passthrough", "vgpu"]
"""Who has a GPU: its host driver, one guest, or guests that share it."""


class GpuModeCheckpoint(Checkpoint):
    """What a change of MIG removes for a moment."""

    functions: int
    """Virtual functions of the GPU."""


class SwitchCheckpoint(Checkpoint):
    """A GPU before its switch; None: not known, or as it is."""

    functions: int | None = None
    """For vGPUs: so many virtual functions."""
    heterogeneous: bool | None = None
    """For vGPUs: whether they may be of different sizes."""
    vgpus: tuple[str, ...] = ()
    """The vGPUs that the switch removes."""
    autoprobe: bool | None = None
    """Whether the host's drivers took new virtual functions."""
    instances: tuple[InstancePlace, ...] | None = None
    """For vGPUs: the GPU instances (MIG)."""


class SetGpuMode(Request, Value):
    """Let a GPU divide its memory otherwise; None of a mode means: as it is."""

    address: PciAddress
    heterogeneous: bool | None = None
    mig: bool | None = None
    kind: ClassVar[str] = "set-gpu-mode"
    checkpoint = GpuModeCheckpoint

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
    kind: ClassVar[str] = "set-mig-instances"

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
    only: bool = False
    """Leave the other functions of the slot where they are."""
    autoprobe: bool = False
    """Let the host's drivers take new virtual functions."""
    kind: ClassVar[str] = "switch-gpu"
    checkpoint = SwitchCheckpoint

    needs_gpu_modes: ClassVar[bool] = True

    @property
    def named_functions(self) -> tuple[PciAddress, ...]:
        """The one that it is about."""
        return (self.address,)
