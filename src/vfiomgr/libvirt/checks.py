"""Check whether a domain can start or migrate: `check_domain`, `check_migration`, `hypervisor`."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.documents.text import source_of
from vfiomgr.libvirt.client.binding import DEADLINE
from vfiomgr.libvirt.client.connection import connect
from vfiomgr.libvirt.migration.devices import Migratability, migratability_of, vgpu_migratability
from vfiomgr.libvirt.migration.plan import MigrationReport, check
from vfiomgr.libvirt.preflight.command_line import with_arguments
from vfiomgr.libvirt.preflight.desktop import named_files
from vfiomgr.libvirt.preflight.desktop_files import read_desktop
from vfiomgr.libvirt.preflight.host_files import read_files
from vfiomgr.libvirt.preflight.plan import preflight
from vfiomgr.libvirt.xml.read import read_domain, read_xml
from vfiomgr.paths import HostPath
from vfiomgr.snapshot.named import find_device

if TYPE_CHECKING:
    from vfiomgr.libvirt.model import Domain, Hypervisor
    from vfiomgr.pci.model import PciAddress
    from vfiomgr.rules.runner import Report
    from vfiomgr.snapshot.source import HostSource


def hypervisor(uri: str = "qemu:///system", *, deadline: float = DEADLINE) -> Hypervisor:
    """Query a libvirt about itself and its domains, with `deadline` seconds for each answer.

    Raises:
        LibvirtFailed: the connection failed.
        LibvirtSilent: libvirt did not answer in time.
    """
    # virConnectGetDomainCapabilities answers only connections that may write.
    may_write = os.geteuid() == 0 or "/session" in uri
    with connect(uri, read_only=not may_write, deadline=deadline) as connection:
        return connection.hypervisor()


def check_domain(
    host: HostSource, xml: str | os.PathLike[str], hypervisor: Hypervisor | None = None
) -> Report:
    """Check what would prevent the next start of a domain: findings with evidence and remedy.

    `xml` is the domain, or a file that contains it. Without `hypervisor`, facts that only libvirt
    has are not checked; `Report.not_checked` lists them.

    Raises:
        UsageError: the file does not exist.
        InvalidDocument: the file does not contain a domain.
    """
    (report,) = check_domains(host, [_read(xml)], hypervisor)
    return report


def _read(xml: str | os.PathLike[str]) -> Domain:
    text = os.fspath(xml)
    if text.lstrip().startswith("<"):
        return read_domain(text.encode(), "<xml>")
    return read_domain(read_xml(text), source_of(text))


def check_domains(
    host: HostSource, domains: Sequence[Domain], hypervisor: Hypervisor | None
) -> tuple[Report, ...]:
    """Check several domains that have been read, like `check_domain`."""
    if not domains:
        return ()
    hostdevs = (h for domain in domains for h in with_arguments(domain).hostdevs)
    named = frozenset(hostdev.address for hostdev in hostdevs if hostdev.address)
    seen = host.scan(
        with_users=True,
        with_readiness=True,
        with_guests=True,
        with_desktop=True,
        with_health=True,
        about=named,
    )
    roms = _roms(host, domains)
    files = None if roms is None else read_files(host.tree, roms, [d.name for d in domains])
    if files is not None and host.tree.is_live:
        named_nodes = chain.from_iterable(map(named_files, domains))
        files = replace(files, desktop=read_desktop(host.tree, named_nodes))
    return preflight(seen, domains, hypervisor, roms, files)


def _roms(host: HostSource, domains: Sequence[Domain]) -> dict[str, bool] | None:
    """Which ROM files exist; None if the files are on another machine."""
    if host.snapshot is not None:
        return None
    named = {hostdev.rom_file for domain in domains for hostdev in domain.hostdevs}
    return {path: _is_regular(host, path) for path in named if path and path.startswith("/")}


def _is_regular(host: HostSource, path: str) -> bool:
    status = host.tree.status(HostPath(path))
    return status is not None and stat.S_ISREG(status.st_mode)


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
    return check_domain_migration(host, _read(xml), to or {}, hypervisor, blocked_reasons)


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
