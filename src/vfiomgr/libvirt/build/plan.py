"""Plan a complete domain from a snapshot and a request; pure."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.diagnostic import refuse, refuse_if_any
from vfiomgr.errors import UsageError
from vfiomgr.expressions import expression
from vfiomgr.guests.device import is_uuid, units_of
from vfiomgr.libvirt import model as libvirt_model
from vfiomgr.libvirt.build import arm, teaming, vf_token
from vfiomgr.libvirt.build.confidential import check_launch, launch_notes, why_launch
from vfiomgr.libvirt.build.hostdevs import check, hostdevs_of
from vfiomgr.libvirt.build.limits import MmioWindow, guest_bits, plan_lock, plan_mmio_window
from vfiomgr.libvirt.build.model import GuestCpus, GuestMemory, GuestPlan, Reason
from vfiomgr.libvirt.build.numa import (
    MOST_WITHOUT_EIM,
    check_vcpus,
    lay_nodes,
    with_interrupt_remapping,
)
from vfiomgr.libvirt.build.nvlink import nvlink_notes
from vfiomgr.libvirt.build.pci_topology import lay_buses, slots_of, space_notes, without_hotplug
from vfiomgr.libvirt.build.port_memory import free_port_bytes, with_port_memory
from vfiomgr.libvirt.model import DomainIommu
from vfiomgr.snapshot.named import find_address

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vfiomgr.guests.device import GuestDevice
    from vfiomgr.libvirt.build.limits import Lock
    from vfiomgr.libvirt.build.model import Architecture, DomainRequest
    from vfiomgr.libvirt.build.numa import Nodes
    from vfiomgr.libvirt.build.pci_topology import Buses, RootPortSlot
    from vfiomgr.libvirt.model import GuestHostdev, PciController
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.units import Version

_NAME = expression(r"[^\s/\x00-\x1f][^/\x00-\x1f\n]*")
_ARCHITECTURES: dict[str | None, Architecture] = {
    None: "x86_64",
    "x86_64": "x86_64",
    "aarch64": "aarch64",
}
_EMULATED_ON_ARM = 2
"""The graphics card and the SCSI controller of CD-ROMs, which a PC has on its root bus."""
_SHORT_BITS, _LONG_BITS = 39, 48
"""The address widths of an emulated VT-d: three or four levels of page tables."""
_IOMMU_FEATURES = {"virtio": libvirt_model.VIRTIO_IOMMU, "amd": libvirt_model.AMD_IOMMU}
_EMULATED = 1
"""Devices besides disks and networks that libvirt puts behind root ports: the USB controller."""


def plan_guest(
    host: HostSnapshot, request: DomainRequest, libvirt: Version, qemu: Version | None = None
) -> GuestPlan:
    """Plan all parts of a domain, each with its reason.

    Raises:
        UnknownDevice: the host has no such device or vGPU.
        UsageError: the request contradicts itself.
        Refusal: the host, libvirt or QEMU does not support it; the message names the remedy.

    """
    architecture = _architecture(host)
    _check_request(request)
    teaming.check_partners(request)
    request = _checked(host, request, architecture, libvirt, qemu)
    units, boot_orders = _with_boot_orders(host, request, units_of(host, request.devices))
    check(units, lambda: libvirt, lambda: qemu)
    refuse_if_any(vf_token.diagnostics(host, units))
    if request.has_secure_boot:
        libvirt_model.FIRMWARE_FEATURES.require(libvirt, "Secure Boot")
    if not request.has_hotplug:
        libvirt_model.ROOT_PORT_WITHOUT_HOTPLUG.require(
            libvirt, "a device that the guest cannot eject"
        )
    seen = [unit for unit in units if unit.is_seen]
    nodes = lay_nodes(host, request, seen)
    emulated = _emulated(request, architecture)
    window = _window(host, request, seen, libvirt, emulated, architecture)
    memory = arm.with_device_memory(request, units, nodes.cells, nodes.host_nodes, libvirt)
    units = memory.units
    slots = slots_of(
        [unit for unit in units if unit.is_seen],
        has_viommu=request.viommu not in (None, "smmuv3"),
    )
    buses = _buses(host, request, slots, nodes, libvirt, emulated)
    placed = tuple(h for unit in units for h in hostdevs_of(unit, buses.places.get(unit.name)))
    has_iommufd, hostdevs = _iommufd(placed, libvirt)
    lock = plan_lock(request, len(hostdevs), libvirt)
    iommu, why_iommu = _iommu(host, request, libvirt)
    smmus, why_smmus = arm.smmus_of(request, buses, hostdevs, libvirt)
    placing = (buses.reasons, nodes.reasons, window.reasons, memory.reasons)
    why = (_why_hostdevs(host, units), *placing, lock.reasons, why_iommu, why_smmus)
    pairs = teaming.notes(host, request, units)
    notes = (nodes.notes, window.notes, space_notes(slots), _group_notes(host, units), pairs)
    return GuestPlan(
        request=request,
        controllers=_controllers(buses, window),
        hostdevs=hostdevs,
        memory=replace(_memory(request, nodes, lock), cells=memory.cells),
        cpus=_cpus(request, nodes, window),
        iommu=iommu,
        architecture=architecture,
        smmus=smmus,
        has_iommufd=has_iommufd,
        boot_orders=boot_orders,
        reasons=tuple(chain(*why, why_launch(request), _why_iommufd(has_iommufd))),
        notes=tuple(
            chain(
                _architecture_notes(host, architecture),
                *notes,
                nvlink_notes(host, seen),
                launch_notes(host, request),
            )
        ),
    )


def _emulated(request: DomainRequest, architecture: Architecture) -> int:
    """The number of emulated devices behind root ports."""
    more = _EMULATED_ON_ARM if architecture == arm.ARM else 0
    return _EMULATED + more + len(request.disks) + len(request.networks)


def _checked(
    host: HostSnapshot,
    request: DomainRequest,
    architecture: Architecture,
    libvirt: Version,
    qemu: Version | None,
) -> DomainRequest:
    """The request, with what its machine needs; refused if the machine does not support it."""
    if architecture == arm.ARM:
        arm.check_request(request)
        return request
    if request.viommu == "smmuv3":
        message = "cannot use --viommu smmuv3 on a PC: only ARM guests have an SMMU"
        raise UsageError(message, "pass --viommu intel")
    check_launch(host, request, libvirt, qemu)
    request = with_interrupt_remapping(request, libvirt)
    check_vcpus(request, qemu)
    return request


def _window(  # noqa: PLR0913, PLR0917 - the facts of both machines
    host: HostSnapshot,
    request: DomainRequest,
    units: Sequence[GuestDevice],
    libvirt: Version,
    emulated: int,
    architecture: Architecture,
) -> MmioWindow:
    """The window for BARs; that of an ARM machine has a fixed size, and is checked."""
    if architecture != arm.ARM:
        return plan_mmio_window(host, request, units, libvirt, emulated)
    reason = arm.check_window(request, units, emulated)
    return MmioWindow(None, None, None, None, (reason,), ())


def _architecture(host: HostSnapshot) -> Architecture:
    """The architecture of the guest, which is that of the host; others are refused."""
    if host.architecture is None and any(map(arm.is_coherent, host.devices)):
        return "aarch64"
    if host.architecture not in _ARCHITECTURES:
        message = (
            f"cannot write a complete domain for {host.architecture}: only x86_64 (q35) and "
            "aarch64 (virt) are supported"
        )
        remedy = (
            "create the domain with virt-install, then add devices: vfiomgr libvirt edit FILE "
            "--add ADDRESS; vfiomgr libvirt hostdev prints only the devices"
        )
        refuse("domain-architecture", "", message, remedy)
    return _ARCHITECTURES[host.architecture]


def _architecture_notes(host: HostSnapshot, architecture: Architecture) -> Iterator[str]:
    """Name the architecture that is assumed where the host does not show its own."""
    if host.architecture is None and architecture != arm.ARM:
        yield (
            f"the CPU architecture of this host is unknown: assuming {architecture} (machine q35); "
            "if it is another, add /proc/cpuinfo to the recording, or pass --snapshot of that host"
        )


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
    return ("disk",) * bool(request.disks) + ("cdrom",) * bool(request.cdroms)


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
    if not (any(wanted) and all(wanted) and libvirt_model.DOMAIN_IOMMUFD.is_in(libvirt)):
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


def _buses(  # noqa: PLR0913, PLR0917 - what the buses depend on
    host: HostSnapshot,
    request: DomainRequest,
    slots: Sequence[RootPortSlot],
    nodes: Nodes,
    libvirt: Version,
    emulated: int,
) -> Buses:
    seen = [unit for slot in slots for unit in slot.units]
    cells = [cell.host_node for cell in nodes.cells]
    laid = lay_buses(
        slots,
        emulated,
        request.spare_ports,
        cells,
        is_local=request.numa != "off",
        is_apart=request.viommu == "smmuv3",
    )
    laid = with_port_memory(laid, request.spare_ports, free_port_bytes(host, seen), libvirt)
    return laid if request.has_hotplug else without_hotplug(laid)


def _controllers(buses: Buses, window: MmioWindow) -> tuple[PciController, ...]:
    """The root with its window, and all other controllers."""
    root, *others = buses.controllers
    return (replace(root, hole64_kib=window.hole64_kib), *others)


def _memory(request: DomainRequest, nodes: Nodes, lock: Lock) -> GuestMemory:
    return GuestMemory(
        cells=nodes.cells,
        mode="preferred" if request.numa == "preferred" else "strict",
        host_nodes=nodes.host_nodes,
        locked_bytes=lock.needed_bytes,
        hard_limit_bytes=lock.limit_bytes,
    )


def _check_mapping(request: DomainRequest) -> None:
    """Refuse QEMU's amd-iommu: it reports mappings to VFIO only with dma-remap=on (10.2)."""
    if request.viommu == "amd" and any(not d.options.is_unassigned for d in request.devices):
        message = (
            "cannot use QEMU's amd-iommu with host devices: it does not report its mappings to "
            "VFIO (dma-remap, since 10.2, is not in libvirt's XML)"
        )
        remedy = "pass --viommu intel, which also works on AMD hosts, or --viommu virtio"
        refuse("viommu-without-mapping", request.name, message, remedy)


