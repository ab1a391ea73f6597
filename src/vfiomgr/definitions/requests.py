"""Requests about vGPU definitions: define, undefine, start, stop, restore."""

from __future__ import annotations

from typing import ClassVar

from vfiomgr.definitions.model.vgpu import Attributes
from vfiomgr.diagnostic import Override
from vfiomgr.engine.request import Checkpoint, Request
from vfiomgr.value import Value


class DefineVgpu(Request, Value):
    """Keep what a vGPU is to be; what is None stays as it is defined, or as it is active."""

    name: str
    """A UUID, or the address of a virtual function."""
    parent: str | None = None
    type: str | None = None
    attributes: Attributes | None = None
    autostart: bool | None = None
    program: str | None = None
    """Where vfiomgr itself is, for the service that starts vGPUs."""
    kind: ClassVar[str] = "define-vgpu"

    needs_gpu_modes: ClassVar[bool] = True


class UndefineVgpu(Request, Value):
    """Forget what vGPUs are to be; those that are active stay."""

    names: tuple[str, ...]
    parent: str | None = None
    """None: on whatever parent they are defined."""
    kind: ClassVar[str] = "undefine-vgpu"


class MissingVgpus(Checkpoint):
    """The vGPUs that were not there before a run: it makes them."""

    missing: tuple[str, ...]


class StartVgpu(Request, Value):
    """Make vGPUs as they are defined."""

    names: tuple[str, ...]
    parent: str | None = None
    kind: ClassVar[str] = "start-vgpu"
    checkpoint = MissingVgpus

    needs_gpu_modes: ClassVar[bool] = True


class StopVgpu(Request, Value):
    """Remove vGPUs, and keep their definitions."""

    names: tuple[str, ...]
    allow: frozenset[Override] = frozenset()
    kind: ClassVar[str] = "stop-vgpu"


class RestoreVgpus(Request, Value):
    """Make all vGPUs that are defined to start by themselves, as far as they can be made."""

    parent: str | None = None
    """Of this device alone."""
    only: tuple[str, ...] = ()
    """Of these alone, by their names, and the GPUs that are prepared for them."""
    boot: bool = False
    """Leave to mdevctl what its own rule of udev starts."""
    kind: ClassVar[str] = "restore-vgpus"
    checkpoint = MissingVgpus

    needs_gpu_modes: ClassVar[bool] = True
