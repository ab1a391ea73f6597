"""Rules about devices and vGPUs that are missing, duplicate, or unusable by any guest."""

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
from vfiomgr.vgpu.mig.steps import creation_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.definitions.model import VgpuDefinition
    from vfiomgr.libvirt.model import DomainHostdev
    from vfiomgr.libvirt.preflight.context import AssignedFunction, PreflightContext
    from vfiomgr.vgpu.model import Vgpu


def missing(context: PreflightContext) -> Iterator[Diagnostic]:
    """Libvirt before 9.8 starts QEMU anyway, which then does not find the device."""
    for hostdev in context.hostdevs:
        if hostdev.kind != "pci" or context.host.device_named(hostdev.name) is not None:
            continue
        yield finding(
            "device-missing",
            "blocker",
            f"no such PCI device: {hostdev.name}",
            (context.cite(hostdev), f"{PCI_DEVICES}/{hostdev.name} does not exist"),
            "QEMU cannot open the device and does not start",
            f"{_functions_to_make(context, hostdev)}correct the address (vfiomgr list --all "
            "shows them; they may change with the installed cards), or remove the device: "
            f"{context.removal(hostdev)}",
            subject=hostdev.name,
        )


def _functions_to_make(context: PreflightContext, hostdev: DomainHostdev) -> str:
    """The command that creates a virtual function, if the address is that of one."""
    found = creation_of(context.host, hostdev.name)
    if found is None:
        return ""
    device, command = found
    pf = device.address
    rest = f", which removes the other {device.sriov_numvfs} first" if device.sriov_numvfs else ""
    return f"if it was a virtual function of {pf}, create it again: {command}{rest}; otherwise "


def twice(context: PreflightContext) -> Iterator[Diagnostic]:
    """One device, two elements (virHostdevPreparePCIDevices, qemuBuildHostdevMediatedDevStr).

    Disks may share an NVMe controller: each uses its own namespace.
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
                "a guest can open a device only once",
                "remove all but one of these elements",
            )


class GuardRule(Value):
    """A rule that is a safety check of `bind`, and applies whoever binds the device."""

    id: str
    guard: guards.Guard
    shown: Callable[[PciDevice], str]
    """The evidence, after the function's directory."""
    reason: str
    remedy: str = ""
    """The remedy; by default that of the safety check."""
    then: str = ""
    """What to do after it."""
    is_of_waiting: bool = False
    """Whether it applies only to functions that still must be bound."""

    def __call__(self, context: PreflightContext) -> Iterator[Diagnostic]:
        """Each function of the domain that the safety check rejects."""
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
                    (self.remedy or diagnostic.remedy) + self.then,
                )


def _kind(device: PciDevice) -> str:
    header = "unknown" if device.header_type is None else f"{device.header_type}"
    return f"/config: header type {header}, class {device.class_code}"


GUARD_RULES = (
    GuardRule(
        "bridge",
        guards.bridge,
        _kind,  # libvirt: "Non-endpoint PCI devices cannot be assigned to guests"
        "a bridge carries other devices: neither vfio-pci nor libvirt assigns it to a guest",
        "write the address of the device behind it; vfiomgr groups shows them",
    ),
    GuardRule(
        "silent-device",
        guards.silence,
        lambda _: "/config reads as all ones",
        "the device does not respond: QEMU exits with \"Unknown PCI header type '127'\"",
        then="; if it responds again, check whether the next start of the guest loses it again: "
        "such a device cannot be reset",
    ),
    GuardRule(
        "stuck-device",
        guards.stuck,
        lambda device: f": {device.stuck}",
        "the kernel has locked it: libvirtd would wait for it, and all its domains with it",
    ),
    GuardRule(
        "denied-device",
        guards.denied,  # vfio_pci_dev_in_denylist
        lambda device: f": {device.vendor_id}:{device.device_id}",
        "vfio-pci cannot bind it, neither with vfiomgr nor with managed='yes'",
        is_of_waiting=True,
    ),
    GuardRule(
        "no-group",
        guards.isolation,
        lambda _: " has no iommu_group",
        "VFIO supports only functions that the IOMMU isolates",
    ),
)


def plain_network_device(context: PreflightContext) -> Iterator[Diagnostic]:
    """Libvirt first sets a MAC address (virHostdevSetNetConfig)."""
    for taken in context.functions:
        if taken.hostdev.element != "interface" or taken.device.physical_function is not None:
            continue
        yield finding(
            "interface-not-vf",
            "blocker",
            f"{taken.device} is an <interface>, but not a virtual function",
            (context.cite(taken.hostdev), f"{sysfs(taken.device)} has no physfn"),
            "for an <interface type='hostdev'> libvirt first sets a MAC address, which only "
            "virtual functions support",
            f"write it as a <hostdev> (vfiomgr libvirt hostdev {taken.device.address} prints "
            f"it); or assign a virtual function: vfiomgr sriov set {taken.device.address} COUNT",
            subject=taken.device,
        )


def seen(context: PreflightContext) -> tuple[AssignedFunction, ...]:
    """The functions that the guest sees."""
    return tuple(taken for taken in context.functions if taken.hostdev.is_seen)


_MODEL, _CCW = "vfio-pci", "vfio-ccw"


