"""Which domain has or claims which device of the host."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Literal

from vfiomgr.diagnostic import Diagnostic, blocker
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.libvirt.model.domain import Domain, Hypervisor, KnownDomain
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.vgpu.guest_device import DomainHostdev, GuestAddress


class DeviceOwner(Value):
    """A device of the host, and a domain that has it or will."""

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
    """By device: functions by their numbers, then mediated devices; by domain where several do."""
    known = [d for d in hypervisor.domains if domain is None or domain in (d.name, d.uuid)]
    found = [(hostdev, claim) for one in known for hostdev, claim in _of_domain(host, one)]
    found.sort(key=lambda pair: _order(*pair))
    return tuple(claim for _, claim in found)


def unread_domains(hypervisor: Hypervisor) -> Iterator[str]:
    """What cannot be told of domains whose XML makes no sense to vfiomgr."""
    for domain in hypervisor.domains:
        if domain.is_unread:
            yield f"{unread_text(domain)}: what it has is unknown"


def unread_text(domain: KnownDomain) -> str:
    """That a domain cannot be read."""
    return f"the XML of the domain {domain.name} cannot be made sense of"


def how_to_read(domain: KnownDomain) -> str:
    """What shows where its XML makes no sense."""
    option = " --inactive" if domain.is_definition_unread else ""
    return (
        f"virsh dumpxml{option} {domain.argument} > x.xml; vfiomgr libvirt preflight x.xml says "
        "where"
    )


def disk_diagnostic(domain: KnownDomain | Domain, hostdev: DomainHostdev) -> Diagnostic:
    """Why a controller behind an NVMe disk cannot come or go as a device of its own."""
    name = shlex.quote(domain.name)
    removal = f"virsh detach-disk {name} {hostdev.disk_target or 'TARGET'} --config"
    return blocker(
        "device-is-disk",
        hostdev.name,
        f"{hostdev.name} is the NVMe controller of the disk {hostdev.disk_target or ''} of "
        f"{domain.name}".replace("  ", " "),
        f"remove the disk first: {removal}",
    )


def _order(hostdev: DomainHostdev, claim: DeviceOwner) -> tuple[bool, object, str]:
    key: object = hostdev.address if hostdev.address is not None else claim.device
    return (hostdev.address is None, key, claim.domain)


def _of_domain(
    host: HostSnapshot, domain: KnownDomain
) -> Iterator[tuple[DomainHostdev, DeviceOwner]]:
    running, defined = (
        {} if version is None else {h.name: h for h in version.hostdevs if h.name}
        for version in (domain.running, domain.defined)
    )
    for name in {**running, **defined}:
        hostdev = running.get(name) or defined[name]
        yield hostdev, _claim(host, domain, hostdev, (name in running, name in defined))


def _claim(
    host: HostSnapshot, domain: KnownDomain, hostdev: DomainHostdev, where: tuple[bool, bool]
) -> DeviceOwner:
    device = host.device_named(hostdev.name)
    vgpu = host.vgpu(hostdev.name)
    title, driver = None, None
    if device is not None:
        title, driver = device.name, device.driver
    elif vgpu is not None:
        title, driver = f"{vgpu.type_name or vgpu.type} on {vgpu.parent}", vgpu.driver
    kind: Literal["pci", "vf", "mdev"] = "mdev" if hostdev.kind == "mdev" else "pci"
    if device is not None and device.physical_function is not None:
        kind = "vf"
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
        guest_address=_written(hostdev.guest),
    )


def _written(guest: GuestAddress | None) -> str | None:
    if guest is None:
        return None
    return f"{guest.domain:04x}:{guest.bus:02x}:{guest.slot:02x}.{guest.function:x}"
