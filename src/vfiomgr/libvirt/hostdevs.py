"""Devices for guests of libvirt: `vfiomgr.libvirt.hostdev_xml`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

from vfiomgr.diagnostic import refuse_if_any
from vfiomgr.libvirt.build.hostdevs import LAST_BUS, check, places
from vfiomgr.libvirt.build.named import DeviceOptions, hand_over
from vfiomgr.libvirt.installed import libvirt_version, qemu_version
from vfiomgr.libvirt.xml import render
from vfiomgr.usage import require_whole
from vfiomgr.vgpu.guest_device import DeviceRequest, units_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from vfiomgr.pci.model import PciAddress
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.snapshot.source import HostSource
from vfiomgr.vgpu.guest_device import GuestHostdev

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
    given = hand_over(options)
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
        from vfiomgr.passthrough.guards import taking  # noqa: PLC0415 - only then

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
        from vfiomgr.passthrough import readiness_hints  # noqa: PLC0415 - only then

        if len(waiting) > readiness_hints.MOST:
            readiness_hints.tell_of_many(source, [host.device(address) for address in waiting])
            return
        whole = around()
        readiness_hints.tell_how_to_bind(
            source, whole, [whole.device(address) for address in waiting]
        )