def inactive(context: PreflightContext) -> Iterator[Diagnostic]:
    """Mediated devices do not survive a reboot; libvirt does not attach an inactive one."""
    for hostdev in context.hostdevs:
        if hostdev.kind != "mdev" or context.host.vgpus.named(hostdev.name) is not None:
            continue
        if hostdev.name in context.hook_needs.vgpus:
            continue
        evidence = (context.cite(hostdev), f"{MDEV_DEVICES}/{hostdev.name} does not exist")
        definition = _definition(context, hostdev.name)
        why = "QEMU opens an active mediated device; libvirt does not create one for a domain"
        if definition is not None:
            yield finding(
                "vgpu-inactive",
                "blocker",
                f"vGPU {hostdev.name} is defined but not active",
                (*evidence, f"{definition.path}: {definition.type_id} on {definition.parent}"),
                why,
                f"vfiomgr vgpu start {hostdev.name}"
                + ("" if definition.autostart else "; vgpu define --autostart starts it at boot"),
                subject=hostdev.name,
            )
            continue
        yield finding(
            "vgpu-missing",
            "blocker",
            f"no such vGPU: {hostdev.name} is neither active nor defined",
            evidence,
            f"{why}; an undefined one does not survive a reboot",
            f"vfiomgr vgpu create --type TYPE {hostdev.name} (vfiomgr vgpu list --types "
            "shows available types)",
            subject=hostdev.name,
        )


def _definition(context: PreflightContext, uuid: str) -> VgpuDefinition | None:
    return next((d for d in context.host.defined.vgpus if d.uuid == uuid), None)


def not_kept(context: PreflightContext) -> Iterator[Diagnostic]:
    """An active vGPU that does not survive a reboot."""
    for hostdev, vgpu in context.vgpus:
        definition = _definition(context, hostdev.name)
        if context.host.definitions is None or (definition and definition.autostart):
            continue
        how = "defined without autostart" if definition else "not defined"
        yield finding(
            "vgpu-not-kept",
            "info",
            f"{vgpu} does not survive a reboot: it is {how}",
            (context.cite(hostdev), f"{MDEV_DEVICES}/{hostdev.name} exists now"),
            "the kernel does not keep mediated devices, and the domain does not start without it",
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
            f"{vgpu} is of {api}, but the domain has model='{hostdev.model}'",
            (
                context.cite(hostdev, f"model='{hostdev.model}'"),
                f"{MDEV_DEVICES}/{hostdev.name}/mdev_type/device_api: {api}",
            ),
            "libvirt compares them before it starts QEMU",
            f"write model='{api}' in line {hostdev.line}",
            subject=vgpu,
        )


def _device_api(context: PreflightContext, vgpu: Vgpu) -> str | None:
    for parent in context.host.vgpus.parents:
        if parent.name == vgpu.parent:
            return next((t.device_api for t in parent.types if t.id == vgpu.type), None)
    return None


def untyped_function(context: PreflightContext) -> Iterator[Diagnostic]:
    """A virtual function of the vendor's driver is not a vGPU until it has a type."""
    for taken in context.functions:
        name = str(taken.device.address)
        if name in context.hook_needs.vgpus:
            continue
        if context.is_vendor_function(taken) and context.host.vgpus.named(name) is None:
            yield finding(
                "function-without-type",
                "blocker",
                f"{taken.device} has no vGPU type",
                (context.cite(taken.hostdev), f"{sysfs(taken.device)}/nvidia/current_vgpu_type: 0"),
                "guests can use it once it is a vGPU; the vGPU does not survive a reboot",
                f"vfiomgr vgpu create --parent {name} --type TYPE (vfiomgr vgpu list --types "
                "shows available types)",
                subject=taken.device,
            )


def display_without_graphics(context: PreflightContext) -> Iterator[Diagnostic]:
    """Libvirt checks it when it reads the domain (qemuValidateDomainMdevDefVFIOPCI)."""
    if context.domain.has_graphics:
        return
    for hostdev in context.hostdevs:
        if hostdev.display:
            yield finding(
                "display-without-graphics",
                "blocker",
                f"{hostdev.name} has display='on', but the domain has no graphics",
                (
                    context.cite(hostdev, "display='on'"),
                    f"{context.at(context.domain.line('devices'))}: no <graphics>",
                ),
                "QEMU shows the image of the device through VNC or SPICE",
                "add <graphics type='vnc'/> to <devices>, or write display='off' in line "
                f"{hostdev.line}",
                subject=hostdev.name,
            )


def several_ramfb(context: PreflightContext) -> Iterator[Diagnostic]:
    """The firmware has one configuration file for ramfb: etc/ramfb (hw/display/ramfb.c)."""
    with_ramfb = [hostdev for hostdev in context.hostdevs if hostdev.ramfb]
    if len(with_ramfb) > 1:
        names = ", ".join(hostdev.name for hostdev in with_ramfb)
        yield finding(
            "several-ramfb",
            "blocker",
            f"{len(with_ramfb)} devices have ramfb='on': {names}",
            tuple(context.cite(hostdev, "ramfb='on'") for hostdev in with_ramfb),
            "the firmware of a guest supports only one ramfb framebuffer",
            f"keep ramfb='on' only in line {with_ramfb[0].line}",
        )


def boot_order(context: PreflightContext) -> Iterator[Diagnostic]:
    """libvirt: "booting from assigned devices is not supported by mediated devices" (67).

    It allows an order for disks of s390 (vfio-ccw), which are not vGPUs.
    """
    for hostdev in context.hostdevs:
        is_vgpu = hostdev.kind == "mdev" and hostdev.model != _CCW
        if is_vgpu and hostdev.boot_order is not None:
            yield finding(
                "vgpu-boot-order",
                "blocker",
                f"vGPU {hostdev.name} has a boot order",
                (context.cite(hostdev, f"<boot order='{hostdev.boot_order}'>"),),
                "libvirt rejects the domain: a guest cannot boot from a mediated device, even "
                "with ramfb",
                f"remove <boot order='{hostdev.boot_order}'/> from the element in line "
                f"{hostdev.line}",
                subject=hostdev.name,
            )
