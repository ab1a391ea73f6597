"""What the kernel means by an errno, by what was written (drivers/base/bus.c, drivers/vfio)."""

from __future__ import annotations

from errno import (
    E2BIG,
    EACCES,
    EADDRINUSE,
    EADDRNOTAVAIL,
    EAGAIN,
    EBUSY,
    EEXIST,
    EINVAL,
    EIO,
    ENODEV,
    ENOENT,
    ENOMEM,
    ENOSPC,
    ENOTTY,
    ENXIO,
    EOPNOTSUPP,
    EPERM,
    ERANGE,
    ESTALE,
    EUCLEAN,
    EUSERS,
)
from typing import Literal

from vfiomgr.errors import WriteFailed

Operation = Literal[
    "override",
    "unbind",
    "probe",
    "bind",
    "new-id",
    "power",
    "mdev-create",
    "mdev-remove",
    "vgpu-type",
    "attribute",
    "autoprobe",
    "vf-count",
    "nvidia-vf-count",
    "quota",
    "reset-method",
    "reset",
    "d3cold",
]

_LOCKDOWN = "see dmesg; under kernel lockdown (Secure Boot) some drivers refuse"
_NO_FREE_MEMORY = "free memory on the host, then try again"
_GONE = "the device vanished meanwhile; vfiomgr list --all shows what is there"
_NO_ROOM = (
    "the firmware left too few bus numbers or too little address space (MMIO) for so many",
    "ask for fewer; boot with pci=realloc, or pci=assign-busses where dmesg tells of bus numbers",
)
_NO_VRAM = (
    "the GPU has not so much free memory in one piece, with what the host itself uses",
    "ask for less; end programs of the host that use the GPU",
)
_VENDOR_MAKES_THEM = (
    "NVIDIA's driver does not make virtual functions so",
    "install NVIDIA's vGPU host driver, which brings /usr/lib/nvidia/sriov-manage; vfiomgr uses it",
)
_NVIDIA_REFUSES = (
    "another size runs, the memory is taken, the virtual function is a vGPU already, or no GPU "
    "instance fits (MIG)"
)
_HOST_SERVICE = (
    "else see dmesg (NVRM), and whether the vendor's host service (nvidia-vgpu-mgr) runs"
)
_ALONE = "a bus reset needs the function to be alone on its bus, since it hits all that is there"

