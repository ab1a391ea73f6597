"""GPU instances (MIG) and the modes of NVIDIA GPUs."""

from typing import TYPE_CHECKING

from vfiomgr import importing

if TYPE_CHECKING:
    from vfiomgr.vgpu.mig import facts

__all__ = ["facts"]

if not TYPE_CHECKING:
    __getattr__ = importing(__name__, {"facts": ""})
