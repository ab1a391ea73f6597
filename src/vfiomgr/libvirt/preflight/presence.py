"""Rules about devices and vGPUs that are missing, named twice, or unusable by any guest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING

from vfiomgr.diagnostic import Diagnostic, finding
from vfiomgr.libvirt.preflight.context import sysfs
from vfiomgr.passthrough import guards
from vfiomgr.paths import MDEV_DEVICES, PCI_DEVICES
from vfiomgr.pci.model import PciDevice
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.definitions.model.vgpu import VgpuDefinition
    from vfiomgr.libvirt.hostdev import DomainHostdev
    from vfiomgr.libvirt.preflight.context import AssignedFunction, PreflightContext
    from vfiomgr.vgpu.model import Vgpu


_A_BUS = 256
"""Functions of a bus; virtual ones of a device may go on to the next buses."""


def missing(context: PreflightContext) -> Iterator[Diagnostic]:
    """Libvirt before 9.8 starts QEMU all the same, which then finds no such device."""
    for hostdev in context.hostdevs:
        if hostdev.kind != "pci" or context.host.device_named(hostdev.name) is not None:
            continue
        yield finding(
            "device-missing",
            "blocker",
            f"this host has no PCI device {hostdev.name}",
            (context.cite(hostdev), f"{PCI_DEVICES}/{hostdev.name} is not there"),
            "QEMU cannot open a device that the host does not have, and does not start without it",
            f"{_functions_to_make(context, hostdev)}vfiomgr list --all shows the addresses of "
            "this host, which may change with the cards in it; write the right one, or take it "
            f"out: {context.removal(hostdev)}",
            subject=hostdev.name,
        )


def _functions_to_make(context: PreflightContext, hostdev: DomainHostdev) -> str:
    """What makes virtual functions, where the address could be that of one."""
    address = hostdev.address
    able = [
        device
        for device in context.host.devices
        if address is not None
        and device.sriov_totalvfs
        and not device.virtual_functions
        and device.address < address
        and device.address.domain == address.domain
        and address.bus <= device.address.bus + 1 + device.sriov_totalvfs // _A_BUS
    ]
    if not able:
        return ""
    return (
        "if it was a virtual function, they are gone after a reboot: vfiomgr sriov set "
        f"{able[-1].address} COUNT makes those of {able[-1]}; else "
    )


def twice(context: PreflightContext) -> Iterator[Diagnostic]:
    """One device, two elements (virHostdevPreparePCIDevices, qemuBuildHostdevMediatedDevStr).

    Disks may share an NVMe controller: each is a namespace of its own.
    """
    lines: dict[str, list[DomainHostdev]] = defaultdict(list)
    for hostdev in context.domain.hostdevs:
        if hostdev.name:
            lines[hostdev.name].append(hostdev)
    for name, elements in lines.items():
        if len(elements) > 1 and any(hostdev.element != "disk" for hostdev in elements):
            yield finding(
                "device-twice",
                "blocker",
                f"the domain names {name} {len(elements)} times",
                tuple(context.cite(hostdev) for hostdev in elements),
                "a guest can open a device once",
                "take all but one of these elements out",
            )


class GuardRule(Value):
    """A rule that is a guard of `bind`: what no guest can have, whoever gives it."""

    id: str
    guard: guards.Guard
    shown: Callable[[PciDevice], str]
    """What shows it, after the function's directory."""
    reason: str
    remedy: str = "{remedy}"
    """With the guard's own."""
    is_of_waiting: bool = False
    """Whether it is about functions that somebody has to bind, and about no others."""

    def __call__(self, context: PreflightContext) -> Iterator[Diagnostic]:
        """Each function of the domain that the guard objects to."""
        for taken in context.waiting if self.is_of_waiting else context.functions:
            for diagnostic in self.guard(context.host, taken.device):
                yield finding(
                    self.id,
                    "blocker",
                    diagnostic.summary,
                    (
                        context.cite(taken.hostdev),
                        f"{sysfs(taken.device)}{self.shown(taken.device)}",
                    ),
                    self.reason,
                    self.remedy.format(remedy=diagnostic.remedy),
                )


def _kind(device: PciDevice) -> str:
    header = "unknown" if device.header_type is None else f"{device.header_type}"
    return f"/config: header type {header}, class {device.class_code}"


