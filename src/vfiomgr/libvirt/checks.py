"""Check what would prevent the next start of a domain: `vfiomgr.libvirt.check_domain`."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from vfiomgr.documents.text import source_of
from vfiomgr.libvirt.client.binding import DEADLINE
from vfiomgr.libvirt.client.connection import connect
from vfiomgr.libvirt.preflight.plan import preflight
from vfiomgr.libvirt.xml.read import read_domain, read_xml
from vfiomgr.paths import HostPath

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vfiomgr.libvirt.model import Domain, Hypervisor
    from vfiomgr.rules.report import Report
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
    text = os.fspath(xml)
    if text.lstrip().startswith("<"):
        domain = read_domain(text.encode(), "<xml>")
    else:
        domain = read_domain(read_xml(text), source_of(text))
    (report,) = check_domains(host, [domain], hypervisor)
    return report


def check_domains(
    host: HostSource, domains: Sequence[Domain], hypervisor: Hypervisor | None
) -> tuple[Report, ...]:
    """Check several domains that have been read, like `check_domain`."""
    if not domains:
        return ()
    named = frozenset(h.address for domain in domains for h in domain.hostdevs if h.address)
    seen = host.scan(with_users=True, with_readiness=True, with_guests=True, about=named)
    return preflight(seen, domains, hypervisor, _roms(host, domains))


def _roms(host: HostSource, domains: Sequence[Domain]) -> dict[str, bool] | None:
    """Which ROM files exist; None if the files are on another machine."""
    if host.snapshot is not None:
        return None
    named = {hostdev.rom_file for domain in domains for hostdev in domain.hostdevs}
    return {path: _is_regular(host, path) for path in named if path and path.startswith("/")}


def _is_regular(host: HostSource, path: str) -> bool:
    status = host.tree.status(HostPath(path))
    return status is not None and stat.S_ISREG(status.st_mode)
