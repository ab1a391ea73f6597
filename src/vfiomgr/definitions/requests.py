"""Requests to define, undefine, start, stop and restore vGPUs."""

from __future__ import annotations

from typing import ClassVar

from vfiomgr.definitions.model import Attributes
from vfiomgr.diagnostic import Override
from vfiomgr.engine.plan import Checkpoint, Request
from vfiomgr.value import Value


class DefineVgpu(Request, Value):
    """Define a vGPU; None keeps the value of the definition or of the active vGPU."""

    name: str
    """A UUID, or the address of a virtual function."""
    parent: str | None = None
    type: str | None = None
    attributes: Attributes | None = None
    autostart: bool | None = None
    program: str | None = None
    """The path of vfiomgr, for the service that starts vGPUs."""
    kind: ClassVar[str] = "define-vgpu"

    needs_gpu_modes: ClassVar[bool] = True


class UndefineVgpu(Request, Value):
    """Delete vGPU definitions; active vGPUs keep running."""

    names: tuple[str, ...]
    parent: str | None = None
    """None for any parent."""
    kind: ClassVar[str] = "undefine-vgpu"


class MissingVgpus(Checkpoint):
    """The vGPUs that did not exist before a run, which creates them."""

    missing: tuple[str, ...]


class StartVgpu(Request, Value):
    """Start vGPUs as defined."""

    names: tuple[str, ...]
    parent: str | None = None
    kind: ClassVar[str] = "start-vgpu"
    checkpoint = MissingVgpus

    needs_gpu_modes: ClassVar[bool] = True


class StopVgpu(Request, Value):
    """Stop vGPUs and keep their definitions."""

    names: tuple[str, ...]
    allow: frozenset[Override] = frozenset()
    kind: ClassVar[str] = "stop-vgpu"


class RestoreVgpus(Request, Value):
    """Start all autostart vGPUs."""

    parent: str | None = None
    """Only vGPUs of this device."""
    only: tuple[str, ...] = ()
    """Only these vGPUs, by name, and the GPUs that must be prepared for them."""
    boot: bool = False
    """Leave to mdevctl what its own udev rule starts."""
    kind: ClassVar[str] = "restore-vgpus"
    checkpoint = MissingVgpus

    needs_gpu_modes: ClassVar[bool] = True
