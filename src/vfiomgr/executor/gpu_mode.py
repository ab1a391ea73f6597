"""Modes of GPUs, by nvidia-smi, and making sure of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

from vfiomgr.errors import HostError, ProgramFailed
from vfiomgr.executor.nvml import IN_USE
from vfiomgr.executor.writing import require_runnable, require_same_device
from vfiomgr.host.nvidia_modes import read_mode, read_persistence
from vfiomgr.model.gpu_step import ModeStep, SetHeterogeneous, SetMig, SetPersistence

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree

_UNKNOWN = "is NVIDIA's driver loaded, with its vGPU host part? see nvidia-smi -q"


def set_mode(tree: HostTree, step: ModeStep) -> None:
    """Bring a GPU into the mode that a step names.

    Raises:
        HostError: nvidia-smi refuses it, or does not show it afterwards.

    """
    require_same_device(tree, step.device)
    require_runnable(tree, "nvidia-smi")
    if _current(tree, step) is step.after:
        return
    try:
        tree.call(*step.command(), limit=None)  # whoever runs the step has a deadline
    except ProgramFailed as error:
        raise _explained(step, error) from error
    found = _current(tree, step)
    if found is not step.after:
        shown = {True: "Enabled", False: "Disabled", None: "nothing"}[found]
        message = f"{step.device.address}: nvidia-smi shows {shown} after {step.commands()[0]}"
        raise HostError(message, _why_not(tree, step))


def _current(tree: HostTree, step: ModeStep) -> bool | None:
    address = step.device.address
    if isinstance(step, SetPersistence):
        return read_persistence(tree, address)
    mode = read_mode(tree, address)
    if mode is None:
        return None
    match step:
        case SetHeterogeneous():
            return mode.heterogeneous
        case SetMig():
            return mode.mig
        case _ as never:
            assert_never(never)


def _explained(step: ModeStep, error: ProgramFailed) -> HostError:
    if error.status == IN_USE:
        message = f"{step.device.address} carries a vGPU, or is in use: {error.message}"
        return HostError(message, "remove its vGPUs first; vfiomgr vgpu list shows all")
    remedy = "see what nvidia-smi says above, and dmesg (NVRM)"
    if isinstance(step, SetHeterogeneous):
        remedy = "the GPU has to have its virtual functions, and no MIG; " + remedy
    return HostError(error.message, remedy)


def _why_not(tree: HostTree, step: ModeStep) -> str:
    mode = read_mode(tree, step.device.address) if isinstance(step, SetMig) else None
    if mode is not None and mode.pending_mig is step.after:
        return (
            f"it waits for a reset of the GPU: stop all that uses it, then nvidia-smi --gpu-reset "
            f"-i {step.device.address}"
        )
    return _UNKNOWN