def _cpus(request: DomainRequest, nodes: Nodes, window: MmioWindow) -> GuestCpus:
    """One socket per cell with CPUs, if all cells have equally many."""
    counts = {len(cell.cell.cpus) for cell in nodes.cells if cell.cell.cpus}
    sockets = sum(bool(cell.cell.cpus) for cell in nodes.cells) if len(counts) == 1 else 1
    return GuestCpus(
        sockets=max(1, sockets),
        cores=request.vcpus // max(1, sockets),
        pins=nodes.pins,
        emulator=nodes.emulator,
        address_width=window.address_width,
        address_bits=window.address_bits,
        aperture_mib=window.fw_cfg_mib,
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
        elif any(host.makes_vgpus(function) for function in unit.functions):
            text = "hosts vGPUs: cannot be passed through directly"
        else:
            is_bound = all(function.is_on_vfio for function in unit.functions)
            verb = "bound by vfiomgr" if is_bound else "bind it with"
            text = f"{verb}: vfiomgr bind {unit.name}"
        yield Reason(f"hostdev {unit.name}", text)


def _group_notes(host: HostSnapshot, units: Sequence[GuestDevice]) -> Iterator[str]:
    """Note the other functions of the groups, which nobody else can use while the guest runs."""
    inside = {function.address for unit in units for function in unit.functions}
    groups = {unit.iommu_group for unit in units if unit.functions} - {None}
    for number in sorted(group for group in groups if group is not None):
        idle = [
            member
            for member in host.group_members(number)
            if member.address not in inside and not member.is_bridge
        ]
        if idle:
            shown = ", ".join(map(str, idle))
            yield (
                f"IOMMU group {number} also contains {shown}: neither the host nor another guest "
                + (
                    "can use it while this guest runs"
                    if len(idle) == 1
                    else "can use them while this guest runs"
                )
            )
