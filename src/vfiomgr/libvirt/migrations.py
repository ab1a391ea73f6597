"""Check whether a domain can migrate, and where to: `vfiomgr.libvirt.check_migration`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from vfiomgr.documents.text import source_of
from vfiomgr.libvirt.client.binding import DEADLINE
from vfiomgr.libvirt.client.connection import connect
from vfiomgr.libvirt.migration.devices import migratability_of, vgpu_migratability
from vfiomgr.libvirt.migration.plan import check
from vfiomgr.libvirt.xml.read import read_domain, read_xml
from vfiomgr.snapshot.named import find_device

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vfiomgr.libvirt.migration.devices import Migratability
    from vfiomgr.libvirt.migration.report import MigrationReport
    from vfiomgr.libvirt.model import Domain, Hypervisor
    from vfiomgr.pci.model import PciAddress
    from vfiomgr.snapshot.source import HostSource


def check_migration(
    host: HostSource,
    xml: str | os.PathLike[str],
    to: Mapping[str, HostSource] | None = None,
    hypervisor: Hypervisor | None = None,
    *,
    blocked_reasons: Sequence[str] | None = None,
) -> MigrationReport:
    """Check whether a domain can migrate: findings about it, and about each host in `to`.

    `xml` is the domain, or a file that contains it; the names in `to` are used in messages.
    `blocked_reasons` are those of its QEMU, as the function of that name returns them.

    Raises:
        UsageError: the file does not exist.
        InvalidDocument: the file does not contain a domain.

    """
    text = os.fspath(xml)
    if text.lstrip().startswith("<"):
        domain = read_domain(text.encode(), "<xml>")
    else:
        domain = read_domain(read_xml(text), source_of(text))
    return check_domain_migration(host, domain, to or {}, hypervisor, blocked_reasons)


def blocked_reasons(
    domain: str, uri: str = "qemu:///system", *, deadline: float = DEADLINE
) -> tuple[str, ...]:
    """Ask QEMU of a running domain why it refuses to migrate (query-migrate, QEMU 6.0).

    libvirt marks the domain as tainted (custom-monitor) until it is shut off.

    Raises:
        LibvirtFailed: the connection failed, or the domain is off.
        LibvirtSilent: libvirt did not answer in time.

    """
    with connect(uri, deadline=deadline) as connection:
        return connection.blocked_reasons(domain)


def check_domain_migration(
    host: HostSource,
    domain: Domain,
    to: Mapping[str, HostSource],
    hypervisor: Hypervisor | None,
    blocked_reasons: Sequence[str] | None = None,
) -> MigrationReport:
    """Check a domain that has been read, like `check_migration`."""
    further = {"with_users": True, "with_readiness": True, "with_guests": True}
    seen = host.scan(**further, with_programs=True)  # type: ignore[arg-type]
    targets = {name: other.scan(**further) for name, other in to.items()}  # type: ignore[arg-type]
    return check(seen, domain, targets, hypervisor, blocked_reasons)


def migratability(host: HostSource, device: str | PciAddress) -> Migratability:
    """Whether a function or an active vGPU can migrate, and why not.

    Raises:
        UnknownDevice: the host has no such device.

    """
    seen = host.scan(with_users=True, with_guests=True)
    vgpu = seen.vgpus.named(str(device))
    if vgpu is not None:
        return vgpu_migratability(seen, vgpu)
    return migratability_of(seen, find_device(seen, str(device)))