_CAUSES: dict[tuple[Operation, int], tuple[str, str]] = {
    ("override", ENOENT): ("the function is gone, or this kernel has no driver_override", _GONE),
    ("override", EACCES): ("root's rights are missing here", "run as root, outside of a container"),
    ("override", EINVAL): (
        "the kernel does not take this text as a driver name",
        "check the name of the driver",
    ),
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
    ("new-id", EINVAL): ("the kernel does not take these identifiers", "see dmesg"),
    ("new-id", ENOENT): ("the driver is not loaded", "load its kernel module with modprobe"),
    ("bind", EPERM): ("the driver denies this device", _LOCKDOWN),
    ("bind", ENOMEM): ("the kernel has no memory for it", _NO_FREE_MEMORY),
    ("bind", EIO): ("the device does not answer", "reset or power-cycle it; see dmesg"),
    ("mdev-create", EEXIST): (
        "the UUID is in use",
        "choose another UUID, or none to get a fresh one",
    ),
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
    ("mdev-create", ENOMEM): (
        "the parent or the host is out of memory",
        "remove a vGPU, or free memory on the host, then try again",
    ),
    ("mdev-create", EIO): (
        f"the vendor's driver refused, as NVIDIA's does where {_NVIDIA_REFUSES}",
        f"vfiomgr vgpu types shows what still fits; {_HOST_SERVICE}",
    ),
    ("mdev-remove", ENODEV): (
        "it is being removed already",
        "vfiomgr vgpu list shows what is left",
    ),
    ("mdev-create", EUSERS): (
        "the parent has as many as it can",
        "remove a vGPU first; vfiomgr vgpu types shows what still fits",
    ),
    ("mdev-create", EPERM): (
        "the driver refuses: the virtual function carries a vGPU, or the GPU is in another mode",
        "vfiomgr vgpu list shows what is there; nvidia-smi -q shows the mode",
    ),
    ("vgpu-type", EPERM): (
        "the virtual function is a vGPU already, or is none already",
        "vfiomgr vgpu list shows what is there; one has to be removed before it becomes another",
    ),
    ("vgpu-type", EINVAL): (
        "the driver does not know this type, or does not make it beside what runs",
        "vfiomgr vgpu types shows what still fits",
    ),
    ("vgpu-type", EIO): (
        "the GPU refused: no GPU instance fits (MIG), its memory is taken, or another size runs",
        "see dmesg (NVRM) and nvidia-smi vgpu -c; with MIG, vfiomgr vgpu instances list",
    ),
    ("vgpu-type", EBUSY): (
        "a guest has the virtual function open",
        "shut the guest down first",
    ),
    ("vgpu-type", ENOSPC): (
        "the GPU has no room left for this type",
        "remove a vGPU first; vfiomgr vgpu types shows what still fits",
    ),
    ("vgpu-type", ENXIO): (
        "the driver has not set the virtual function up",
        "make the virtual functions anew, with the vendor's host service running",
    ),
    ("vgpu-type", ENODEV): ("the function vanished meanwhile", _GONE),
    ("vgpu-type", ENOENT): (
        "the driver no longer exposes the virtual function through VFIO",
        "make the virtual functions anew; see dmesg",
    ),
    ("attribute", EINVAL): (
        "the driver does not take this text",
        "compare it with the vendor's words about the attribute; see dmesg",
    ),
    ("attribute", EACCES): ("it can be read only", "leave it out of the definition"),
    ("attribute", EPERM): (
        "the driver does not let it be written now",
        "stop whoever uses the vGPU, then try again; see dmesg",
    ),
    ("attribute", EBUSY): ("the vGPU is in use", "shut the guest down first"),
    ("attribute", ENOENT): ("it vanished meanwhile", "vfiomgr vgpu list shows what is there"),
    ("attribute", ENODEV): ("the vGPU vanished meanwhile", "vfiomgr vgpu list shows what is there"),
    ("attribute", ENXIO): (
        "the driver has not set the vGPU up",
        "see dmesg; is the vendor's host service running?",
    ),
    ("attribute", E2BIG): ("the text is longer than the driver takes", "shorten it"),
    ("attribute", EIO): ("the vendor's driver failed", "see dmesg; is its host service running?"),
    ("attribute", EADDRNOTAVAIL): (
        "the host keeps what the text asks for to itself",
        "give it to vGPUs first, e.g. with chzdev for queues of vfio_ap",
    ),
    ("attribute", EADDRINUSE): (
        "another vGPU has what the text asks for",
        "vfiomgr vgpu list --defined shows which attributes others have",
    ),
    ("vf-count", ERANGE): (
        "the function makes no more than its sriov_totalvfs",
        "vfiomgr sriov list shows how many; the device's own firmware settings may raise it",
    ),
    ("vf-count", ENOENT): (
        "the driver makes no virtual functions (it has no sriov_configure), or there is no driver",
        "give the function to its host driver first; vfio-pci makes none",
    ),
    ("vf-count", EBUSY): (
        "another number was set meanwhile, and the kernel wants 0 before a new one",
        "run the command again",
    ),
    ("vf-count", ENOSPC): _NO_ROOM,
    ("vf-count", ENOMEM): _NO_ROOM,
    ("vf-count", EINVAL): (
        "the driver or the device rejects this number",
        "see dmesg; some devices make certain numbers only, or none in this mode",
    ),
    ("vf-count", EPERM): (
        "the driver refuses: its virtual functions are in use, or its present mode forbids it",
        "see dmesg; take the virtual functions out of use, then run the command again",
    ),
    ("nvidia-vf-count", EPERM): _VENDOR_MAKES_THEM,
    ("nvidia-vf-count", EINVAL): _VENDOR_MAKES_THEM,
    ("nvidia-vf-count", ENOENT): _VENDOR_MAKES_THEM,
    ("vf-count", EOPNOTSUPP): (
        "SR-IOV is switched off in the device's own firmware",
        "switch it on with the vendor's tool, then power-cycle the host",
    ),
    ("vf-count", EIO): (
        "the device contradicts itself about its virtual functions",
        "see dmesg; update the device's firmware",
    ),
    ("vf-count", EAGAIN): ("the driver is busy, perhaps with a reset", "try again in a moment"),
    ("vf-count", ENODEV): ("the function vanished meanwhile", _GONE),
    ("vf-count", EACCES): ("root's rights are missing here", "run as root, outside of a container"),
    ("quota", EINVAL): (
        "the driver does not take this value, or this priority for this function",
        "vfiomgr sriov quota shows what functions have; see dmesg",
    ),
    ("quota", ERANGE): (
        "the number does not fit: time has 32 bits, memory 64",
        "ask for a smaller one",
    ),
    ("quota", EPERM): (
        "this GPU has no such quota, or i915 keeps the memory of functions that are there",
        "leave this quota out; memory is set before the functions are made: vfiomgr sriov set",
    ),
    ("quota", EIO): (
        "the GPU's firmware (GuC) refuses; most likely functions would have more than there is",
        "ask for less; vfiomgr sriov quota shows what functions have, dmesg what the firmware said",
    ),
    ("quota", ENOSPC): _NO_VRAM,
    ("quota", ENOMEM): _NO_VRAM,
    ("quota", EUCLEAN): (
        "the value differs between the tiles of the GPU",
        "set it for all functions: vfiomgr sriov quota with the physical function's address",
    ),
    ("quota", ESTALE): (
        "i915 shares out by itself only where no function has a quota",
        "set those that are left below iov/vf*/gt* to 0 first",
    ),
    ("quota", EOPNOTSUPP): (
        "the firmware does not change this of a single function",
        "name the physical function, for all of its virtual ones",
    ),
    ("quota", EACCES): (
        "it can only be read here, or root's rights are missing",
        "run as root; the priority of a virtual function goes with that of all",
    ),
    ("quota", EBUSY): (
        "the function is in use, or the driver is not ready for it",
        "shut the guest down, or try again in a moment",
    ),
    ("quota", ENOENT): (
        "the driver shows this quota no longer",
        "is the GPU still on xe or i915? vfiomgr show tells",
    ),
    ("quota", ENODEV): ("the GPU vanished meanwhile", _GONE),
    ("reset-method", EINVAL): (
        f"the kernel cannot reset the function so; {_ALONE}",
        "see dmesg; vfiomgr show tells which methods there are, and why others are not",
    ),
    ("reset-method", ENOENT): (
        "the function has no way to be reset, or this kernel (before 5.15) lets nobody choose",
        "vfiomgr show tells which methods there are",
    ),
    ("reset", ENOTTY): (
        f"no method of its reset_method worked: it did not come back in time, or {_ALONE}",
        "see dmesg; try another --method, or give the whole slot to a guest, which resets it whole",
    ),
    ("reset", ENOENT): (
        "the kernel knows no way to reset the function, or it is gone",
        "vfiomgr show tells why; a power cycle of the host resets all",
    ),
    ("mdev-remove", EAGAIN): ("it is still being created", "try again in a moment"),
}


def explained(error: WriteFailed, operation: Operation, subject: str) -> WriteFailed:
    """The error with its cause and remedy, where the errno of this write is known."""
    known = _CAUSES.get((operation, error.errno))
    if known is None and operation == "nvidia-vf-count":
        known = _CAUSES.get(("vf-count", error.errno))
    cause, remedy = known or ("", "see dmesg for the driver's words")
    message = f"{subject}: {cause}: {error.message}" if cause else f"{subject}: {error.message}"
    return WriteFailed(error.path, error.text, error.errno, message, remedy)
