"""What nvidia-smi means by the number that it ends with (NVML: nvmlReturn_t)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.errors import HostError

if TYPE_CHECKING:
    from vfiomgr.errors import ProgramFailed

NOT_FOUND = 6
IN_USE = 19

_CAUSES: dict[int, tuple[str, str]] = {
    2: (
        "the driver knows no such profile, or none at this place",
        "vfiomgr vgpu instances list shows profiles; drivers before 510 take no place after them",
    ),
    3: ("the GPU, or its driver, cannot do this", "vfiomgr vgpu mode shows what it can"),
    4: ("root's rights are missing here", "run as root, outside of a container"),
    NOT_FOUND: (
        "there is no such GPU in MIG mode, or no such instance any more",
        "vfiomgr vgpu mode shows the mode, vfiomgr vgpu instances list what is there",
    ),
    9: ("NVIDIA's driver is not loaded", "load it: modprobe nvidia"),
    15: ("the GPU fell off the bus", "only a power cycle of the device or the host brings it back"),
    IN_USE: (
        "something uses the instance: a vGPU, a process, or what watches GPUs (DCGM)",
        "vfiomgr vgpu instances list names vGPUs and processes: stop them, and e.g. nvidia-dcgm",
    ),
    23: (
        "it does not fit beside the instances that are there by now",
        "vfiomgr vgpu instances list shows them; run the command again",
    ),
}


def explained(error: ProgramFailed, subject: str) -> HostError:
    """The error with its cause and remedy, where the number is known."""
    cause, remedy = _CAUSES.get(
        error.status or 0, ("", "see what nvidia-smi says above, and dmesg (NVRM)")
    )
    message = f"{subject}: {cause}: {error.message}" if cause else f"{subject}: {error.message}"
    return HostError(message, remedy)
