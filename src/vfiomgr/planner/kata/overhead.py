"""What the pod's cgroup must hold beyond the limits of its containers."""

from __future__ import annotations

DEFAULT_MEMORY_MIB = 8192
"""default_memory of Kata's configurations for GPUs, since 3.28."""
_HYPERVISOR_MIB = 2048
"""For QEMU, virtiofsd and the shim: what kata-deploy's classes for GPUs leave (10240 for 8192)."""


def overhead_mib(default_memory_mib: int) -> int:
    """Memory that a RuntimeClass must add, or QEMU is killed: VFIO pins all of the guest's RAM.

    The containers' limits are added to default_memory in the VM as in the cgroup, so they do not
    count here.
    """
    return default_memory_mib + _HYPERVISOR_MIB
