"""XML for the devices of a host: `vfiomgr.libvirt.domain_xml` and `hostdev_xml`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Unpack

from msgspec.structs import replace

from vfiomgr import passthrough
from vfiomgr.cli.keywords import fields_of
from vfiomgr.diagnostic import refuse, refuse_if_any
from vfiomgr.errors import UsageError, require_whole
from vfiomgr.guests.device import units_of
from vfiomgr.guests.iommufd import (
    NO_BACKEND,
    OTHER_KERNEL,
    has_iommu,
    with_iommufd,
)
from vfiomgr.guests.model import AttachOptions, DeviceOptions, DeviceRequest, GuestDevice
from vfiomgr.guests.options import depends_on_qemu
from vfiomgr.guests.waiting import note_reserved, note_unbound
from vfiomgr.libvirt.backend import LibvirtBackend, choose_vfio_backend
from vfiomgr.libvirt.build import teaming, vf_token
from vfiomgr.libvirt.build.hostdevs import LAST_BUS, check, places
from vfiomgr.libvirt.build.limits import MOST_WITHOUT_EIM
from vfiomgr.libvirt.build.named import DomainOptions, request_of
from vfiomgr.libvirt.versions import Versions
from vfiomgr.libvirt.xml import render
from vfiomgr.passthrough.guards import taking
from vfiomgr.paths import IOMMU_NODE
from vfiomgr.pci.model import PciAddress, device_text

if TYPE_CHECKING:
    from vfiomgr.guests.iommufd import VfioBackend
    from vfiomgr.libvirt.build.model import DomainPlan
    from vfiomgr.libvirt.model import GuestHostdev
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.snapshot.source import HostSource


def require_iommu(
    host: HostSource, seen: HostSnapshot, versions: Versions, units: Iterable[GuestDevice]
) -> None:
    """Check that the kernel has /dev/iommu, if devices use it; a note for another host.

    libvirt 12.8 refuses the domain otherwise when it is defined, and older ones when it starts.

    Raises:
        Refusal: the kernel of this host does not have it.
    """
    if not any(unit.options.has_iommufd for unit in units):
        return
    if has_iommu(host, seen) is not False:
        return
    message = f"iommufd needs {IOMMU_NODE}, which this host does not have"
    options = "CONFIG_IOMMUFD and CONFIG_VFIO_DEVICE_CDEV"
    if versions.is_elsewhere:
        host.on_note(f"{message}: the kernel of the other host needs {options}")
        return
    otherwise = "omit --iommufd: VFIO groups work without it"
    if seen.vfio.has_groups is False:
        otherwise = OTHER_KERNEL
    remedy = f"run modprobe iommufd, or boot a kernel with {options}; or {otherwise}. For another "
    refuse("iommufd-missing", "", message, f"{remedy}host, pass --libvirt-version")


def _backend(
    host: HostSource,
    seen: HostSnapshot,
    versions: Versions,
    units: Sequence[GuestDevice],
    *,
    asked: bool | None,
) -> VfioBackend:
    """Choose the VFIO backend of new hostdevs and note the reason, unless a user chose it.

    Raises:
        UsageError: VFIO groups are requested, but the kernel has none.
    """
    only = [unit.name for unit in units if unit.options.has_iommufd]
    if asked is False and only:
        message = f"cannot use VFIO groups for {only[0]}: this kernel has none (CONFIG_VFIO_GROUP)"
        raise UsageError(message, "omit --no-iommufd")
    if asked is not None or only:
        return NO_BACKEND
    backend = choose_vfio_backend(host, seen, units, versions)
    if backend.why:
        host.on_note(backend.why)
    return backend


FIRST_BUS = 8
"""Behind the devices of a domain that virt-install creates; libvirt adds the ports up to it."""


def hostdev_xml(
    host: HostSource,
    *devices: str | PciAddress,
    guest_bus: int = FIRST_BUS,
    only: bool = False,
    version: str | None = None,
    qemu_version: str | None = None,
    **options: Unpack[DeviceOptions],
) -> str:
    """The <hostdev> elements for PCI devices (with their slots) and vGPUs, for <devices>.

    The functions of a slot become one multifunction guest device. Its root port has the index
    `guest_bus`, 1 to 255; for several devices, that of the first one. With `only` the other
    functions of the slot are omitted. The elements are for libvirt `version` and QEMU
    `qemu_version`, e.g. `10.0`; None for the installed one. With `version` they are for another
    host, whose QEMU is unknown without `qemu_version`.

    Raises:
        UsageError: a name is not that of a device, or a version is invalid.
        UnknownDevice: the host has no such device or vGPU.
        Refusal: this libvirt cannot read it, or libvirt would bind a device that `bind` refuses.
    """
    names = [device_text(device) for device in devices]
    versions = Versions(host, version, qemu_version)
    hostdevs = planned_hostdevs(host, names, guest_bus, versions, only, options)
    return "".join(map(render.hostdev, hostdevs))


def planned_hostdevs(  # noqa: PLR0913, PLR0917 - what a user says of the devices
    host: HostSource,
    names: Sequence[str],
    guest_bus: int,
    versions: Versions,
    only: bool,  # noqa: FBT001 - as the one before
    options: DeviceOptions,
) -> tuple[GuestHostdev, ...]:
    """Plan the elements; notes say how to make the devices available to a guest."""
    require_whole("--guest-bus", guest_bus, 1, LAST_BUS)
    seen = host.slots_of(names)
    given = AttachOptions(**fields_of(DeviceOptions, options))
    units = units_of(seen, [DeviceRequest(name, given, is_alone=only) for name in names])
    backend = _backend(host, seen, versions, units, asked=options.get("iommufd"))
    if backend.has_iommufd:
        units = tuple(with_iommufd(unit) for unit in units)
    check(units, lambda: versions.libvirt, lambda: versions.qemu)
    require_iommu(host, seen, versions, units)
    for line in (*vf_token.notes(seen, units), *teaming.advice(units)):
        host.on_note(line)
    hostdevs = tuple(places(units, guest_bus))
    refuse_to_hurt(lambda: host.scan(with_users=True), hostdevs, seen)
    tell_what_waits(host, host.scan, hostdevs, seen)
    return hostdevs


def refuse_to_hurt(
    around: Callable[[], HostSnapshot],
    hostdevs: Iterable[GuestHostdev],
    host: HostSnapshot,
    *,
    is_domain: bool = False,
) -> None:
    """Apply the safety checks of `bind`: libvirt binds managed devices without any.

    `host` has the devices, `around` returns the entire host and is called only if needed. A
    command with `is_domain` has options of devices (`--device ADDRESS,managed`).
    """
    devices = [host.device(h.device.address) for h in hostdevs if h.device.address]
    managed = [h.device.address for h in hostdevs if h.device.managed]
    taken = [d.address for d in devices if d.address in managed and not d.is_on_vfio]
    if taken:
        whole = around()
        going = [whole.device(address) for address in taken]
        found = taking(whole, going)
        if is_domain:
            alone = "leave it out with the device option only"
            found = (d.in_words(lambda o: alone if o.name == "only" else o.words) for d in found)
        bind = f"bind it yourself with: {passthrough.readiness_hints.bind_slots(whole, going)}"
        then = f", and omit {'the device option managed' if is_domain else '--managed'}"
        refuse_if_any(passthrough.readiness_hints.as_commands(found, bind, then), frozenset())


def tell_what_waits(
    source: HostSource,
    around: Callable[[], HostSnapshot],
    hostdevs: Sequence[GuestHostdev],
    host: HostSnapshot,
) -> None:
    """Note how to make the devices that vfiomgr binds available to the guest."""
    bound = [h.device.address for h in hostdevs if not h.device.managed and h.device.address]
    managed = [h.device.address for h in hostdevs if h.device.managed and h.device.address]
    note_reserved(source, host, [d for d in map(host.device, managed) if d.is_on_vfio])
    note_unbound(source, around, bound, host)


def domain_xml(
    host: HostSource,
    name: str,
    *,
    explain: bool = False,
    version: str | None = None,
    qemu_version: str | None = None,
    **options: Unpack[DomainOptions],
) -> str:
    """The XML of a domain with these devices, laid out for the host.

    With `explain` it has the reason for each part as a comment. It is for libvirt `version` and
    QEMU `qemu_version`, as in `hostdev_xml`.

    Raises:
        UsageError: a word or a size is invalid, or options contradict each other.
        UnknownDevice: the host has no such device or vGPU.
        Refusal: the host, libvirt or QEMU does not support it; the message names the remedy.
    """
    versions = Versions(host, version, qemu_version)
    plan = planned_domain(host, name, versions, options)
    return LibvirtBackend(versions.libvirt, with_reasons=explain).render(plan)


def planned_domain(
    host: HostSource, name: str, versions: Versions, options: DomainOptions
) -> DomainPlan:
    """Plan a domain; print the notes.

    Raises:
        VfiomgrError: as `domain_xml`.
    """
    request = request_of(name, options)
    is_confidential = request.launch_security is not None
    needs_width = bool(request.devices or request.viommu) or request.vcpus > MOST_WITHOUT_EIM
    own_kvm = is_confidential and not versions.is_elsewhere
    seen = host.scan(
        with_guests=own_kvm, with_readiness=needs_width, with_cores=request.has_own_cpus
    )
    libvirt = versions.libvirt
    units = units_of(seen, request.devices)
    backend = _backend(host, seen, versions, units, asked=options.get("iommufd"))
    if backend.has_iommufd:
        request = replace(request, devices=tuple(map(with_iommufd, request.devices)))
    depends = is_confidential or request.vcpus > MOST_WITHOUT_EIM
    units = units_of(seen, request.devices)
    depends = depends or any(map(depends_on_qemu, units))
    plan = LibvirtBackend(libvirt, versions.qemu if depends else None).plan(seen, request)
    require_iommu(host, seen, versions, units)
    refuse_to_hurt(lambda: host.scan(with_users=True), plan.hostdevs, seen, is_domain=True)
    for line in plan.notes:
        host.on_note(line)
    tell_what_waits(host, lambda: seen, plan.hostdevs, seen)
    return plan
