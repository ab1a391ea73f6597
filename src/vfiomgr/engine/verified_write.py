"""Writes with explained errors (drivers/base/bus.c, drivers/vfio), and their verification."""

from __future__ import annotations

import time
from contextlib import contextmanager
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
    EOVERFLOW,
    EPERM,
    ERANGE,
    ESTALE,
    EUCLEAN,
    EUSERS,
)
from typing import TYPE_CHECKING, Literal

from vfiomgr.errors import HostError, WriteFailed
from vfiomgr.pci import facts as pci_facts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vfiomgr.host.tree import HostTree
    from vfiomgr.pci.model import DeviceIdentity


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
    "vf-vectors",
    "reset-method",
    "reset",
    "bus-reset",
    "d3cold",
]

_LOCKDOWN = "see dmesg; under kernel lockdown (Secure Boot) some drivers refuse"
_NO_FREE_MEMORY = "free memory on the host, then try again"
_GONE = "the device vanished; list the present ones: vfiomgr list --all"
_NO_ROOM = (
    "the firmware left too few bus numbers or too little MMIO address space for so many",
    "request fewer; boot with pci=realloc, or pci=assign-busses if dmesg mentions bus numbers",
)
_NO_VRAM = (
    "the GPU does not have that much free contiguous memory, besides what the host uses",
    "request less; end programs on the host that use the GPU",
)
_VENDOR_MAKES_THEM = (
    "NVIDIA's driver does not create virtual functions this way",
    "install NVIDIA's vGPU host driver with /usr/lib/nvidia/sriov-manage, which vfiomgr uses",
)
_NVIDIA_REFUSES = (
    "another size runs, the memory is used, the virtual function is a vGPU already, or no GPU "
    "instance fits (MIG)"
)
_HOST_SERVICE = (
    "otherwise see dmesg (NVRM), and check that the vendor's host service (nvidia-vgpu-mgr) runs"
)
_ALONE = "a bus reset requires the function to be alone on its bus, since it resets the entire bus"

