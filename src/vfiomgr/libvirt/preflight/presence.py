"""Rules about devices and vGPUs that are missing, duplicate, or unusable by any guest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING

from vfiomgr.check.driver_rules import gpus
from vfiomgr.diagnostic import Diagnostic, info, problem
from vfiomgr.libvirt.preflight.context import PreflightContext, sysfs
from vfiomgr.passthrough import guards, isolation
from vfiomgr.paths import MDEV_DEVICES, PCI_DEVICES
from vfiomgr.pci.model import PciDevice
from vfiomgr.value import Value
from vfiomgr.vgpu.functions import creation_of

if TYPE_CHECKING:
    from vfiomgr.definitions.model import VgpuDefinition
    from vfiomgr.libvirt.model import DomainHostdev


def missing(context: PreflightContext) -> Iterator[Diagnostic]:
    """Libvirt before 9.8 starts QEMU anyway, which then does not find the device."""
    for hostdev in context.hostdevs:
        if hostdev.kind != "pci" or context.host.device_named(hostdev.name) is not None:
            continue
        yield problem(
            "device-missing",
            f"no such PCI device: {hostdev.name}",
            (
                context.cite(hostdev),
                f"{PCI_DEVICES}/{hostdev.name} does not exist",
                *_gpus_elsewhere(context, hostdev),
            ),
            "QEMU cannot open the device and does not start",
            f"{_functions_to_make(context, hostdev)}correct the address (vfiomgr list --all "
            "shows them; they may change with the installed cards), or remove the device: "
            f"{context.removal(hostdev)}",
            subject=hostdev.name,
        )


def _gpus_elsewhere(context: PreflightContext, hostdev: DomainHostdev) -> Iterator[str]:
    """The GPUs that the domain does not name: one of them may have had the address."""
    if hostdev.address is not None and hostdev.address.function == 0:
        others = (d for d in gpus(context.host) if d.address not in context.addresses)
        yield from (f"{d} is a GPU that the domain does not name" for d in islice(others, _SHOWN))


_SHOWN = 4


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
            yield problem(
                "device-twice",
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
    beside_libvirt: str = ""
    """The reason for a guest without libvirt, if it is another one."""
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
                yield problem(
                    self.id,
                    diagnostic.summary,
                    (
                        context.cite(taken.hostdev),
                        f"{sysfs(taken.device)}{self.shown(taken.device)}",
                    ),
                    context.fix(self.reason, self.beside_libvirt or self.reason),
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
        "a bridge carries other devices: vfio-pci does not bind it",
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
        "bar-not-assigned",
        guards.unassigned_bar,
        lambda _: "/resource has the flag 20000000 (unset)",
        "vfio-pci cannot enable the device, so QEMU cannot open it",
    ),
    GuardRule(
        "firmware-framebuffer",
        guards.firmware_framebuffer,
        lambda device: f": /proc/iomem has {', '.join(device.framebuffers)} below it",
        "the kernel refuses the BAR to vfio-pci, and the guest's driver fails",
    ),
    GuardRule(
        "stuck-device",
        guards.stuck,
        lambda device: f": {device.stuck}",
        "the kernel has locked it: libvirtd would wait for it, and all its domains with it",
        "the kernel has locked it: QEMU would wait for it",
    ),
    GuardRule(
        "denied-device",
        guards.denied,  # vfio_pci_dev_in_denylist
        lambda device: f": {device.vendor_id}:{device.device_id}",
        "vfio-pci cannot bind it, neither with vfiomgr nor with managed='yes'",
        "vfio-pci cannot bind it",
        is_of_waiting=True,
    ),
    GuardRule(
        "no-group",
        isolation.isolation,
        lambda _: " has no iommu_group",
        "VFIO supports only functions that the IOMMU isolates",
    ),
)


def plain_network_device(context: PreflightContext) -> Iterator[Diagnostic]:
    """Libvirt first sets a MAC address (virHostdevSetNetConfig)."""
    for taken in context.functions:
        if taken.hostdev.element != "interface" or taken.device.physical_function is not None:
            continue
        yield problem(
            "interface-not-vf",
            f"{taken.device} is an <interface>, but not a virtual function",
            (context.cite(taken.hostdev), f"{sysfs(taken.device)} has no physfn"),
            "for an <interface type='hostdev'> libvirt first sets a MAC address, which only "
            "virtual functions support",
            f"write it as a <hostdev> (vfiomgr libvirt hostdev {taken.device.address} prints "
            f"it); or assign a virtual function: vfiomgr sriov set {taken.device.address} COUNT",
            subject=taken.device,
        )


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
            yield problem(
                "vgpu-inactive",
                f"vGPU {hostdev.name} is defined but not active",
                (*evidence, f"{definition.path}: {definition.type_id} on {definition.parent}"),
                why,
                f"vfiomgr vgpu start {hostdev.name}"
                + ("" if definition.autostart else "; vgpu define --autostart starts it at boot"),
                subject=hostdev.name,
            )
            continue
        yield problem(
            "vgpu-missing",
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
        yield info(
            "vgpu-not-kept",
            f"{vgpu} does not survive a reboot: it is {how}",
            (context.cite(hostdev), f"{MDEV_DEVICES}/{hostdev.name} exists now"),
            f"the kernel does not keep mediated devices, and {context.guest} does not start "
            "without it",
            f"vfiomgr vgpu define {hostdev.name} --autostart",
            subject=vgpu,
        )


def untyped_function(context: PreflightContext) -> Iterator[Diagnostic]:
    """A virtual function of the vendor's driver is not a vGPU until it has a type."""
    for taken in context.functions:
        name = str(taken.device.address)
        if name in context.hook_needs.vgpus:
            continue
        if taken.is_of_vendor and context.host.vgpus.named(name) is None:
            yield problem(
                "function-without-type",
                f"{taken.device} has no vGPU type",
                (context.cite(taken.hostdev), f"{sysfs(taken.device)}/nvidia/current_vgpu_type: 0"),
                "guests can use it once it is a vGPU; the vGPU does not survive a reboot",
                f"vfiomgr vgpu create --parent {name} --type TYPE (vfiomgr vgpu list --types "
                "shows available types)",
                subject=taken.device,
            )
