"""vGPUs of every family: mediated devices, virtual functions of a vendor driver, quotas.

`capacity` finds how many vGPUs each GPU has room for; `placement` finds matching types and GPUs for
a request; `plan` makes the steps. With MIG, vGPUs run in GPU instances, which
`nvidia_smi` reads.
"""

from typing import TYPE_CHECKING

from vfiomgr import importing

if TYPE_CHECKING:
    from vfiomgr.vgpu.named import CreateVgpu, RemoveVgpu, VgpuOutcome, created, removed

__all__ = ["CreateVgpu", "RemoveVgpu", "VgpuOutcome", "created", "removed"]

if not TYPE_CHECKING:
    __getattr__ = importing(__name__, dict.fromkeys(__all__, "named"))