_CAUSES: dict[tuple[Operation, int], tuple[str, str]] = {
    ("override", ENOENT): (
        "the function vanished, or this kernel does not support driver_override",
        _GONE,
    ),
    ("override", EACCES): ("root privileges are missing", "run as root outside of a container"),
    ("override", EINVAL): (
        "the kernel does not accept this text as a driver name",
        "check the driver name",
    ),
    ("unbind", ENODEV): (
        "another driver took the function in the meantime",
        "run the command again",
    ),
    ("unbind", ENOENT): ("the function lost its driver, or vanished", _GONE),
    ("unbind", EPERM): ("the driver does not release the device", _LOCKDOWN),
    ("probe", ENODEV): ("the function vanished", _GONE),
    ("probe", EINVAL): (
        "a guest uses a member of its IOMMU group, or the function vanished",
        "shut down the guest, then run the command again",
    ),
    ("bind", ENODEV): (
        "the driver does not support this function",
        "choose a driver that lists its PCI ID, or check driver_override",
    ),
    ("bind", ENOENT): ("the driver is not loaded", "load its kernel module with modprobe"),
    ("bind", EINVAL): (
        (
            "the driver rejects it: vfio-pci supports neither bridges nor devices without an "
            "IOMMU group"
        ),
        "show the group with vfiomgr show; see dmesg for the driver's message",
    ),
    ("bind", EBUSY): (
        "its virtual functions exist, a guest uses a member of its group, or a driver has it",
        "remove the virtual functions, shut down the guest, then run the command again",
    ),
    ("new-id", EINVAL): ("the kernel does not accept these PCI IDs", "see dmesg"),
    ("new-id", ENOENT): ("the driver is not loaded", "load its kernel module with modprobe"),
    ("bind", EPERM): ("the driver denies this device", _LOCKDOWN),
    ("bind", ENOMEM): ("the kernel is out of memory", _NO_FREE_MEMORY),
    ("bind", EIO): ("the device does not answer", "reset or power-cycle it; see dmesg"),
    ("mdev-create", EEXIST): (
        "the UUID is in use",
        "choose another UUID, or omit it to get a new one",
    ),
    ("mdev-create", EINVAL): (
        "the driver rejects this type now; on NVIDIA GPUs, vGPUs of another size may be running",
        "show what still fits: vfiomgr vgpu list --types",
    ),
    ("mdev-create", ENODEV): ("the parent is being removed", "wait for its driver, then try again"),
    ("mdev-create", ENOENT): (
        "the parent or its type vanished",
        "list them: vfiomgr vgpu list --types",
    ),
    ("mdev-create", ENOSPC): (
        "the parent has no capacity left for this type",
        "remove a vGPU first; show what still fits: vfiomgr vgpu list --types",
    ),
    ("mdev-create", ENOMEM): (
        "the parent or the host is out of memory",
        "remove a vGPU, or free memory on the host, then try again",
    ),
    ("mdev-create", EIO): (
        f"the vendor's driver refused; NVIDIA's refuses if {_NVIDIA_REFUSES}",
        f"show what still fits: vfiomgr vgpu list --types; {_HOST_SERVICE}",
    ),
    ("mdev-remove", ENODEV): (
        "it is already being removed",
        "list the remaining ones: vfiomgr vgpu list",
    ),
    ("mdev-create", EUSERS): (
        "the parent has reached its maximum",
        "remove a vGPU first; show what still fits: vfiomgr vgpu list --types",
    ),
    ("mdev-create", EPERM): (
        "the driver refuses: the virtual function has a vGPU, or the GPU is in another mode",
        "list the vGPUs: vfiomgr vgpu list; show the mode: nvidia-smi -q",
    ),
    ("vgpu-type", EPERM): (
        "the virtual function already is a vGPU, or already is not one",
        "list the vGPUs: vfiomgr vgpu list; remove one before you change its type",
    ),
    ("vgpu-type", EINVAL): (
        "the driver does not support this type, or not next to the running vGPUs",
        "show what still fits: vfiomgr vgpu list --types",
    ),
    ("vgpu-type", EIO): (
        "the GPU refused: no GPU instance fits (MIG), its memory is used, or another size runs",
        "see dmesg (NVRM) and nvidia-smi vgpu -c; with MIG: vfiomgr vgpu instances",
    ),
    ("vgpu-type", EBUSY): (
        "a guest has the virtual function open",
        "shut down the guest first",
    ),
    ("vgpu-type", ENOSPC): (
        "the GPU has no capacity left for this type",
        "remove a vGPU first; show what still fits: vfiomgr vgpu list --types",
    ),
    ("vgpu-type", ENXIO): (
        "the driver has not set the virtual function up",
        "recreate the virtual functions while the vendor's host service runs",
    ),
    ("vgpu-type", ENODEV): ("the function vanished", _GONE),
    ("vgpu-type", ENOENT): (
        "the driver no longer exposes the virtual function through VFIO",
        "recreate the virtual functions; see dmesg",
    ),
    ("attribute", EINVAL): (
        "the driver does not accept this text",
        "compare it with the vendor's documentation of the attribute; see dmesg",
    ),
    ("attribute", EACCES): ("the attribute is read-only", "remove it from the definition"),
    ("attribute", EPERM): (
        "the driver does not allow writing it now",
        "stop the user of the vGPU, then try again; see dmesg",
    ),
    ("attribute", EBUSY): ("the vGPU is in use", "shut down the guest first"),
    ("attribute", ENOENT): ("the vGPU vanished", "list the vGPUs: vfiomgr vgpu list"),
    ("attribute", ENODEV): ("the vGPU vanished", "list the vGPUs: vfiomgr vgpu list"),
    ("attribute", ENXIO): (
        "the driver has not set the vGPU up",
        "see dmesg; check that the vendor's host service runs",
    ),
    ("attribute", E2BIG): ("the text is too long for the driver", "shorten it"),
    ("attribute", EIO): (
        "the vendor's driver failed",
        "see dmesg; check that its host service runs",
    ),
    ("attribute", EADDRNOTAVAIL): (
        "the host reserves what the text requests",
        "assign it to vGPUs first, e.g. with chzdev for queues of vfio_ap",
    ),
    ("attribute", EADDRINUSE): (
        "another vGPU has what the text requests",
        "show the attributes of the others: vfiomgr vgpu list --defined",
    ),
    ("vf-count", ERANGE): (
        "the function supports no more than its sriov_totalvfs",
        "show the maximum: vfiomgr sriov list; the device's firmware settings may raise it",
    ),
    ("vf-count", ENOENT): (
        "the driver does not support virtual functions (no sriov_configure), or no driver is bound",
        "bind the function to its host driver first; vfio-pci does not create virtual functions",
    ),
    ("vf-count", EBUSY): (
        "another number was set in the meantime, and the kernel requires 0 before a new one",
        "run the command again",
    ),
    ("vf-count", ENOSPC): _NO_ROOM,
    ("vf-count", ENOMEM): _NO_ROOM,
    ("vf-count", EINVAL): (
        "the driver or the device rejects this number",
        "see dmesg; some devices support only certain numbers, or none in this mode",
    ),
    ("vf-count", EPERM): (
        "the driver refuses: virtual functions are in use, or its mode does not allow it",
        "see dmesg; stop using the virtual functions, then run the command again",
    ),
    ("nvidia-vf-count", EPERM): _VENDOR_MAKES_THEM,
    ("nvidia-vf-count", EINVAL): _VENDOR_MAKES_THEM,
    ("nvidia-vf-count", ENOENT): _VENDOR_MAKES_THEM,
    ("vf-count", EOPNOTSUPP): (
        "SR-IOV is disabled in the device's firmware",
        "enable it with the vendor's tool, then power-cycle the host",
    ),
    ("vf-count", EIO): (
        "the device reports contradictory information about its virtual functions",
        "see dmesg; update the device's firmware",
    ),
    ("vf-count", EAGAIN): ("the driver is busy, possibly with a reset", "try again in a moment"),
    ("vf-count", ENODEV): ("the function vanished", _GONE),
    ("vf-count", EACCES): ("root privileges are missing", "run as root outside of a container"),
    ("quota", EINVAL): (
        "the driver does not accept this value, or this priority for this function",
        "show the quotas: vfiomgr sriov list ADDRESS; see dmesg",
    ),
    ("quota", ERANGE): (
        "the number is too large: times have 32 bits, memory 64",
        "request a smaller one",
    ),
    ("quota", EPERM): (
        (
            "this GPU does not have this quota, or i915 does not change the memory of existing "
            "functions"
        ),
        "omit this quota; set memory before the functions are created: vfiomgr sriov set",
    ),
    ("quota", EIO): (
        (
            "the GPU's firmware (GuC) refuses; most likely the functions would exceed the "
            "available amount"
        ),
        (
            "request less; show the quotas: vfiomgr sriov list ADDRESS; see dmesg for the "
            "firmware's message"
        ),
    ),
    ("quota", ENOSPC): _NO_VRAM,
    ("quota", ENOMEM): _NO_VRAM,
    ("quota", EUCLEAN): (
        "the value differs between the tiles of the GPU",
        "set it for all functions: vfiomgr sriov set with the address of the physical function",
    ),
    ("quota", ESTALE): (
        "i915 distributes automatically only if no function has a quota",
        "set the remaining ones below iov/vf*/gt* to 0 first",
    ),
    ("quota", EOPNOTSUPP): (
        "the firmware does not change this for a single function",
        "name the physical function, to change all its virtual functions",
    ),
    ("quota", EACCES): (
        "it is read-only here, or root privileges are missing",
        "run as root; the priority of a virtual function follows that of all",
    ),
    ("quota", EBUSY): (
        "the function is in use, or the driver is not ready for it",
        "shut down the guest, or try again in a moment",
    ),
    ("quota", ENOENT): (
        "the driver no longer shows this quota",
        "check that the GPU is still on xe or i915: vfiomgr show",
    ),
    ("quota", ENODEV): ("the GPU vanished", _GONE),
    ("vf-vectors", EBUSY): (
        "a driver is bound to the virtual function and uses its vectors",
        "unbind it, then run the command again: vfiomgr unbind ADDRESS",
    ),
    ("vf-vectors", EOPNOTSUPP): (
        "the driver of the physical function cannot set them (no sriov_set_msix_vec_count)",
        "leave out the vectors; mlx5_core and ice can set them",
    ),
    ("vf-vectors", EINVAL): (
        "the driver does not accept this number, e.g. because it is too small",
        "request another number; see dmesg",
    ),
    ("vf-vectors", EOVERFLOW): (
        "the device does not support that many for one virtual function",
        "request fewer",
    ),
    ("vf-vectors", ENOSPC): (
        "the other virtual functions use too many of the device's vectors or queues",
        "request fewer, or fewer for other virtual functions",
    ),
    ("vf-vectors", ENOENT): (
        "this kernel (before 5.13) cannot set them, or the virtual function vanished",
        _GONE,
    ),
    ("reset-method", EINVAL): (
        f"the kernel cannot reset the function this way; {_ALONE}",
        "see dmesg; show the available methods and why others are unavailable: vfiomgr show",
    ),
    ("reset-method", ENOENT): (
        "the function cannot be reset, or this kernel (before 5.15) does not support a choice",
        "show the available methods: vfiomgr show",
    ),
    ("reset", ENOTTY): (
        f"no method of its reset_method worked: it did not respond in time, or {_ALONE}",
        "see dmesg; try another --method or --with-bus, or assign the entire slot to a guest",
    ),
    ("reset", ENOENT): (
        "the kernel cannot reset the function, or it vanished",
        "show the reason: vfiomgr show; power-cycle the host to reset everything",
    ),
    ("bus-reset", ENOTTY): (
        "a quirk of the kernel forbids it for a device on this bus, or a device did not respond",
        "see dmesg; power-cycle the host to reset everything",
    ),
    ("bus-reset", EAGAIN): (
        "the kernel is busy with a device on this bus, e.g. with its driver",
        "try again in a moment; see dmesg",
    ),
    ("bus-reset", ENOENT): (
        "this kernel (before 6.13) cannot reset the bus of a bridge, or the bridge vanished",
        "power-cycle the host to reset everything",
    ),
    ("bus-reset", EPERM): (
        "the capability CAP_SYS_ADMIN is missing",
        "run as root outside of a container",
    ),
    ("mdev-remove", EAGAIN): ("it is still being created", "try again in a moment"),
}


