"""Steps: inert data that describe themselves and know their inverse; the executor acts.

A step that changes the host names the state it leads to, not a single write: carried out again,
or from the middle of an interrupted attempt, it leads to the same state.
"""

from __future__ import annotations

from vfiomgr.engine.load_module import LoadModule
from vfiomgr.passthrough.steps import (
    AwaitVfioNode,
    ChangeDriver,
    ForgetOrigin,
    ReleaseDriver,
    RememberOrigin,
    RequireAnswer,
    ResetFunction,
    SetResetMethod,
)
from vfiomgr.persistence.steps import RebuildInitramfs, ReplaceFile, SetNodeAccess
from vfiomgr.sriov.steps import SetAutoprobe, SetQuotas, SetVfCount
from vfiomgr.vgpu.mig.steps import (
    RunSriovManage,
    SetGpuInstances,
    SetHeterogeneous,
    SetMig,
    SetPersistence,
)
from vfiomgr.vgpu.steps import CreateMdev, RemoveMdev, SetVgpuAttribute, SetVgpuType

Step = (
    LoadModule
    | RememberOrigin
    | ForgetOrigin
    | ChangeDriver
    | ReleaseDriver
    | AwaitVfioNode
    | CreateMdev
    | RemoveMdev
    | SetVgpuType
    | SetVgpuAttribute
    | SetAutoprobe
    | SetVfCount
    | SetQuotas
    | RunSriovManage
    | SetHeterogeneous
    | SetMig
    | SetGpuInstances
    | SetPersistence
    | SetResetMethod
    | ResetFunction
    | RequireAnswer
    | ReplaceFile
    | SetNodeAccess
    | RebuildInitramfs
)


def subject(step: Step) -> str | None:
    """The function or the vGPU that a step is about; None where it is about neither."""
    match step:
        case LoadModule() | ReplaceFile() | RebuildInitramfs():
            return None
        case RememberOrigin(origin=origin) | ForgetOrigin(origin=origin):
            return str(origin.device.address)
        case CreateMdev(uuid=uuid) | RemoveMdev(uuid=uuid):
            return uuid
        case SetVgpuAttribute(vgpu=vgpu):
            return vgpu
        case _:
            return str(step.device.address)
