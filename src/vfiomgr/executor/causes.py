"""What the kernel means by an errno, by what was written (drivers/base/bus.c, drivers/vfio)."""

from __future__ import annotations

from errno import EACCES, EAGAIN, EBUSY, EEXIST, EINVAL, EIO, ENODEV, ENOENT, ENOMEM, ENOSPC, EPERM
from typing import Literal

from vfiomgr.errors import WriteFailed

Operation = Literal["override", "unbind", "probe", "bind", "power", "mdev-create", "mdev-remove"]

_LOCKDOWN = "see dmesg; under kernel lockdown (Secure Boot) some drivers refuse"
_NO_FREE_MEMORY = "free memory on the host, then try again"
_GONE = "the device vanished meanwhile; vfiomgr list --all shows what is there"

_CAUSES: dict[tuple[Operation, int], tuple[str, str]] = {
    ("override", ENOENT): ("the function is gone, or this kernel has no driver_override", _GONE),
    ("override", EACCES): ("root's rights are missing here", "run as root, outside of a container"),
    ("override", EINVAL): ("the kernel does not take this text as a driver name", "check --driver"),
    ("unbind", ENODEV): ("another driver took the function meanwhile", "run the command again"),
    ("unbind", ENOENT): ("the function lost its driver or vanished meanwhile", _GONE),
    ("unbind", EPERM): ("the driver refuses to let go", _LOCKDOWN),
    ("probe", ENODEV): ("the function vanished meanwhile", _GONE),
    ("probe", EINVAL): (
        "a guest owns a member of its IOMMU group, or the function vanished meanwhile",
        "shut the guest down, then run the command again",
    ),
    ("bind", ENODEV): (
        "the driver does not serve this function",
        "name a driver that lists its identifiers, or check that driver_override is right",
    ),
    ("bind", ENOENT): ("the driver is not loaded", "load its kernel module with modprobe"),
    ("bind", EINVAL): (
        "the driver rejects it: vfio-pci takes no bridge and nothing without an IOMMU group",
        "vfiomgr show tells the group; dmesg tells the driver's own words",
    ),
    ("bind", EBUSY): (
        "its virtual functions exist, or a guest owns a member of its group, or a driver has it",
        "remove the virtual functions, shut the guest down, then run the command again",
    ),
    ("bind", EPERM): ("the driver denies this device", _LOCKDOWN),
    ("bind", ENOMEM): ("the kernel has no memory for it", _NO_FREE_MEMORY),
    ("bind", EIO): ("the device does not answer", "reset or power-cycle it; see dmesg"),
    ("mdev-create", EEXIST): ("the UUID is in use", "leave out --uuid to get a fresh one"),
    ("mdev-create", EINVAL): (
        "the driver rejects this type now; on NVIDIA GPUs another size may be running",
        "vfiomgr vgpu types shows what still fits",
    ),
    ("mdev-create", ENODEV): ("the parent is going away", "wait for its driver, then try again"),
    ("mdev-create", ENOENT): ("the parent or its type is gone", "vfiomgr vgpu types shows them"),
    ("mdev-create", ENOSPC): (
        "the parent has no room left for this type",
        "remove a vGPU first; vfiomgr vgpu types shows what still fits",
    ),
    ("mdev-create", ENOMEM): ("the parent or the host is out of memory", _NO_FREE_MEMORY),
    ("mdev-create", EIO): ("the vendor's driver failed", "see dmesg; is its host service running?"),
    ("mdev-remove", ENODEV): (
        "it is being removed already",
        "vfiomgr vgpu list shows what is left",
    ),
    ("mdev-remove", EAGAIN): ("it is still being created", "try again in a moment"),
}


def explained(error: WriteFailed, operation: Operation, subject: str) -> WriteFailed:
    """The error with its cause and remedy, where the errno of this write is known."""
    cause, remedy = _CAUSES.get((operation, error.errno), ("", "see dmesg for the driver's words"))
    message = f"{subject}: {cause}: {error.message}" if cause else f"{subject}: {error.message}"
    return WriteFailed(error.path, error.text, error.errno, message, remedy)
