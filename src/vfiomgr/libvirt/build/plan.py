"""Plan a complete domain from a snapshot and a request; pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.diagnostic import refuse, refuse_if_any
from vfiomgr.errors import UsageError
from vfiomgr.expressions import expression
from vfiomgr.guests.arm import ARM
from vfiomgr.guests.device import units_of
from vfiomgr.guests.memory import guest_bits, within_iommu
from vfiomgr.guests.model import Architecture, GuestDevice, GuestPlan, Reason
from vfiomgr.guests.plan import architecture_of, plan_guest
from vfiomgr.guests.vf_token import diagnostics as vf_token_diagnostics
from vfiomgr.libvirt.build import arm, desktop, teaming
from vfiomgr.libvirt.build.confidential import check_launch, launch_notes, why_launch
from vfiomgr.libvirt.build.hostdevs import check, hostdevs_of
from vfiomgr.libvirt.build.limits import (
    MOST_WITHOUT_EIM,
    AddressWidth,
    check_vcpus,
    plan_address_width,
    plan_lock,
    with_interrupt_remapping,
)
from vfiomgr.libvirt.build.model import DomainCpus, DomainPlan, DomainRequest
from vfiomgr.libvirt.build.vf_token import HOW
from vfiomgr.libvirt.model import EXPANDER, ROOT_PORT, TO_PCI, DomainIommu, PciController
from vfiomgr.libvirt.releases import (
    ACPI_NODESET,
    AMD_IOMMU,
    DOMAIN_IOMMUFD,
    FIRMWARE_FEATURES,
    MAXPHYSADDR_LIMIT,
    PORT_MEMORY,
    ROOT_PORT_WITHOUT_HOTPLUG,
    VIRTIO_IOMMU,
)
from vfiomgr.snapshot.named import find_address
from vfiomgr.units import Version, is_uuid

if TYPE_CHECKING:
    from vfiomgr.libvirt.model import GuestHostdev
    from vfiomgr.snapshot.model import HostSnapshot

_NAME = expression(r"[^\s/\x00-\x1f][^/\x00-\x1f\n]*")
_EMULATED_ON_ARM = 2
"""The graphics card and the SCSI controller of CD-ROMs, which a PC has on its root bus."""
_SHORT_BITS, _LONG_BITS = 39, 48
"""The address widths of an emulated VT-d: three or four levels of page tables."""
_IOMMU_FEATURES = {"virtio": VIRTIO_IOMMU, "amd": AMD_IOMMU}
_EMULATED = 1
"""Devices besides disks and networks that libvirt puts behind root ports: the USB controller."""


def plan_domain(
    host: HostSnapshot, request: DomainRequest, libvirt: Version, qemu: Version | None = None
) -> DomainPlan:
    """Plan all parts of a domain, each with its reason.

    Raises:
        UnknownDevice: the host has no such device or vGPU.
        UsageError: the request contradicts itself.
        Refusal: the host, libvirt or QEMU does not support it; the message names the remedy.
    """
    architecture = architecture_of(host)
    _check_request(request)
    teaming.check_partners(request)
    desktop.check_request(request, libvirt)
    request = _checked(host, request, architecture, libvirt, qemu)
    units, boot_orders = _with_boot_orders(host, request, units_of(host, request.devices))
    check(units, lambda: libvirt, lambda: qemu)
    refuse_if_any(vf_token_diagnostics(host, units, HOW))
    if request.has_secure_boot:
        FIRMWARE_FEATURES.require(libvirt, "Secure Boot")
    if not request.has_hotplug:
        ROOT_PORT_WITHOUT_HOTPLUG.require(libvirt, "a device that the guest cannot eject")
    width = AddressWidth()
    if architecture != ARM:
        has_devices = any(unit.is_seen for unit in units)
        if MAXPHYSADDR_LIMIT.is_in(libvirt) and request.launch_security != "tdx":
            request = within_iommu(host, request, units)
        width = plan_address_width(host, request, libvirt, has_devices=has_devices)
    guest = plan_guest(
        host,
        request,
        units,
        emulated=_emulated(request, architecture),
        has_port_memory=PORT_MEMORY.is_in(libvirt),
    )
    _require_cells(units, guest, libvirt)
    placed = tuple(h for u in guest.devices for h in hostdevs_of(u, guest.places.get(u.name)))
    has_iommufd, hostdevs = _iommufd(placed, libvirt)
    lock = plan_lock(request, len(hostdevs), libvirt)
    iommu, why_iommu = _iommu(host, request, libvirt)
    smmus, why_smmus = arm.smmus_of(request, guest.buses, hostdevs, libvirt)
    why = (
        _why_hostdevs(host, guest.devices),
        guest.reasons,
        width.reasons,
        lock.reasons,
        why_iommu,
        why_smmus,
        why_launch(request),
        desktop.reasons(request),
        _why_iommufd(has_iommufd),
    )
    notes = (
        guest.notes,
        teaming.notes(host, request, units),
        launch_notes(host, request),
        desktop.notes(request),
    )
    return DomainPlan(
        request=request,
        controllers=controllers_of(guest),
        hostdevs=hostdevs,
        memory=replace(guest.memory, locked_bytes=lock.needed_bytes),
        hard_limit_bytes=lock.limit_bytes,
        cpus=_cpus(host, request, guest, width),
        hyperv=desktop.hyperv_interfaces(request, libvirt),
        iommu=iommu,
        architecture=architecture,
        smmus=smmus,
        has_iommufd=has_iommufd,
        boot_orders=boot_orders,
        reasons=tuple(chain(*why)),
        notes=tuple(chain(*notes)),
    )


def _require_cells(units: Sequence[GuestDevice], guest: GuestPlan, libvirt: Version) -> None:
    """Make sure that libvirt supports the cells that the plan gives to GPUs for their memory."""
    for asked, planned in zip(units, guest.devices, strict=True):
        if planned.options.acpi_nodes != asked.options.acpi_nodes:
            ACPI_NODESET.require(libvirt, f"the memory of {planned.name}")


def _emulated(request: DomainRequest, architecture: Architecture) -> int:
    """The number of emulated devices behind root ports."""
    more = _EMULATED_ON_ARM if architecture == ARM else desktop.emulated(request)
    return _EMULATED + more + len(request.disks) + len(request.networks)


def _checked(
    host: HostSnapshot,
    request: DomainRequest,
    architecture: Architecture,
    libvirt: Version,
    qemu: Version | None,
) -> DomainRequest:
    """The request, with what its machine needs; refused if the machine does not support it."""
    if architecture == ARM:
        arm.check_request(request)
        return request
    if request.viommu == "smmuv3":
        message = "cannot use --viommu smmuv3 on a PC: only ARM guests have an SMMU"
        raise UsageError(message, "pass --viommu intel")
    check_launch(host, request, libvirt, qemu)
    request = with_interrupt_remapping(request, libvirt)
    check_vcpus(request, qemu)
    return request


def _check_request(request: DomainRequest) -> None:
    if not _NAME.fullmatch(request.name):
        message = f"invalid domain name: {request.name!r}"
        raise UsageError(message, "use a name without slashes, line breaks or leading spaces")
    if request.hides_kvm and request.kind == "qemu":
        message = "cannot hide KVM: a qemu guest does not use it"
        raise UsageError(message, "omit --hide-kvm, or pass --virt-type kvm")
    if request.has_secure_boot and request.firmware == "bios":
        message = "cannot use Secure Boot with SeaBIOS: it requires EFI firmware"
        raise UsageError(message, "omit --firmware bios, or omit --secure-boot")
    _check_translation(request)
    displayed = [device.name for device in request.devices if device.options.display]
    if displayed and request.graphics == "none":
        message = f"cannot show the display of {displayed[0]}: the guest has no graphics"
        raise UsageError(message, "pass --graphics vnc, or omit display")


def _check_translation(request: DomainRequest) -> None:
    """Refuse ATS and PASIDs where libvirt 12.8 or QEMU 11.1 cannot set them.

    QEMU offers PASIDs with an emulated VT-d only if the host walks the guest's tables, for which
    libvirt has no attribute, and neither with an SMMUv3 that is emulated.
    """
    given = [d for d in request.devices if not d.options.is_unassigned]
    of_smmu = request.viommu == "smmuv3" and bool(given)
    if request.has_ats is not None and not of_smmu and request.viommu != "intel":
        option = "--ats" if request.has_ats else "--no-ats"
        message = f"cannot use {option} without --viommu intel, or smmuv3 with devices"
        raise UsageError(message, f"omit {option}: only these IOMMUs of libvirt can offer ATS")
    if request.pasid_bits is not None and not of_smmu:
        message = "cannot use --pasid-bits without --viommu smmuv3 and devices"
        raise UsageError(message, "omit it: only this IOMMU of libvirt can offer PASIDs")


def _with_boot_orders(
    host: HostSnapshot, request: DomainRequest, units: Sequence[GuestDevice]
) -> tuple[tuple[GuestDevice, ...], tuple[tuple[str, int], ...]]:
    """Units and emulated devices with their boot orders."""
    known = {unit.name: unit for unit in units}
    orders: list[tuple[str, int]] = []
    for name in request.boot or _usual_boot(request):
        number = len(orders) + 1
        for part in _boot_parts(host, request, name, known):
            orders.append((part, number))
            number += 1
    of_units = dict(orders)
    numbered = tuple(
        replace(unit, options=replace(unit.options, boot_order=of_units[unit.name]))
        if unit.name in of_units
        else unit
        for unit in units
    )
    return numbered, tuple((part, number) for part, number in orders if part not in known)


def _usual_boot(request: DomainRequest) -> tuple[str, ...]:
    """Disks, and the installation media of an empty disk."""
    present = {"disk": request.disks, "cdrom": request.cdroms}
    return tuple(kind for kind, drives in present.items() if drives)


def _boot_address(host: HostSnapshot, name: str) -> str:
    """The device that a --boot word means."""
    try:
        return str(find_address(host, name))
    except UsageError:
        message = f"invalid boot device: --boot {name}"
        hint = "use disk, cdrom, network, or the name of a --device"
        raise UsageError(message, hint) from None


def _boot_parts(
    host: HostSnapshot, request: DomainRequest, name: str, units: dict[str, GuestDevice]
) -> list[str]:
    """What a --boot word means: all disks, all CD-ROMs, all networks, or one device."""
    found: dict[str, list[str]] = {
        "disk": [f"disk {number}" for number in range(len(request.disks))],
        "cdrom": [f"cdrom {number}" for number in range(len(request.cdroms))],
        "network": [f"network {number}" for number in range(len(request.networks))],
    }
    if name in found:
        parts = found[name]
    else:
        address = name.lower() if is_uuid(name) else _boot_address(host, name)
        holders = (u for u in units.values() if u.is_seen and address in u.names.split(", "))
        parts = [unit.name for unit in holders]
    if not parts:
        message = f"the guest has no such boot device: --boot {name}"
        raise UsageError(message, "use disk, cdrom, network, or the name of a --device")
    return parts


def _iommufd(
    hostdevs: tuple[GuestHostdev, ...], libvirt: Version
) -> tuple[bool, tuple[GuestHostdev, ...]]:
    """Use the domain-wide setting if libvirt has it and all devices use iommufd."""
    wanted = [h.device.iommufd for h in hostdevs if not h.device.is_unassigned]
    if not (any(wanted) and all(wanted) and DOMAIN_IOMMUFD.is_in(libvirt)):
        return False, hostdevs
    bare = (replace(h, device=replace(h.device, iommufd=None)) for h in hostdevs)
    return True, tuple(bare)


def _why_iommufd(has_iommufd: bool) -> tuple[Reason, ...]:  # noqa: FBT001 - the fact itself
    text = "QEMU opens /dev/iommu and the device node of each function instead of its group"
    return (Reason("iommufd", text),) if has_iommufd else ()


def _iommu(
    host: HostSnapshot, request: DomainRequest, libvirt: Version
) -> tuple[DomainIommu | None, tuple[Reason, ...]]:
    """The virtual IOMMU; an emulated VT-d is as wide as the addresses that it maps.

    QEMU refuses one that is wider than the unit of the host that a device is behind
    (vtd_check_hiod in hw/i386/intel_iommu.c). That unit is unknown, so the narrowest counts.
    """
    if request.viommu is None or request.viommu == "smmuv3":
        return None, ()
    if feature := _IOMMU_FEATURES.get(request.viommu):
        feature.require(libvirt, f"virtual IOMMU {request.viommu}")
        _check_mapping(request)
        return DomainIommu(request.viommu), ()
    own = guest_bits(host, request)
    bits = _SHORT_BITS if (own or _LONG_BITS) <= _SHORT_BITS else _LONG_BITS
    text = f"the guest's physical addresses have {own or 'an unknown number of'} bits"
    has_eim = request.vcpus > MOST_WITHOUT_EIM
    if has_eim:
        text += f"; more than {MOST_WITHOUT_EIM} CPUs need its extended interrupt mode"
    if not request.translates_dma:
        text = (
            f"more than {MOST_WITHOUT_EIM} CPUs need its interrupt remapping; it translates no DMA"
        )
    widths = {} if host.readiness is None else host.readiness.iommu_widths
    own_width, most = min(widths.values(), default=_LONG_BITS), None
    if own_width < _SHORT_BITS:
        message = f"the host's IOMMU translates {own_width} address bits, and QEMU's at least "
        message += f"{_SHORT_BITS}"
        remedy = f"omit --viommu, and pass at most --vcpus {MOST_WITHOUT_EIM}"
        refuse("viommu-too-wide", request.name, message, remedy)
    if own_width < _LONG_BITS:
        bits = most = _SHORT_BITS
        text += f"; the host's IOMMU translates {own_width} bits, and QEMU refuses a wider one"
    if not request.translates_dma:
        iommu = DomainIommu("intel", address_bits=most, has_eim=True, translates_dma=False)
        return iommu, (Reason("iommu", text),)
    iommu = DomainIommu("intel", has_caching_mode=True, address_bits=bits, has_eim=has_eim)
    return iommu, (Reason("iommu", text),)


def _check_mapping(request: DomainRequest) -> None:
    """Refuse QEMU's amd-iommu: it reports mappings to VFIO only with dma-remap=on (10.2)."""
    if request.viommu == "amd" and any(not d.options.is_unassigned for d in request.devices):
        message = (
            "cannot use QEMU's amd-iommu with host devices: it does not report its mappings to "
            "VFIO (dma-remap, since 10.2, is not in libvirt's XML)"
        )
        remedy = "pass --viommu intel, which also works on AMD hosts, or --viommu virtio"
        refuse("viommu-without-mapping", request.name, message, remedy)


