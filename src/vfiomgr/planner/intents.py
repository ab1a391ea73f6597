"""From a snapshot and an intent to a plan, or a refusal; pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

from vfiomgr.model.intent import (
    ApplyLayout,
    Bind,
    ChangeFiles,
    ChangeQuotas,
    CreateVgpu,
    DefineVgpu,
    DivideGpu,
    ForgetPersisted,
    ImportDriverctl,
    InstallHook,
    InstallLayout,
    Intent,
    RemoveCdi,
    RemoveVgpu,
    Reset,
    RestoreVgpus,
    RevertLayout,
    SetGpuMode,
    SetVirtualFunctions,
    StartVgpu,
    StopVgpu,
    SwitchGpu,
    Unbind,
    UndefineVgpu,
    UninstallHook,
    UninstallLayout,
    WriteCdi,
)
from vfiomgr.planner import (
    definitions,
    division,
    files,
    gpu_mode,
    guest_hook,
    passthrough,
    persistence,
    quotas,
    reset,
    restoration,
    reversion,
    sriov,
    switch,
    vgpu,
    vgpu_start,
)

if TYPE_CHECKING:
    from vfiomgr.model.plan import Plan
    from vfiomgr.model.snapshot import HostSnapshot


def settled(host: HostSnapshot, intent: Intent) -> Intent:
    """The intent as a journal needs it: with all that only the host as it is can tell."""
    match intent:
        case SetVirtualFunctions() | ChangeQuotas() | SetGpuMode() | SwitchGpu():
            return _settled_division(host, intent)
        case Reset():
            return reset.settled(host, intent)
        case CreateVgpu() | StartVgpu() | RestoreVgpus():
            return _settled_vgpus(host, intent)
        case ApplyLayout():
            from vfiomgr.planner import layout  # noqa: PLC0415 - brings pydantic

            return layout.settled(host, intent)
        case _:
            return intent


def _settled_vgpus(host: HostSnapshot, intent: CreateVgpu | StartVgpu | RestoreVgpus) -> Intent:
    match intent:
        case CreateVgpu():
            return vgpu.settled(host, intent)
        case StartVgpu():
            return vgpu_start.settled(host, intent)
        case RestoreVgpus():
            return restoration.settled(host, intent)


def _settled_division(
    host: HostSnapshot, intent: SetVirtualFunctions | ChangeQuotas | SetGpuMode | SwitchGpu
) -> Intent:
    match intent:
        case SetVirtualFunctions():
            return sriov.settled(host, intent)
        case ChangeQuotas():
            return quotas.settled(host, intent)
        case SetGpuMode():
            return gpu_mode.settled(host, intent)
        case SwitchGpu():
            return switch.settled(host, intent)


def plan(host: HostSnapshot, intent: Intent) -> Plan:
    """The steps from the host as it is to what the intent wants.

    Raises:
        Refusal: a guard forbids it.
        UsageError: the intent names what the host does not have.

    """
    match intent:
        case Bind():
            made = passthrough.plan_bind(host, intent)
        case Unbind():
            made = passthrough.plan_unbind(host, intent)
        case CreateVgpu() | RemoveVgpu():
            made = _plan_vgpus(host, intent)
        case SetVirtualFunctions() | ChangeQuotas() | SetGpuMode() | DivideGpu() | SwitchGpu():
            made = _plan_division(host, intent)
        case DefineVgpu() | UndefineVgpu() | StartVgpu() | StopVgpu() | RestoreVgpus():
            made = _plan_definition(host, intent)
        case Reset():
            made = reset.plan_reset(host, intent)
        case (
            ForgetPersisted() | ImportDriverctl() | InstallHook() | UninstallHook() | ChangeFiles()
        ):
            made = _plan_files(host, intent)
        case WriteCdi() | RemoveCdi():
            made = _plan_cdi(host, intent)
        case ApplyLayout() | RevertLayout() | InstallLayout() | UninstallLayout():
            made = _plan_layout(host, intent)
        case _ as never:
            assert_never(never)
    return made


def _plan_vgpus(host: HostSnapshot, intent: CreateVgpu | RemoveVgpu) -> Plan:
    """What vGPUs there are."""
    match intent:
        case CreateVgpu():
            return vgpu.plan_create(host, intent)
        case RemoveVgpu():
            return vgpu.plan_remove(host, intent)


def _plan_division(
    host: HostSnapshot,
    intent: SetVirtualFunctions | ChangeQuotas | SetGpuMode | DivideGpu | SwitchGpu,
) -> Plan:
    """How a device is divided, or that it is not."""
    match intent:
        case SetVirtualFunctions():
            return sriov.plan_set(host, intent)
        case ChangeQuotas():
            return quotas.plan_change(host, intent)
        case SetGpuMode():
            return gpu_mode.plan_mode(host, intent)
        case DivideGpu():
            return division.plan_divide(host, intent)
        case SwitchGpu():
            return switch.plan_switch(host, intent)


def _plan_definition(
    host: HostSnapshot,
    intent: DefineVgpu | UndefineVgpu | StartVgpu | StopVgpu | RestoreVgpus,
) -> Plan:
    """What vGPUs are to be, and bringing them about."""
    match intent:
        case DefineVgpu():
            return definitions.plan_define(host, intent)
        case UndefineVgpu():
            return definitions.plan_undefine(host, intent)
        case StartVgpu():
            return vgpu_start.plan_start(host, intent)
        case StopVgpu():
            return vgpu_start.plan_stop(host, intent)
        case RestoreVgpus():
            return restoration.plan_restore(host, intent)


def _plan_files(
    host: HostSnapshot,
    intent: ForgetPersisted | ImportDriverctl | InstallHook | UninstallHook | ChangeFiles,
) -> Plan:
    """What is kept for the next boot, the next start of a guest or a container, alone."""
    match intent:
        case ForgetPersisted():
            return persistence.plan_forget(host, intent)
        case ImportDriverctl():
            return persistence.plan_import(host, intent)
        case InstallHook():
            return guest_hook.plan_install(host, intent)
        case UninstallHook():
            return guest_hook.plan_uninstall(host)
        case ChangeFiles():
            return files.plan_change(host, intent)


def _plan_cdi(host: HostSnapshot, intent: WriteCdi | RemoveCdi) -> Plan:
    """What container runtimes are told of devices."""
    from vfiomgr.planner.cdi import writing  # noqa: PLC0415 - few intents are about it

    match intent:
        case WriteCdi():
            return writing.plan_write(host, intent)
        case RemoveCdi():
            return writing.plan_remove(host, intent)


def _plan_layout(
    host: HostSnapshot, intent: ApplyLayout | RevertLayout | InstallLayout | UninstallLayout
) -> Plan:
    """What a document says of a whole host, now and at boot."""
    match intent:
        case ApplyLayout():
            from vfiomgr.planner import layout  # noqa: PLC0415 - brings pydantic

            return layout.plan_layout(host, intent)
        case RevertLayout():
            return reversion.plan_revert(host, intent)
        case InstallLayout():
            from vfiomgr.planner import layout_boot  # noqa: PLC0415 - brings pydantic

            return layout_boot.plan_install(host, intent)
        case UninstallLayout():
            from vfiomgr.planner import layout_boot  # noqa: PLC0415 - brings pydantic

            return layout_boot.plan_uninstall(host, intent)