GUARD_RULES = (
    GuardRule(
        "bridge",
        guards.bridge,
        _kind,  # libvirt: "Non-endpoint PCI devices cannot be assigned to guests"
        "bridges carry other devices: neither vfio-pci nor libvirt gives one to a guest",
        "write the address of the device behind it instead; vfiomgr groups shows them",
    ),
    GuardRule(
        "silent-device",
        guards.silence,
        lambda _: "/config reads as all ones",
        "it is off the bus: QEMU ends with \"Unknown PCI header type '127'\"",
        "{remedy}; where it comes back, look whether the next guest start loses it again: such a "
        "device cannot be reset",
    ),
    GuardRule(
        "stuck-device",
        guards.stuck,
        lambda device: f": {device.stuck}",
        "the kernel has it locked: libvirtd would wait for it, and with it all its domains",
    ),
    GuardRule(
        "denied-device",
        guards.denied,  # vfio_pci_dev_in_denylist
        lambda device: f": {device.vendor_id}:{device.device_id}",
        "vfio-pci does not bind to it, whoever asks: vfiomgr, or libvirt with managed='yes'",
        is_of_waiting=True,
    ),
    GuardRule(
        "no-group",
        guards.isolation,
        lambda _: " has no iommu_group",
        "VFIO takes no function that the IOMMU does not isolate",
    ),
)


def plain_network_device(context: PreflightContext) -> Iterator[Diagnostic]:
    """Libvirt sets a MAC address first (virHostdevSetNetConfig)."""
    for taken in context.functions:
        if taken.hostdev.element != "interface" or taken.device.physical_function is not None:
            continue
        yield finding(
            "interface-not-vf",
            "blocker",
            f"{taken.device} is no virtual function, and is written as an <interface>",
            (context.cite(taken.hostdev), f"{sysfs(taken.device)} has no physfn"),
            "for an <interface type='hostdev'> libvirt first sets a MAC address, which it does for "
            "virtual functions alone",
            f"write it as a <hostdev>: vfiomgr libvirt hostdev {taken.device.address} prints it; "
            f"or give one of its virtual functions: vfiomgr sriov set {taken.device.address} COUNT",
            subject=taken.device,
        )


def seen(context: PreflightContext) -> tuple[AssignedFunction, ...]:
    """The functions that the guest sees."""
    return tuple(taken for taken in context.functions if taken.hostdev.is_seen)


_MODEL, _CCW = "vfio-pci", "vfio-ccw"


def inactive(context: PreflightContext) -> Iterator[Diagnostic]:
    """Mediated devices are gone after a reboot; libvirt attaches one that is not active."""
    for hostdev in context.hostdevs:
        if hostdev.kind != "mdev" or context.host.vgpu(hostdev.name) is not None:
            continue
        if hostdev.name in context.hook_needs.vgpus:
            continue
        evidence = (context.cite(hostdev), f"{MDEV_DEVICES}/{hostdev.name} is not there")
        definition = _definition(context, hostdev.name)
        why = "QEMU opens a mediated device that is active; libvirt makes none for a domain"
        if definition is not None:
            yield finding(
                "vgpu-inactive",
                "blocker",
                f"vGPU {hostdev.name} is defined, and not active",
                (*evidence, f"{definition.path}: {definition.type_id} on {definition.parent}"),
                why,
                f"vfiomgr vgpu start {hostdev.name}"
                + (
                    "" if definition.autostart else "; vgpu define --autostart has it start at boot"
                ),
                subject=hostdev.name,
            )
            continue
        yield finding(
            "vgpu-missing",
            "blocker",
            f"there is no vGPU {hostdev.name}, neither active nor defined",
            evidence,
            f"{why}; what is not defined is gone after a reboot",
            f"vfiomgr vgpu create --type TYPE {hostdev.name} (vfiomgr vgpu types shows what "
            "there is room for)",
            subject=hostdev.name,
        )


def _definition(context: PreflightContext, uuid: str) -> VgpuDefinition | None:
    return next((d for d in context.host.vgpu_definitions if d.uuid == uuid), None)


def not_kept(context: PreflightContext) -> Iterator[Diagnostic]:
    """An active vGPU that nothing brings back after a reboot."""
    for hostdev, vgpu in context.vgpus:
        definition = _definition(context, hostdev.name)
        if context.host.definitions is None or (definition and definition.autostart):
            continue
        how = "defined to start by hand" if definition else "not defined"
        yield finding(
            "vgpu-not-kept",
            "info",
            f"{vgpu} is gone after a reboot: it is {how}",
            (context.cite(hostdev), f"{MDEV_DEVICES}/{hostdev.name} is there now"),
            "the kernel keeps no mediated device, and without it the domain does not start",
            f"vfiomgr vgpu define {hostdev.name} --autostart",
            subject=vgpu,
        )