def _cpus(
    host: HostSnapshot, request: DomainRequest, guest: GuestPlan, width: AddressWidth
) -> DomainCpus:
    is_amd = request.kind == "kvm" and host.kernel.cpu_vendor == "AuthenticAMD"
    return DomainCpus(
        sockets=guest.cpus.sockets,
        cores=guest.cpus.cores,
        threads=guest.cpus.threads,
        needs_topoext=is_amd and guest.cpus.threads > 1,
        pins=guest.cpus.pins,
        emulator=guest.cpus.emulator,
        address_width=width.mode,
        address_bits=None if request.address_bits is None else guest.window.address_bits,
        aperture_mib=guest.window.firmware_mib,
    )


def _why_hostdevs(host: HostSnapshot, units: Sequence[GuestDevice]) -> Iterator[Reason]:
    for unit in units:
        if unit.is_vendor_function and unit.functions:
            text = f"a vGPU of {unit.functions[0].driver}, which stays bound: never managed"
        elif not unit.functions:
            text = "a mediated device, which libvirt never binds"
        elif unit.options.is_unassigned:
            text = "unassigned: bound for its IOMMU group, but not given to the guest"
        elif unit.options.is_managed:
            text = "libvirt binds it before the start and unbinds it afterwards"
        elif any(host.vgpus.makes_vgpus(function) for function in unit.functions):
            text = "hosts vGPUs: cannot be passed through directly"
        else:
            is_bound = all(function.is_on_vfio for function in unit.functions)
            verb = "bound by vfiomgr" if is_bound else "bind it with"
            text = f"{verb}: vfiomgr bind {unit.name}"
        yield Reason(f"device {unit.name}", text)


_MODELS = {
    "root": "pcie-root",
    "root-port": ROOT_PORT,
    "expander": EXPANDER,
    "bridge": TO_PCI,
}


def controllers_of(guest: GuestPlan) -> tuple[PciController, ...]:
    """One controller per bus; the root has the window for BARs.

    memReserve is in KiB (formatdomain.html): libvirt 12.8 passes 32768 to QEMU as
    mem-reserve=33554432.
    """
    hole = guest.window.hole_bytes
    return tuple(
        PciController(
            line=0,
            index=bus.number,
            model=_MODELS[bus.kind],
            guest=bus.place,
            bus_nr=bus.first_number,
            numa_node=bus.cell,
            has_hotplug=bus.has_hotplug,
            hole64_kib=hole >> 10 if hole is not None and bus.kind == "root" else None,
            reserve_kib=None if bus.reserve_bytes is None else bus.reserve_bytes >> 10,
        )
        for bus in guest.buses
    )
