"""Requests to create and remove vGPUs."""

from __future__ import annotations

from typing import ClassVar, Literal

from vfiomgr.diagnostic import Override
from vfiomgr.engine.request import Checkpoint, Request
from vfiomgr.value import Value

Strategy = Literal["pack", "spread"]
"""Fill one GPU after the other, or spread vGPUs evenly."""


class CreateCheckpoint(Checkpoint):
    """The selected placements of vGPUs."""

    places: tuple[tuple[str, str], ...]
    """Parent and type of each."""


class CreateVgpu(Request, Value):
    """Create one vGPU per UUID, all or none."""

    uuids: tuple[str, ...]
    """The UUIDs of mediated devices; a virtual function is named by its address instead."""
    type: str | None = None
    """The type by ID, number, full name or short name."""
    framebuffer: int | None = None
    """The minimum MiB; the smallest matching type is used."""
    series: str | None = None
    heads: int | None = None
    parent: str | None = None
    """The device to use: a GPU, or one of its virtual functions."""
    numa_node: int | None = None
    strategy: Strategy = "pack"
    kind: ClassVar[str] = "create-vgpu"
    checkpoint = CreateCheckpoint

    needs_gpu_modes: ClassVar[bool] = True


class RemoveVgpu(Request, Value):
    """Remove vGPUs, by UUID or the address of a virtual function."""

    names: tuple[str, ...] = ()
    every: bool = False
    """Remove all vGPUs created by vfiomgr."""
    parent: str | None = None
    """With `every`: only vGPUs of this device."""
    allow: frozenset[Override] = frozenset()
    kind: ClassVar[str] = "remove-vgpu"