def explained(error: WriteFailed, operation: Operation, subject: str) -> WriteFailed:
    """The error with its cause and remedy, if the errno of this write is known."""
    known = _CAUSES.get((operation, error.errno))
    if known is None and operation == "nvidia-vf-count":
        known = _CAUSES.get(("vf-count", error.errno))
    cause, remedy = known or ("", "see dmesg for the driver's message")
    message = f"{subject}: {cause}: {error.message}" if cause else f"{subject}: {error.message}"
    return WriteFailed(error.path, error.text, error.errno, message, remedy)


_POLL = 0.05


@contextmanager
def explaining(operation: Operation, subject: str) -> Iterator[None]:
    """Add cause and remedy to the error of a write."""
    try:
        yield
    except WriteFailed as error:
        raise explained(error, operation, subject) from error


def require_runnable(tree: HostTree, program: str) -> None:
    """Require that programs of the host can be run.

    Raises:
        HostError: the tree is not the machine that vfiomgr runs on.

    """
    if not tree.runs_programs:
        message = f"cannot run {program}: {tree.root} is not this machine"
        raise HostError(message, "run vfiomgr on that host")


def require_same_device(tree: HostTree, expected: DeviceIdentity) -> None:
    """Require that the device of a step still is at its address.

    Raises:
        HostError: it is gone or was replaced.

    """
    found = pci_facts.read_identity(tree, expected.address, with_serial=expected.serial is not None)
    if found is None:
        message = f"{expected} is gone"
        raise HostError(
            message, "it was unplugged or powered off; list the present devices: vfiomgr list --all"
        )
    if not found.is_same_as(expected):
        message = f"another device is at this address: {found} instead of {expected}"
        raise HostError(message, "check it with vfiomgr show, then run the command again")


def becomes_true(condition: Callable[[], bool], limit: float) -> bool:
    """Wait up to `limit` seconds for a condition."""
    deadline = time.monotonic() + limit
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL)
    return True
