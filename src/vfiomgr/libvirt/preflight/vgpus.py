"""Rules about vGPUs: mediated devices, the vendor's virtual functions, and their displays."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.diagnostic import Diagnostic, finding
from vfiomgr.paths import MDEV_DEVICES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.definitions.model.vgpu import VgpuDefinition
    from vfiomgr.libvirt.preflight.context import AssignedFunction, PreflightContext
    from vfiomgr.vgpu.model import Vgpu

_MODEL, _CCW = "vfio-pci", "vfio-ccw"


def inactive(situation: PreflightContext) -> Iterator[Diagnostic]:
    """Mediated devices are gone after a reboot; libvirt attaches one that is not active."""
    for hostdev in situation.hostdevs:
        if hostdev.kind != "mdev" or situation.host.vgpu(hostdev.name) is not None:
            continue
        if hostdev.name in situation.hook_needs.vgpus:
            continue
        evidence = (situation.cite(hostdev), f"{MDEV_DEVICES}/{hostdev.name} is not there")
        definition = _definition(situation, hostdev.name)
        why = "QEMU opens a mediated device that is active; libvirt makes none for a domain"
        if definition is not None:
            yield finding(
                "vgpu-inactive",
                "blocker",
                f"vGPU {hostdev.name} is defined, and not active",
                (*evidence, f"{definition.path}: {definition.type_id} on {definition.parent}"),
                why,
                f"vfiomgr vgpu start {hostdev.name}"
                + ("" if definition.autostart else "; vgpu define --auto has it start at boot"),
                subject=hostdev.name,
            )
            continue
        yield finding(
            "vgpu-missing",
            "blocker",
            f"there is no vGPU {hostdev.name}, neither active nor defined",
            evidence,
            f"{why}; what is not defined is gone after a reboot",
            f"vfiomgr vgpu create --type TYPE --uuid {hostdev.name} (vfiomgr vgpu types shows what "
            "there is room for)",
            subject=hostdev.name,
        )


def _definition(situation: PreflightContext, uuid: str) -> VgpuDefinition | None:
    return next((d for d in situation.host.vgpu_definitions if d.uuid == uuid), None)


def not_kept(situation: PreflightContext) -> Iterator[Diagnostic]:
    """An active vGPU that nothing brings back after a reboot."""
    for hostdev, vgpu in situation.vgpus:
        definition = _definition(situation, hostdev.name)
        if situation.host.definitions is None or (definition and definition.autostart):
            continue
        how = "defined to start by hand" if definition else "not defined"
        yield finding(
            "vgpu-not-kept",
            "info",
            f"{vgpu} is gone after a reboot: it is {how}",
            (situation.cite(hostdev), f"{MDEV_DEVICES}/{hostdev.name} is there now"),
            "the kernel keeps no mediated device, and without it the domain does not start",
            f"vfiomgr vgpu define --uuid {hostdev.name} --auto",
            subject=vgpu,
        )


def wrong_model(situation: PreflightContext) -> Iterator[Diagnostic]:
    """Libvirt compares it with the type's device_api (virMediatedDeviceCheckModel)."""
    for hostdev, vgpu in situation.vgpus:
        api = _device_api(situation, vgpu)
        if api is None or hostdev.model is None or api == hostdev.model:
            continue
        yield finding(
            "vgpu-model",
            "blocker",
            f"{vgpu} is of {api}, and the domain says model='{hostdev.model}'",
            (
                situation.cite(hostdev, f"model='{hostdev.model}'"),
                f"{MDEV_DEVICES}/{hostdev.name}/mdev_type/device_api: {api}",
            ),
            "libvirt compares the two before it starts QEMU",
            f"write model='{api}' in line {hostdev.line}",
            subject=vgpu,
        )


def _device_api(situation: PreflightContext, vgpu: Vgpu) -> str | None:
    for parent in situation.host.vgpu_parents:
        if parent.name == vgpu.parent:
            return next((t.device_api for t in parent.types if t.id == vgpu.type), None)
    return None


def untyped_function(situation: PreflightContext) -> Iterator[Diagnostic]:
    """A virtual function of the vendor's driver is no vGPU until it has a type."""
    for taken in situation.functions:
        if str(taken.device.address) in situation.hook_needs.vgpus:
            continue
        if situation.is_vendor_function(taken) and _is_untyped(situation, taken):
            address = taken.device.address
            yield finding(
                "function-without-type",
                "blocker",
                f"{taken.device} has no vGPU type",
                (
                    situation.cite(taken.hostdev),
                    f"/sys/bus/pci/devices/{address}/nvidia/current_vgpu_type: 0",
                ),
                "its driver offers it to guests once it is a vGPU of some type, which is gone "
                "after a reboot",
                f"vfiomgr vgpu create --parent {address} --type TYPE (vfiomgr vgpu types shows "
                "what there is room for)",
                subject=taken.device,
            )


def _is_untyped(situation: PreflightContext, taken: AssignedFunction) -> bool:
    return situation.host.vgpu(str(taken.device.address)) is None


def display_without_graphics(situation: PreflightContext) -> Iterator[Diagnostic]:
    """Libvirt asks for it when it reads the domain (qemuValidateDomainMdevDefVFIOPCI)."""
    if situation.domain.has_graphics:
        return
    for hostdev in situation.hostdevs:
        if hostdev.display:
            yield finding(
                "display-without-graphics",
                "blocker",
                f"{hostdev.name} has display='on', and the domain has no graphics",
                (
                    situation.cite(hostdev, "display='on'"),
                    f"{situation.at(situation.domain.line('devices'))}: no <graphics>",
                ),
                "QEMU shows the device's picture through VNC or SPICE",
                "write <graphics type='vnc'/> into <devices>, or display='off' in line "
                f"{hostdev.line}",
                subject=hostdev.name,
            )


def several_ramfb(situation: PreflightContext) -> Iterator[Diagnostic]:
    """Ramfb is one file of the firmware's configuration: etc/ramfb (hw/display/ramfb.c)."""
    with_ramfb = [hostdev for hostdev in situation.hostdevs if hostdev.ramfb]
    if len(with_ramfb) > 1:
        names = ", ".join(hostdev.name for hostdev in with_ramfb)
        yield finding(
            "several-ramfb",
            "blocker",
            f"{len(with_ramfb)} devices have ramfb='on': {names}",
            tuple(situation.cite(hostdev, "ramfb='on'") for hostdev in with_ramfb),
            "a guest has one framebuffer of this kind, which its firmware draws to",
            f"leave ramfb='on' in line {with_ramfb[0].line} alone",
        )


def boot_order(situation: PreflightContext) -> Iterator[Diagnostic]:
    """Libvirt: "booting from assigned devices is not supported by mediated devices" (67).

    It takes an order for disks of s390 (vfio-ccw), which are no vGPUs.
    """
    for hostdev in situation.hostdevs:
        is_vgpu = hostdev.kind == "mdev" and hostdev.model != _CCW
        if is_vgpu and hostdev.boot_order is not None:
            yield finding(
                "vgpu-boot-order",
                "blocker",
                f"the vGPU {hostdev.name} has a boot order",
                (situation.cite(hostdev, f"<boot order='{hostdev.boot_order}'>"),),
                "libvirt rejects the domain: no guest boots from a mediated device, with ramfb "
                "or without",
                f"take <boot order='{hostdev.boot_order}'/> out of the element in line "
                f"{hostdev.line}",
                subject=hostdev.name,
            )
