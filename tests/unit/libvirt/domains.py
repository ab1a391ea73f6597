"""Domains of libvirt as values, for tests of planners."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.guests.device import units_of
from vfiomgr.guests.model import AttachOptions, DeviceRequest, GuestAddress
from vfiomgr.libvirt.build.hostdevs import places
from vfiomgr.libvirt.model import (
    Domain,
    DomainCpu,
    DomainHostdev,
    DomainMemory,
    Hypervisor,
    KnownDomain,
    PciController,
)
from vfiomgr.libvirt.xml import render
from vfiomgr.pci.model import PciAddress
from vfiomgr.units import Version

if TYPE_CHECKING:
    from vfiomgr.snapshot.model import HostSnapshot

GIB = 1 << 30
EMPTY = Domain(
    source="win",
    name="win",
    uuid="5d7e9c3a-6b0f-4f0e-9a43-0e2f5a1b7c11",
    kind="kvm",
    machine="pc-q35-7.2",
    architecture="x86_64",
    memory=DomainMemory(total_bytes=GIB),
    cpu=DomainCpu(count=1),
    controllers=(PciController(1, 0, "pcie-root"),),
)


def hostdev(
    name: str, guest: GuestAddress | None = None, *, managed: bool = False
) -> DomainHostdev:
    """A PCI function or, of a UUID, a mediated device."""
    if "." not in name:
        return DomainHostdev(1, "mdev", uuid=name, guest=guest, model="vfio-pci", alias="hostdev0")
    address = PciAddress.parse(name)
    return DomainHostdev(1, "pci", address=address, guest=guest, managed=managed, alias="hostdev0")


def with_ports(domain: Domain, *indexes: int, hotplug: bool = True) -> Domain:
    """With root ports of these indexes."""
    ports = tuple(PciController(1, i, "pcie-root-port", has_hotplug=hotplug) for i in indexes)
    return replace(domain, controllers=(*domain.controllers, *ports))


def with_hostdevs(domain: Domain, *hostdevs: DomainHostdev) -> Domain:
    """With these devices, and their places taken."""
    places = tuple(h.guest for h in hostdevs if h.guest is not None)
    return replace(domain, hostdevs=(*domain.hostdevs, *hostdevs), taken=(*domain.taken, *places))


def known(
    running: Domain | None = None, defined: Domain | None = None, name: str = "win"
) -> KnownDomain:
    """A domain of a libvirt."""
    return KnownDomain(name, f"uuid-of-{name}", running is not None, running, defined)


def hypervisor(
    *domains: KnownDomain, libvirt: str = "11.3", offers_vfio: bool | None = True
) -> Hypervisor:
    """A libvirt with these domains."""
    version = Version.parse(libvirt)
    return Hypervisor(
        uri="qemu:///system",
        libvirt=version,
        qemu=Version(9, 0),
        offers_vfio=offers_vfio,
        has_kvm=True,
        domains=domains,
    )


def hostdevs(
    host: HostSnapshot,
    *names: str,
    first_bus: int = 8,
    options: AttachOptions | None = None,
) -> list[str]:
    """The elements of the named devices, slots whole."""
    units = units_of(host, [DeviceRequest(name, options or AttachOptions()) for name in names])
    return [render.hostdev(planned) for planned in places(units, first_bus)]
