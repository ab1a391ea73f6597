"""Requests about GPUs: modes, MIG instances, and the switch of their use."""

from __future__ import annotations

from typing import ClassVar, Literal

from vfiomgr.diagnostic import Override
from vfiomgr.engine.plan import Checkpoint, FunctionRequest
from vfiomgr.vgpu.instance_model import InstancePlace

GpuUse = Literal["host", "passthrough", "vgpu"]
"""The use of a GPU: by its host driver, by one guest, or by guests that share it."""


class GpuModeCheckpoint(Checkpoint):
    """What a change of MIG removes temporarily."""

    functions: int
    """The number of virtual functions of the GPU."""


class SwitchCheckpoint(Checkpoint):
    """The state of a GPU before a switch; None for unknown or unchanged values."""

    functions: int | None = None
    """For vGPUs: the number of virtual functions."""
    heterogeneous: bool | None = None
    """For vGPUs: whether they may have different sizes."""
    vgpus: tuple[str, ...] = ()
    """The vGPUs that the switch removes."""
    autoprobe: bool | None = None
    """Whether host drivers bind new virtual functions."""
    instances: tuple[InstancePlace, ...] | None = None
    """For vGPUs: the GPU instances (MIG)."""


class SetGpuMode(FunctionRequest):
    """Set the modes of a GPU; None leaves a mode unchanged."""

    heterogeneous: bool | None = None
    mig: bool | None = None
    kind: ClassVar[str] = "set-gpu-mode"
    checkpoint = GpuModeCheckpoint

    needs_gpu_modes: ClassVar[bool] = True


class SetMigInstances(FunctionRequest):
    """Set the exact GPU instances (MIG) of a GPU; an empty list destroys all."""

    instances: tuple[tuple[str, int], ...] = ()
    """Profiles by name or number, and the number of instances of each."""
    kind: ClassVar[str] = "set-mig-instances"

    needs_gpu_modes: ClassVar[bool] = True


class SwitchGpu(FunctionRequest):
    """Switch a GPU to the host driver, to passthrough, or to vGPUs."""

    to: GpuUse
    functions: int | None = None
    """For vGPUs: the number of virtual functions; None for the maximum."""
    heterogeneous: bool | None = None
    allow: frozenset[Override] = frozenset()
    only: bool = False
    """Do not move the other functions of the slot."""
    autoprobe: bool = False
    """Let host drivers bind new virtual functions."""
    vectors: int | None = None
    """The MSI-X vectors of each new virtual function; None to let the driver decide."""
    kind: ClassVar[str] = "switch-gpu"
    checkpoint = SwitchCheckpoint

    needs_gpu_modes: ClassVar[bool] = True
