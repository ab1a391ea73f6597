"""Rules about devices that are not there, are named twice, or can go to no guest at all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING

from vfiomgr.diagnostic import Diagnostic, finding
from vfiomgr.libvirt.preflight.context import sysfs
from vfiomgr.passthrough import guards
from vfiomgr.paths import PCI_DEVICES
from vfiomgr.pci.model import PciDevice
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.libvirt.model.domain import DomainHostdev
    from vfiomgr.libvirt.preflight.context import AssignedFunction, PreflightContext


_A_BUS = 256
"""Functions of a bus; virtual ones of a device may go on to the next buses."""


def missing(situation: PreflightContext) -> Iterator[Diagnostic]:
    """Libvirt before 9.8 starts QEMU all the same, which then finds no such device."""
    for hostdev in situation.hostdevs:
        if hostdev.kind != "pci" or situation.host.device_named(hostdev.name) is not None:
            continue
        yield finding(
            "device-missing",
            "blocker",
            f"this host has no PCI device {hostdev.name}",
            (situation.cite(hostdev), f"{PCI_DEVICES}/{hostdev.name} is not there"),
            "QEMU cannot open a device that the host does not have, and does not start without it",
            f"{_functions_to_make(situation, hostdev)}vfiomgr list --all shows the addresses of "
            "this host, which may change with the cards in it; write the right one, or take it "
            f"out: {situation.removal(hostdev)}",
            subject=hostdev.name,
        )


def _functions_to_make(situation: PreflightContext, hostdev: DomainHostdev) -> str:
    """What makes virtual functions, where the address could be that of one."""
    address = hostdev.address
    able = [
        device
        for device in situation.host.devices
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


def twice(situation: PreflightContext) -> Iterator[Diagnostic]:
    """One device, two elements (virHostdevPreparePCIDevices, qemuBuildHostdevMediatedDevStr).

    Disks may share an NVMe controller: each is a namespace of its own.
    """
    lines: dict[str, list[DomainHostdev]] = defaultdict(list)
    for hostdev in situation.domain.hostdevs:
        if hostdev.name:
            lines[hostdev.name].append(hostdev)
    for name, elements in lines.items():
        if len(elements) > 1 and any(hostdev.element != "disk" for hostdev in elements):
            yield finding(
                "device-twice",
                "blocker",
                f"the domain names {name} {len(elements)} times",
                tuple(situation.cite(hostdev) for hostdev in elements),
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

    def __call__(self, situation: PreflightContext) -> Iterator[Diagnostic]:
        """Each function of the domain that the guard objects to."""
        for taken in situation.waiting if self.is_of_waiting else situation.functions:
            for diagnostic in self.guard(situation.host, taken.device):
                yield finding(
                    self.id,
                    "blocker",
                    diagnostic.summary,
                    (
                        situation.cite(taken.hostdev),
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


def plain_network_device(situation: PreflightContext) -> Iterator[Diagnostic]:
    """Libvirt sets a MAC address first (virHostdevSetNetConfig)."""
    for taken in situation.functions:
        if taken.hostdev.element != "interface" or taken.device.physical_function is not None:
            continue
        yield finding(
            "interface-not-vf",
            "blocker",
            f"{taken.device} is no virtual function, and is written as an <interface>",
            (situation.cite(taken.hostdev), f"{sysfs(taken.device)} has no physfn"),
            "for an <interface type='hostdev'> libvirt first sets a MAC address, which it does for "
            "virtual functions alone",
            f"write it as a <hostdev>: vfiomgr libvirt hostdev {taken.device.address} prints it; "
            f"or give one of its virtual functions: vfiomgr sriov set {taken.device.address} COUNT",
            subject=taken.device,
        )


def seen(situation: PreflightContext) -> tuple[AssignedFunction, ...]:
    """The functions that the guest sees."""
    return tuple(taken for taken in situation.functions if taken.hostdev.is_seen)
