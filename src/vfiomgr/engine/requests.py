"""What a user wants; the planner turns an intent into a plan or a refusal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.containers.cdi.requests import RemoveCdi, WriteCdi
from vfiomgr.definitions.requests import DefineVgpu, RestoreVgpus, StartVgpu, StopVgpu, UndefineVgpu
from vfiomgr.gpu.requests import DivideGpu, SetGpuMode, SwitchGpu
from vfiomgr.layout.requests import ApplyLayout, InstallLayout, RevertLayout, UninstallLayout
from vfiomgr.libvirt.hook.requests import InstallHook, UninstallHook
from vfiomgr.passthrough.requests import Bind, Reset, Unbind
from vfiomgr.persistence.requests import ChangeFiles, ForgetPersisted, ImportDriverctl
from vfiomgr.sriov.requests import ChangeQuotas, SetVirtualFunctions
from vfiomgr.vgpu.requests import CreateVgpu, RemoveVgpu

if TYPE_CHECKING:
    from vfiomgr.pci.model import PciAddress


def wished_layout(intent: Intent) -> ApplyLayout | None:
    """The layout that an intent looks at a host for."""
    match intent:
        case ApplyLayout():
            return intent
        case InstallLayout():
            return intent.wish
        case _:
            return None


def named_functions(intent: Intent) -> tuple[PciAddress, ...]:
    """The PCI functions that an intent names."""
    match intent:
        case Bind() | Unbind():
            return intent.addresses
        case (
            SetVirtualFunctions()
            | ChangeQuotas()
            | SetGpuMode()
            | DivideGpu()
            | SwitchGpu()
            | Reset()
        ):
            return (intent.address,)
        case _:
            return ()


def is_about_files(intent: Intent) -> bool:
    """Whether an intent is carried out in files alone, so that a tree without a kernel will do."""
    return isinstance(intent, ChangeFiles | WriteCdi | RemoveCdi)


def wants_resets(intent: Intent) -> bool:
    """Whether it may have to be told why a function cannot be reset in some way."""
    return isinstance(intent, Reset | ApplyLayout | InstallLayout) or (
        isinstance(intent, Bind) and intent.reset_method is not None
    )


def wants_gpu_modes(intent: Intent) -> bool:
    """Whether nvidia-smi has to be asked how GPUs divide their memory."""
    return isinstance(
        intent,
        CreateVgpu
        | DefineVgpu
        | StartVgpu
        | RestoreVgpus
        | SetVirtualFunctions
        | SetGpuMode
        | DivideGpu
        | SwitchGpu
        | ApplyLayout
        | InstallLayout,
    )


Intent = (
    Bind
    | Unbind
    | CreateVgpu
    | RemoveVgpu
    | DefineVgpu
    | UndefineVgpu
    | StartVgpu
    | StopVgpu
    | RestoreVgpus
    | SetVirtualFunctions
    | ChangeQuotas
    | SetGpuMode
    | DivideGpu
    | SwitchGpu
    | Reset
    | ForgetPersisted
    | ImportDriverctl
    | ApplyLayout
    | RevertLayout
    | InstallLayout
    | UninstallLayout
    | InstallHook
    | UninstallHook
    | WriteCdi
    | RemoveCdi
    | ChangeFiles
)
