"""Requests about vGPUs: create and remove them."""

from __future__ import annotations

from typing import ClassVar, Literal

from vfiomgr.diagnostic import Override
from vfiomgr.engine.request import Checkpoint, Request
from vfiomgr.value import Value

Strategy = Literal["pack", "spread"]
"""Fill one GPU after the other, or give each the same number of vGPUs."""


class CreateCheckpoint(Checkpoint):
    """Where vGPUs were to be made."""

    places: tuple[tuple[str, str], ...]
    """Parent and type of each."""


class CreateVgpu(Request, Value):
    """Make vGPUs: as many as there are UUIDs, all or none."""

    uuids: tuple[str, ...]
    """Names for those that are mediated devices; a virtual function keeps its address."""
    type: str | None = None
    """By its identifier, its number, its full or its short name."""
    framebuffer: int | None = None
    """MiB or more; the smallest type that serves is taken."""
    series: str | None = None
    heads: int | None = None
    parent: str | None = None
    """On this device alone: a GPU, or one of its virtual functions."""
    numa_node: int | None = None
    strategy: Strategy = "pack"
    kind: ClassVar[str] = "create-vgpu"
    checkpoint = CreateCheckpoint

    needs_gpu_modes: ClassVar[bool] = True


class RemoveVgpu(Request, Value):
    """Remove vGPUs, by UUID or the address of a virtual function."""

    names: tuple[str, ...] = ()
    every: bool = False
    """All that vfiomgr made, and none that others did."""
    parent: str | None = None
    """With `every`: of this device alone."""
    allow: frozenset[Override] = frozenset()
    kind: ClassVar[str] = "remove-vgpu"
