"""Domains of libvirt that are made for the devices of a host: `vfiomgr.libvirt.domain_xml`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

from vfiomgr.libvirt.build.named import DomainOptions, wish_of
from vfiomgr.libvirt.build.numa import MOST_WITHOUT_EIM
from vfiomgr.libvirt.build.plan import plan_guest
from vfiomgr.libvirt.hostdevs import refuse_to_hurt, tell_what_waits
from vfiomgr.libvirt.installed import libvirt_version, qemu_version
from vfiomgr.libvirt.xml import render

if TYPE_CHECKING:
    from vfiomgr.libvirt.build.model import GuestPlan
    from vfiomgr.snapshot.source import HostSource
    from vfiomgr.version import Version


def domain_xml(
    host: HostSource,
    name: str,
    *,
    explain: bool = False,
    version: str | None = None,
    **options: Unpack[DomainOptions],
) -> str:
    """The XML of a domain that has these devices, laid out by what the host is.

    With `explain` it says why each part is so, as comments. It is written for libvirt `version`,
    e.g. `10.0`; None for the one that is installed.

    Raises:
        UsageError: a word or a size cannot be read, or options contradict each other.
        UnknownDevice: the host has no such device or vGPU.
        Refusal: the host, its libvirt or its QEMU cannot do it; it says what would lift that.

    """
    plan, _ = planned_domain(host, name, version, options)
    return render.domain(plan, with_reasons=explain)


def planned_domain(
    host: HostSource, name: str, version: str | None, options: DomainOptions
) -> tuple[GuestPlan, Version]:
    """A domain before it is written, and the libvirt that it is for; what is to be known is noted.

    Raises:
        VfiomgrError: as `domain_xml`.

    """
    wish = wish_of(name, options)
    seen = host.scan()
    libvirt = libvirt_version(host, version)()
    depends = options.get("iommufd", False) or wish.vcpus > MOST_WITHOUT_EIM
    qemu = qemu_version(host)() if depends else None
    plan = plan_guest(seen, wish, libvirt, qemu)
    refuse_to_hurt(lambda: host.scan(with_users=True), plan.hostdevs, seen)
    for line in plan.notes:
        host.on_note(line)
    tell_what_waits(host, lambda: seen, plan.hostdevs, seen)
    return plan, libvirt