def wrong_model(context: PreflightContext) -> Iterator[Diagnostic]:
    """Libvirt compares it with the type's device_api (virMediatedDeviceCheckModel)."""
    for hostdev, vgpu in context.vgpus:
        api = _device_api(context, vgpu)
        if api is None or hostdev.model is None or api == hostdev.model:
            continue
        yield finding(
            "vgpu-model",
            "blocker",
            f"{vgpu} is of {api}, and the domain says model='{hostdev.model}'",
            (
                context.cite(hostdev, f"model='{hostdev.model}'"),
                f"{MDEV_DEVICES}/{hostdev.name}/mdev_type/device_api: {api}",
            ),
            "libvirt compares the two before it starts QEMU",
            f"write model='{api}' in line {hostdev.line}",
            subject=vgpu,
        )


def _device_api(context: PreflightContext, vgpu: Vgpu) -> str | None:
    for parent in context.host.vgpu_parents:
        if parent.name == vgpu.parent:
            return next((t.device_api for t in parent.types if t.id == vgpu.type), None)
    return None


def untyped_function(context: PreflightContext) -> Iterator[Diagnostic]:
    """A virtual function of the vendor's driver is no vGPU until it has a type."""
    for taken in context.functions:
        if str(taken.device.address) in context.hook_needs.vgpus:
            continue
        if context.is_vendor_function(taken) and _is_untyped(context, taken):
            address = taken.device.address
            yield finding(
                "function-without-type",
                "blocker",
                f"{taken.device} has no vGPU type",
                (
                    context.cite(taken.hostdev),
                    f"/sys/bus/pci/devices/{address}/nvidia/current_vgpu_type: 0",
                ),
                "its driver offers it to guests once it is a vGPU of some type, which is gone "
                "after a reboot",
                f"vfiomgr vgpu create --parent {address} --type TYPE (vfiomgr vgpu types shows "
                "what there is room for)",
                subject=taken.device,
            )


def _is_untyped(context: PreflightContext, taken: AssignedFunction) -> bool:
    return context.host.vgpu(str(taken.device.address)) is None


def display_without_graphics(context: PreflightContext) -> Iterator[Diagnostic]:
    """Libvirt asks for it when it reads the domain (qemuValidateDomainMdevDefVFIOPCI)."""
    if context.domain.has_graphics:
        return
    for hostdev in context.hostdevs:
        if hostdev.display:
            yield finding(
                "display-without-graphics",
                "blocker",
                f"{hostdev.name} has display='on', and the domain has no graphics",
                (
                    context.cite(hostdev, "display='on'"),
                    f"{context.at(context.domain.line('devices'))}: no <graphics>",
                ),
                "QEMU shows the device's picture through VNC or SPICE",
                "write <graphics type='vnc'/> into <devices>, or display='off' in line "
                f"{hostdev.line}",
                subject=hostdev.name,
            )


def several_ramfb(context: PreflightContext) -> Iterator[Diagnostic]:
    """Ramfb is one file of the firmware's configuration: etc/ramfb (hw/display/ramfb.c)."""
    with_ramfb = [hostdev for hostdev in context.hostdevs if hostdev.ramfb]
    if len(with_ramfb) > 1:
        names = ", ".join(hostdev.name for hostdev in with_ramfb)
        yield finding(
            "several-ramfb",
            "blocker",
            f"{len(with_ramfb)} devices have ramfb='on': {names}",
            tuple(context.cite(hostdev, "ramfb='on'") for hostdev in with_ramfb),
            "a guest has one framebuffer of this kind, which its firmware draws to",
            f"leave ramfb='on' in line {with_ramfb[0].line} alone",
        )


def boot_order(context: PreflightContext) -> Iterator[Diagnostic]:
    """Libvirt: "booting from assigned devices is not supported by mediated devices" (67).

    It takes an order for disks of s390 (vfio-ccw), which are no vGPUs.
    """
    for hostdev in context.hostdevs:
        is_vgpu = hostdev.kind == "mdev" and hostdev.model != _CCW
        if is_vgpu and hostdev.boot_order is not None:
            yield finding(
                "vgpu-boot-order",
                "blocker",
                f"the vGPU {hostdev.name} has a boot order",
                (context.cite(hostdev, f"<boot order='{hostdev.boot_order}'>"),),
                "libvirt rejects the domain: no guest boots from a mediated device, with ramfb "
                "or without",
                f"take <boot order='{hostdev.boot_order}'/> out of the element in line "
                f"{hostdev.line}",
                subject=hostdev.name,
            )
