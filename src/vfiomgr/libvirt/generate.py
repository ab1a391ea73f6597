"""XML for the devices of a host: `vfiomgr.libvirt.domain_xml` and `hostdev_xml`."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Unpack

from vfiomgr.diagnostic import refuse_if_any
from vfiomgr.errors import UsageError
from vfiomgr.libvirt.build.hostdevs import LAST_BUS, check, places
from vfiomgr.libvirt.build.named import DeviceOptions, DomainOptions, hostdev_options, request_of
from vfiomgr.libvirt.build.numa import MOST_WITHOUT_EIM
from vfiomgr.libvirt.build.plan import plan_guest
from vfiomgr.libvirt.xml import render
from vfiomgr.passthrough import readiness_hints
from vfiomgr.passthrough.guards import taking
from vfiomgr.usage import require_whole
from vfiomgr.version import Version
from vfiomgr.vgpu.guest_device import DeviceRequest, units_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from vfiomgr.libvirt.build.model import GuestPlan
    from vfiomgr.libvirt.hostdev import GuestHostdev
    from vfiomgr.pci.model import PciAddress
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.snapshot.source import HostSource


ASSUMED = "9.0.0"
"""What an unknown libvirt is taken for: all that it reads, later ones read too."""
_DAEMONS = ("libvirtd", "virtqemud", "virsh")
_QEMU = ("qemu-system-x86_64", "qemu-system-aarch64", "/usr/libexec/qemu-kvm")
_SECONDS = 5.0


def libvirt_version(host: HostSource, told: str | None) -> Callable[[], Version]:
    """The version of libvirt that is told, or installed; it is asked for once, when called.

    Raises:
        UsageError: what is told is no version.

    """
    known = None if told is None else Version.parse(told)

    @cache
    def version() -> Version:
        found = known or _installed(host, _DAEMONS)
        if found is None:
            host.on_note(
                f"no libvirt is installed here: this is for {ASSUMED}; --libvirt-version tells"
            )
        return found or Version.parse(ASSUMED)

    return version


def qemu_version(host: HostSource) -> Callable[[], Version | None]:
    """The version of QEMU that is installed, None where there is none; asked for when called."""
    return cache(lambda: _installed(host, _QEMU))


def _installed(host: HostSource, programs: tuple[str, ...]) -> Version | None:
    """What the first of some programs tells of itself; of another host's tree, nothing."""
    if host.snapshot is not None:
        return None
    for program in programs:
        words = (host.tree.run((program, "--version"), _SECONDS) or "").split()
        for word in words:
            if not word[:1].isdecimal():
                continue
            try:
                return Version.parse(word)
            except UsageError:
                continue
    return None


FIRST_BUS = 8
"""Behind the devices that a domain of virt-install has; libvirt adds the ports up to it."""


def hostdev_xml(
    host: HostSource,
    *devices: str | PciAddress,
    guest_bus: int = FIRST_BUS,
    only: bool = False,
    version: str | None = None,
    **options: Unpack[DeviceOptions],
) -> str:
    """The <hostdev> elements for PCI devices (with their slots) and vGPUs, for <devices>.

    The functions of a slot become one multifunction guest device, whose root port has the index
    `guest_bus` (for several devices, the first one; 1 to 255); with `only` its other functions are
    left out. They are written for libvirt `version`, e.g. `10.0`; None for the one that is
    installed.

    Raises:
        UsageError: a name is no device, or `version` is no version.
        UnknownDevice: the host has no such device or vGPU.
        Refusal: this libvirt cannot read it, or libvirt is to bind a device that `bind` refuses.

    """
    names = [str(device) for device in devices]
    hostdevs = planned_hostdevs(host, names, guest_bus, version, only, options)
    return "".join(map(render.hostdev, hostdevs))


def planned_hostdevs(  # noqa: PLR0913, PLR0917 - what a user says of the devices
    host: HostSource,
    names: Sequence[str],
    guest_bus: int,
    version: str | None,
    only: bool,  # noqa: FBT001 - as the one before
    options: DeviceOptions,
) -> tuple[GuestHostdev, ...]:
    """The elements before they are written; what makes devices ready for a guest is noted."""
    require_whole("--guest-bus", guest_bus, 1, LAST_BUS)
    seen = host.slots_of(names)
    given = hostdev_options(options)
    units = units_of(seen, [DeviceRequest(name, given, is_alone=only) for name in names])
    check(units, libvirt_version(host, version), qemu_version(host))
    hostdevs = tuple(places(units, guest_bus))
    refuse_to_hurt(lambda: host.scan(with_users=True), hostdevs, seen)
    tell_what_waits(host, host.scan, hostdevs, seen)
    return hostdevs


def refuse_to_hurt(
    around: Callable[[], HostSnapshot], hostdevs: Iterable[GuestHostdev], host: HostSnapshot
) -> None:
    """What libvirt is to bind, it binds without any guard: so they are kept here.

    `host` knows the devices, `around` gives all of the host, which is asked for where it matters.

    Raises:
        Refusal: `vfiomgr bind` would refuse one of the devices.

    """
    devices = [host.device(h.device.address) for h in hostdevs if h.device.address]
    managed = [h.device.address for h in hostdevs if h.device.managed]
    taken = [d.address for d in devices if d.address in managed and not d.is_on_vfio]
    if taken:
        whole = around()
        refuse_if_any(taking(whole, [whole.device(address) for address in taken]), frozenset())


def tell_what_waits(
    source: HostSource,
    around: Callable[[], HostSnapshot],
    hostdevs: Iterable[GuestHostdev],
    host: HostSnapshot,
) -> None:
    """What makes devices ready for the guest that vfiomgr is to bind."""
    bound = [h.device.address for h in hostdevs if not h.device.managed and h.device.address]
    waiting = [a for a in bound if not host.is_ready_for_guests(host.device(a))]
    if waiting:
        if len(waiting) > readiness_hints.MOST:
            readiness_hints.tell_of_many(source, [host.device(address) for address in waiting])
            return
        whole = around()
        readiness_hints.tell_how_to_bind(
            source, whole, [whole.device(address) for address in waiting]
        )


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
    request = request_of(name, options)
    seen = host.scan()
    libvirt = libvirt_version(host, version)()
    depends = options.get("iommufd", False) or request.vcpus > MOST_WITHOUT_EIM
    qemu = qemu_version(host)() if depends else None
    plan = plan_guest(seen, request, libvirt, qemu)
    refuse_to_hurt(lambda: host.scan(with_users=True), plan.hostdevs, seen)
    for line in plan.notes:
        host.on_note(line)
    tell_what_waits(host, lambda: seen, plan.hostdevs, seen)
    return plan, libvirt
