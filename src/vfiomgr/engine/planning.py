"""From a snapshot and an intent to a plan, or a refusal; pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

from vfiomgr.containers.cdi.requests import RemoveCdi, WriteCdi
from vfiomgr.definitions import plan as definitions_plan
from vfiomgr.definitions import restore
from vfiomgr.definitions import start as definitions_start
from vfiomgr.definitions.requests import DefineVgpu, RestoreVgpus, StartVgpu, StopVgpu, UndefineVgpu
from vfiomgr.gpu import mode, partitioning, switch
from vfiomgr.gpu.requests import DivideGpu, SetGpuMode, SwitchGpu
from vfiomgr.layout import revert
from vfiomgr.layout.requests import ApplyLayout, InstallLayout, RevertLayout, UninstallLayout
from vfiomgr.libvirt.hook import plan as hook_plan
from vfiomgr.libvirt.hook.requests import InstallHook, UninstallHook
from vfiomgr.passthrough import plan as passthrough_plan
from vfiomgr.passthrough import reset
from vfiomgr.passthrough.requests import Bind, Reset, Unbind
from vfiomgr.persistence import file_changes
from vfiomgr.persistence import plan as persistence_plan
from vfiomgr.persistence.requests import ChangeFiles, ForgetPersisted, ImportDriverctl
from vfiomgr.sriov import plan as sriov_plan
from vfiomgr.sriov import quota_plan
from vfiomgr.sriov.requests import ChangeQuotas, SetVirtualFunctions
from vfiomgr.vgpu import plan as vgpu_plan
from vfiomgr.vgpu.requests import CreateVgpu, RemoveVgpu

if TYPE_CHECKING:
    from vfiomgr.engine.plan import Plan
    from vfiomgr.engine.requests import Intent
    from vfiomgr.snapshot.model import HostSnapshot


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
            from vfiomgr.layout import compare  # noqa: PLC0415 - brings pydantic

            return compare.settled(host, intent)
        case _:
            return intent


def _settled_vgpus(host: HostSnapshot, intent: CreateVgpu | StartVgpu | RestoreVgpus) -> Intent:
    match intent:
        case CreateVgpu():
            return vgpu_plan.settled(host, intent)
        case StartVgpu():
            return definitions_start.settled(host, intent)
        case RestoreVgpus():
            return restore.settled(host, intent)


def _settled_division(
    host: HostSnapshot, intent: SetVirtualFunctions | ChangeQuotas | SetGpuMode | SwitchGpu
) -> Intent:
    match intent:
        case SetVirtualFunctions():
            return sriov_plan.settled(host, intent)
        case ChangeQuotas():
            return quota_plan.settled(host, intent)
        case SetGpuMode():
            return mode.settled(host, intent)
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
            made = passthrough_plan.plan_bind(host, intent)
        case Unbind():
            made = passthrough_plan.plan_unbind(host, intent)
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
            return vgpu_plan.plan_create(host, intent)
        case RemoveVgpu():
            return vgpu_plan.plan_remove(host, intent)


def _plan_division(
    host: HostSnapshot,
    intent: SetVirtualFunctions | ChangeQuotas | SetGpuMode | DivideGpu | SwitchGpu,
) -> Plan:
    """How a device is divided, or that it is not."""
    match intent:
        case SetVirtualFunctions():
            return sriov_plan.plan_set(host, intent)
        case ChangeQuotas():
            return quota_plan.plan_change(host, intent)
        case SetGpuMode():
            return mode.plan_mode(host, intent)
        case DivideGpu():
            return partitioning.plan_divide(host, intent)
        case SwitchGpu():
            return switch.plan_switch(host, intent)


def _plan_definition(
    host: HostSnapshot,
    intent: DefineVgpu | UndefineVgpu | StartVgpu | StopVgpu | RestoreVgpus,
) -> Plan:
    """What vGPUs are to be, and bringing them about."""
    match intent:
        case DefineVgpu():
            return definitions_plan.plan_define(host, intent)
        case UndefineVgpu():
            return definitions_plan.plan_undefine(host, intent)
        case StartVgpu():
            return definitions_start.plan_start(host, intent)
        case StopVgpu():
            return definitions_start.plan_stop(host, intent)
        case RestoreVgpus():
            return restore.plan_restore(host, intent)


def _plan_files(
    host: HostSnapshot,
    intent: ForgetPersisted | ImportDriverctl | InstallHook | UninstallHook | ChangeFiles,
) -> Plan:
    """What is kept for the next boot, the next start of a guest or a container, alone."""
    match intent:
        case ForgetPersisted():
            return persistence_plan.plan_forget(host, intent)
        case ImportDriverctl():
            return persistence_plan.plan_import(host, intent)
        case InstallHook():
            return hook_plan.plan_install(host, intent)
        case UninstallHook():
            return hook_plan.plan_uninstall(host)
        case ChangeFiles():
            return file_changes.plan_change(host, intent)


def _plan_cdi(host: HostSnapshot, intent: WriteCdi | RemoveCdi) -> Plan:
    """What container runtimes are told of devices."""
    from vfiomgr.containers.cdi import plan as cdi_plan  # noqa: PLC0415 - few intents are about it

    match intent:
        case WriteCdi():
            return cdi_plan.plan_write(host, intent)
        case RemoveCdi():
            return cdi_plan.plan_remove(host, intent)


def _plan_layout(
    host: HostSnapshot, intent: ApplyLayout | RevertLayout | InstallLayout | UninstallLayout
) -> Plan:
    """What a document says of a whole host, now and at boot."""
    match intent:
        case ApplyLayout():
            from vfiomgr.layout import compare  # noqa: PLC0415 - brings pydantic

            return compare.plan_layout(host, intent)
        case RevertLayout():
            return revert.plan_revert(host, intent)
        case InstallLayout():
            from vfiomgr.layout import boot  # noqa: PLC0415 - brings pydantic

            return boot.plan_install(host, intent)
        case UninstallLayout():
            from vfiomgr.layout import boot  # noqa: PLC0415 - brings pydantic

            return boot.plan_uninstall(host, intent)
