"""Which domain has or claims which host device, and where a domain has room for more."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Literal, NoReturn

from vfiomgr.diagnostic import Diagnostic, blocker, refuse
from vfiomgr.guests.model import GuestAddress
from vfiomgr.libvirt.model import EXPANDER, ROOT_PORT, Domain
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.libvirt.model import DomainHostdev, Hypervisor, KnownDomain, PciController
    from vfiomgr.snapshot.model import HostSnapshot


class DeviceOwner(Value):
    """A device of the host, and a domain that has or claims it."""

    device: str
    """Its address or UUID."""
    kind: Literal["pci", "vf", "mdev"]
    title: str | None
    driver: str | None
    is_on_host: bool
    domain: str
    domain_uuid: str
    is_running: bool
    is_defined: bool
    is_managed: bool
    guest_address: str | None

    @property
    def state(self) -> str:
        """`running`, `defined` or `both`."""
        if self.is_running and self.is_defined:
            return "both"
        return "running" if self.is_running else "defined"


def claims_of(
    host: HostSnapshot, hypervisor: Hypervisor, domain: str | None = None
) -> tuple[DeviceOwner, ...]:
    """All devices that domains have or claim: functions by address, then mediated devices."""
    found = []
    for known in hypervisor.domains:
        if domain is not None and domain not in (known.name, known.uuid):
            continue
        for _, running, defined in known.devices():
            if hostdev := running or defined:
                claim = _claim(host, known, hostdev, (running is not None, defined is not None))
                key: object = hostdev.address if hostdev.address is not None else claim.device
                found.append(((hostdev.address is None, key, known.name), claim))
    return tuple(claim for _, claim in sorted(found, key=itemgetter(0)))


def unread_domains(hypervisor: Hypervisor) -> Iterator[str]:
    """A message for each domain whose XML vfiomgr cannot read."""
    for domain in hypervisor.domains:
        if domain.is_unread:
            yield f"{unread_text(domain)}, so its devices are unknown"


def unread_text(domain: KnownDomain) -> str:
    """A message for a domain whose XML vfiomgr cannot read."""
    return f"cannot read the XML of domain {domain.name}"


def how_to_read(domain: KnownDomain) -> str:
    """The commands that show where the XML is wrong."""
    option = " --inactive" if domain.is_definition_unread else ""
    return (
        f"virsh dumpxml{option} {domain.argument} > x.xml; vfiomgr check domain x.xml shows the "
        "line"
    )


def disk_diagnostic(domain: KnownDomain | Domain, hostdev: DomainHostdev) -> Diagnostic:
    """Why the controller of an NVMe disk cannot be attached or detached separately."""
    name = shlex.quote(domain.name)
    target = shlex.quote(hostdev.disk_target or "TARGET")
    removal = f"virsh detach-disk {name} {target} --config"
    return blocker(
        "device-is-disk",
        hostdev.name,
        f"{hostdev.name} is the NVMe controller of the disk {hostdev.disk_target or ''} of "
        f"{domain.name}".replace("  ", " "),
        f"remove the disk first: {removal}",
    )


def _claim(
    host: HostSnapshot, domain: KnownDomain, hostdev: DomainHostdev, where: tuple[bool, bool]
) -> DeviceOwner:
    device = host.device_named(hostdev.name)
    vgpu = host.vgpus.named(hostdev.name)
    title, driver = None, None
    if device is not None:
        title, driver = device.name, device.driver
    elif vgpu is not None:
        title, driver = f"{vgpu.type_name or vgpu.type} on {vgpu.parent}", vgpu.driver
    kind: Literal["pci", "vf", "mdev"] = "mdev" if hostdev.kind == "mdev" else "pci"
    if device is not None and device.physical_function is not None:
        kind = "vf"
    place = None
    if (guest := hostdev.guest) is not None:
        place = f"{guest.domain:04x}:{guest.bus:02x}:{guest.slot:02x}.{guest.function:x}"
    return DeviceOwner(
        device=hostdev.name,
        kind=kind,
        title=title,
        driver=driver,
        is_on_host=device is not None or vgpu is not None,
        domain=domain.name,
        domain_uuid=domain.uuid,
        is_running=where[0],
        is_defined=where[1],
        is_managed=hostdev.managed,
        guest_address=place,
    )


class Scope(Value):
    """The part of a domain to change: the running guest, its definition, or both."""

    live: bool
    config: bool

    def __bool__(self) -> bool:
        """Whether there is anything to change."""
        return self.live or self.config

    def __str__(self) -> str:
        """`the running guest and the definition`."""
        parts = {"the running guest": self.live, "the definition": self.config}
        return " and ".join(part for part, is_meant in parts.items() if is_meant)


_PORTS = frozenset({ROOT_PORT, "pcie-switch-downstream-port"})
_LAST_BUS = 0xFF
_FIRST_SLOT, _LAST_SLOT = 3, 0x1F
"""Slots of a conventional root bus: 1 is for the chipset (PIIX3), 2 for the first video card."""
_EXPRESS_ARCHITECTURES = frozenset({"aarch64", "riscv64", "loongarch64", "armv7l"})


def is_express(domain: Domain) -> bool:
    """Whether the machine has PCI Express, so that devices go behind root ports."""
    roots = {controller.model for controller in domain.controllers}
    if roots & {"pcie-root", "pci-root"}:
        return "pcie-root" in roots
    machine = domain.machine or ""
    return "q35" in machine or domain.architecture in _EXPRESS_ARCHITECTURES or ROOT_PORT in roots


def free_ports(domain: Domain) -> tuple[PciController, ...]:
    """Ports that no device uses."""
    used = {address.bus for address in domain.taken if not address.domain}
    ports = (one for one in domain.controllers if one.model in _PORTS)
    return tuple(port for port in ports if port.index not in used)


def free_places(domain: Domain) -> Iterator[tuple[GuestAddress, bool]]:
    """Places for multifunction devices, and whether each needs a new port."""
    if is_express(domain):
        yield from _behind_ports(domain)
        return
    used = {address.slot for address in domain.taken if not address.domain and not address.bus}
    for slot in range(_FIRST_SLOT, _LAST_SLOT + 1):
        if slot not in used:
            yield GuestAddress(0, slot, 0, multifunction=True), False


def _behind_ports(domain: Domain) -> Iterator[tuple[GuestAddress, bool]]:
    """Free ports of the root complex, then new ports with the next free indexes.

    A port behind an expander belongs to a NUMA node of the guest, which may be the wrong one.
    """
    expanders = {one.index for one in domain.controllers if one.model == EXPANDER}
    for port in free_ports(domain):
        if port.guest is None or port.guest.bus not in expanders:
            yield GuestAddress(port.index, 0, 0, multifunction=True), False
    used = {address.bus for address in domain.taken if not address.domain}
    known = {*used, *(controller.index for controller in domain.controllers), 0}
    for index in (*range(max(known) + 1, _LAST_BUS + 1), *range(1, max(known))):
        if index not in known:
            yield GuestAddress(index, 0, 0, multifunction=True), True


def refuse_full(domain: Domain, names: Sequence[str]) -> NoReturn:
    """Report that the domain has no place for the devices."""
    if is_express(domain):
        message = f"{domain.name} has no free bus for {', '.join(names)}: all 255 are in use"
        remedy = "remove a controller or a device"
    else:
        message = f"{domain.name} has no free slot on its PCI bus for {', '.join(names)}"
        remedy = "remove a device, or change the machine type of the domain to q35"
    refuse("no-guest-slot", domain.name, message, remedy)


def is_given(domain: Domain | None, name: str) -> bool:
    """Whether the guest sees the device itself, and not an NVMe disk."""
    known = None if domain is None else domain.hostdev(name)
    return known is not None and known.element != "disk"
