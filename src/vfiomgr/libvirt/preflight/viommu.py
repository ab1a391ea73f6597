"""Rules about the guest's own IOMMUs (VT-d, AMD-Vi, SMMUv3), and the devices that they serve.

Without `pciBus` an SMMUv3 serves all devices of the machine. With it, it serves those behind one
root bus: pcie-root or an expander (pci_setup_iommu_per_bus in hw/arm/smmu-common.c of QEMU).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import pairwise
from operator import itemgetter

from vfiomgr.diagnostic import Diagnostic, problem
from vfiomgr.expressions import expression
from vfiomgr.libvirt.model import EXPANDER, TO_PCI, DomainHostdev, DomainIommu
from vfiomgr.libvirt.preflight.command_line import values_of
from vfiomgr.libvirt.preflight.context import ROOT_BUS, AssignedFunction, PreflightContext
from vfiomgr.libvirt.releases import DOMAIN_IOMMUFD, IOMMUFD, SMMU_ACCEL, SMMU_BUS
from vfiomgr.paths import IOMMU_GROUPS, IOMMU_UNITS
from vfiomgr.units import Version

_INTEL, _AMD, _SMMU = "intel", "amd", "smmuv3"
"""Models of IOMMUs in a domain."""
_INTEL_CPU = "GenuineIntel"
_AMD_DEVICE = "amd-iommu"
_REMAPS = "dma-remap"
_USUAL_ALIAS = "iommu0"
_ON = ("on", "yes", "true", "y")
"""Values that QEMU accepts as true (qapi_bool_parse in qapi/qapi-util.c)."""
_CONVENTIONAL = (TO_PCI, "dmi-to-pci-bridge", "pci-bridge")
"""Controllers below which all functions share one requester ID: that of the bridge."""
Q35 = expression(r"pc-q35-(\d{1,3})\.(\d{1,3})")
"""The machines of QEMU itself: distributions have their own names and limits."""


def _of_model(context: PreflightContext, model: str) -> DomainIommu | None:
    """The first IOMMU of a model; libvirt accepts several only of SMMUv3 (`several`)."""
    return next((iommu for iommu in context.domain.iommus if iommu.model == model), None)


def group_apart(context: PreflightContext) -> Iterator[Diagnostic]:
    """QEMU: "group N used in multiple address spaces" (vfio_get_group in hw/vfio).

    Each PCI Express function has its own space, even in one slot with others; everything behind a
    bridge to conventional PCI shares one (pci_device_iommu_address_space in hw/pci/pci.c). An IOMMU
    for a single bus is not checked.
    """
    iommu = context.domain.whole_iommu
    if iommu is None:
        return
    groups: dict[int, list[AssignedFunction]] = defaultdict(list)
    for taken in context.seen:
        if taken.device.iommu_group is not None:
            groups[taken.device.iommu_group].append(taken)
    for number, members in groups.items():
        spaces = _count_spaces(context, members)
        if spaces == 1:
            continue
        yield problem(
            "viommu-group-apart",
            f"the guest has an IOMMU, and IOMMU group {number} is assigned as {spaces} functions",
            (
                f"{context.at(iommu.line)}: <iommu>",
                *(context.cite(taken.hostdev) for taken in members),
                *(f"{IOMMU_GROUPS}/{number}/devices/{t.device.address}" for t in members),
            ),
            "behind an IOMMU each PCI Express function has its own address space, but a group "
            'can have only one: QEMU exits with "group used in multiple address spaces"',
            f"remove <iommu> in line {iommu.line} (only needed for passthrough inside the guest); "
            f"or put the entire group on the bus of one <controller type='pci' model='{TO_PCI}'/>; "
            "or assign only one of the functions",
        )


def _count_spaces(context: PreflightContext, members: Sequence[AssignedFunction]) -> int:
    """The number of address spaces of a group's functions; libvirt places some separately."""
    placed = {
        guest.bus
        if context.model_at(guest.bus) in _CONVENTIONAL
        else (guest.bus, guest.slot, guest.function)
        for guest in (taken.hostdev.guest for taken in members)
        if guest is not None
    }
    return len(placed) + sum(taken.hostdev.guest is None for taken in members)


def caching_mode(context: PreflightContext) -> Iterator[Diagnostic]:
    """QEMU: "We need to set caching-mode=on for intel-iommu" (hw/i386/intel_iommu.c)."""
    iommu = _of_model(context, _INTEL)
    if iommu is None or iommu.has_caching_mode or not context.seen_hostdevs:
        return
    yield problem(
        "viommu-caching-mode",
        "the guest's IOMMU has no caching mode, which host devices need",
        (f"{context.cite_iommu(iommu)} without caching_mode='on'",),
        "without it QEMU cannot see the mappings of the guest, and exits",
        f"add <driver intremap='on' caching_mode='on'/> to the <iommu> of line {iommu.line}",
    )


def amd_maps_nothing(context: PreflightContext) -> Iterator[Diagnostic]:
    """QEMU: "requires dma-remap=1", before 10.2 "requires iommu notifier" (hw/i386/amd_iommu.c)."""
    iommu = _of_model(context, _AMD)
    if iommu is None or not context.seen_hostdevs:
        return
    aliases = (_USUAL_ALIAS, iommu.alias)
    if any(_remaps(*pair, aliases) for pair in pairwise(context.domain.qemu_arguments)):
        return
    yield problem(
        "viommu-without-mapping",
        "the guest's IOMMU does not report its mappings to VFIO",
        (context.cite_iommu(iommu), *map(context.cite, context.seen_hostdevs)),
        "QEMU's amd-iommu supports it since 10.2, disabled by default, and libvirt has no "
        'element for it: QEMU exits with "requires dma-remap=1", or "requires iommu notifier"',
        "write <iommu model='intel'><driver intremap='on' caching_mode='on'/></iommu> in line "
        f"{iommu.line} (also works on AMD hosts); or, with QEMU 10.2, <qemu:commandline> with "
        "<qemu:arg value='-global'/> and <qemu:arg value='amd-iommu.dma-remap=on'/>",
    )


def _remaps(option: str, argument: str, aliases: Container[str]) -> bool:
    """Whether a QEMU option enables DMA remapping of the AMD IOMMU, and not of another device."""
    match option.removeprefix("-").removeprefix("-"):
        case "device":
            values = values_of(argument, "driver")
            return values.get("driver") == _AMD_DEVICE and _is_on(values.get(_REMAPS))
        case "global":
            values = values_of(argument, "")
            if "driver" not in values:
                return _is_on(values.get(f"{_AMD_DEVICE}.{_REMAPS}"))
            named = (values["driver"], values.get("property"))
            return named == (_AMD_DEVICE, _REMAPS) and _is_on(values.get("value"))
        case "set":
            place, _, value = argument.partition("=")
            kind, _, rest = place.partition(".")
            alias, _, name = rest.rpartition(".")
            return (kind, name) == ("device", _REMAPS) and alias in aliases and _is_on(value)
    return False


def _is_on(value: object) -> bool:
    return value is True or value in _ON


_CHECKS_WIDTH = Version(9, 1)
"""vtd_check_hiod of hw/i386/intel_iommu.c is new in QEMU 9.1. It also compares a VT-d whose guest
tables the host's IOMMU walks (first stage), which has 48 bits in every release."""
_WIDE_QEMU, _WIDE_MACHINE = Version(10, 0), Version(9, 2)
"""QEMU 9.2 still has 39 bits by default. Later releases have 48, but keep 39 for machines before
9.2 (pc_compat_9_1 of hw/i386/pc.c)."""
_NARROW, _WIDE = 39, 48


def too_wide(context: PreflightContext) -> Iterator[Diagnostic]:
    """QEMU: "aw-bits 48 > host aw-bits 39", for VFIO groups and iommufd, except vGPUs with UUIDs.

    QEMU compares the widths of an IOMMU that only remaps interrupts, too.
    """
    iommu, asked = _of_model(context, _INTEL), _asked_width(context)
    unit, width = max(_host_widths(context).items(), key=itemgetter(1), default=("", None))
    taking = [hostdev for hostdev in context.seen_hostdevs if hostdev.kind == "pci"]
    if iommu is None or width is None or asked is None or asked <= width or not taking:
        return
    shown = f"aw_bits='{asked}'"
    if iommu.address_bits is None:
        shown = f"no aw_bits, and {asked} bits is the default of machine '{context.domain.machine}'"
    yield problem(
        "viommu-too-wide",
        f"the guest's IOMMU translates {asked} address bits, but that of the host only {width}",
        (
            f"{context.cite_iommu(iommu)}, {shown}",
            f"{IOMMU_UNITS}/{unit}/intel-iommu/cap: {width} bits",
            *map(context.cite, taking),
        ),
        f'QEMU exits with "aw-bits {asked} > host aw-bits {width}"',
        f"write aw_bits='{_NARROW}' in the <driver> of the <iommu> in line {iommu.line}"
        if width >= _NARROW
        else f"remove <iommu> in line {iommu.line}",
    )


def _asked_width(context: PreflightContext) -> int | None:
    """The width of the guest's VT-d; None if it has none, or QEMU does not compare it."""
    iommu, qemu = _of_model(context, _INTEL), context.qemu
    if iommu is None:
        return None
    machine = context.domain.machine or ""
    found = Q35.fullmatch(machine)
    release = Version(int(found[1]), int(found[2])) if found else None
    if machine == "q35":
        release = qemu
    own = qemu or release
    if iommu.address_bits is not None:
        return iommu.address_bits if own is not None and own >= _CHECKS_WIDTH else None
    if release is None or own is None or own < _WIDE_QEMU or release < _WIDE_MACHINE:
        return None
    return _WIDE


def _host_widths(context: PreflightContext) -> dict[str, int]:
    """The widths of the host's VT-d units, by their names."""
    facts = context.host.readiness
    return {} if facts is None else facts.iommu_widths


def unseen_widths(context: PreflightContext) -> Iterator[str]:
    """What is not compared: an unknown width, or units of which a device may be behind any."""
    asked, widths = _asked_width(context) or 0, _host_widths(context).values()
    is_intel = context.host.kernel.cpu_vendor == _INTEL_CPU
    if is_intel and asked > _NARROW and not widths:
        yield "whether the guest's IOMMU is wider than the host's: no intel-iommu/cap"
    if widths and min(widths) < asked <= max(widths):
        yield (
            "whether the guest's IOMMU is wider than that of a device: the IOMMUs of the host "
            f"translate {min(widths)} to {max(widths)} address bits, and the guest's {asked}"
        )


def several(context: PreflightContext) -> Iterator[Diagnostic]:
    """libvirt: "IOMMU model smmuv3 must be specified for multiple IOMMU definitions".

    Or "device-pluggable IOMMU with pciBus attribute must be specified for multiple IOMMU
    definitions"; before 11.10 "only a single IOMMU device is supported".
    """
    iommus, libvirt = context.domain.iommus, context.libvirt
    if len(iommus) <= 1:
        return
    is_old = libvirt is not None and not SMMU_BUS.is_in(libvirt)
    if not is_old and all(iommu.model == _SMMU and iommu.bus is not None for iommu in iommus):
        yield from _same_bus(context)
        return
    yield problem(
        "viommu-several",
        f"the domain has {len(iommus)} IOMMUs, and libvirt accepts several only if each is an "
        "SMMUv3 for a bus of its own",
        (*map(context.cite_iommu, iommus), *((context.cite_libvirt(),) if is_old else ())),
        f"libvirt rejects the domain; before {SMMU_BUS.since} it accepts only one IOMMU",
        f"install libvirt {SMMU_BUS.since} or later, or keep one <iommu>"
        if is_old
        else "keep one <iommu>, or write model='smmuv3' and <driver pciBus='INDEX'/> for each",
    )


def _same_bus(context: PreflightContext) -> Iterator[Diagnostic]:
    """QEMU 11.1: "An iommu is already attached to this bus"."""
    by_bus: dict[int | None, list[DomainIommu]] = defaultdict(list)
    for iommu in context.domain.iommus:
        by_bus[iommu.bus].append(iommu)
    for bus, smmus in by_bus.items():
        if len(smmus) > 1:
            yield problem(
                "viommu-several",
                f"bus {bus} of the guest has {len(smmus)} SMMUv3s",
                tuple(map(context.cite_iommu, smmus)),
                'a bus has one IOMMU: QEMU exits with "An iommu is already attached to this bus"',
                "keep one of them, or write the index of another expander as pciBus",
            )


def wrong_bus(context: PreflightContext) -> Iterator[Diagnostic]:
    """QEMU: "SMMU should be attached to a default PCIe root complex" (smmu_base_realize).

    libvirt 12.8: "Could not find a suitable controller for smmuv3".
    """
    for iommu in _smmus(context):
        if iommu.bus is None or iommu.bus == ROOT_BUS:
            continue
        model = context.model_at(iommu.bus)
        if model == EXPANDER:
            continue
        yield problem(
            "viommu-wrong-bus",
            f"an SMMUv3 is for bus {iommu.bus} of the guest, which is not that of an expander",
            (
                context.cite_iommu(iommu),
                f"<controller type='pci' index='{iommu.bus}'>: {model or 'not found'}",
            ),
            "QEMU accepts an SMMUv3 only for pcie-root and for expanders",
            f"write the index of a <controller type='pci' model='{EXPANDER}'> as pciBus in line "
            f"{iommu.line}",
        )


def smmu_maps_nothing(context: PreflightContext) -> Iterator[Diagnostic]:
    """QEMU: "requires iommu MAP notifier which is not currently supported" (hw/arm/smmuv3.c).

    The listener of VFIO fails for groups and for iommufd (smmuv3_notify_flag_changed,
    vfio_listener_register in hw/vfio/listener.c). It is not asked where the host's SMMU translates.
    """
    for iommu in _distinct(context):
        taking = _served(context, iommu)
        if _is_accelerated(context, iommu) or not taking:
            continue
        accel = "without accel='on'"
        if iommu.is_accelerated:
            accel = f"accel='on', which libvirt {context.libvirt} drops"
        yield problem(
            "viommu-without-mapping",
            "the guest's IOMMU does not report its mappings to VFIO",
            (f"{context.cite_iommu(iommu)}, {accel}", *map(context.cite, taking)),
            "an emulated SMMUv3 cannot, so the SMMU of the host must translate for these devices: "
            'QEMU exits with "requires iommu MAP notifier"',
            f"put them behind a <controller type='pci' model='{EXPANDER}'> with iommufd, and write "
            f"<driver pciBus='INDEX' accel='on'/> in line {iommu.line} (libvirt "
            f"{SMMU_ACCEL.since}), as vfiomgr libvirt domain --viommu smmuv3 does; or write "
            "<iommu model='virtio'/>; or remove it",
        )


def without_iommufd(context: PreflightContext) -> Iterator[Diagnostic]:
    """QEMU: "without an iommufd backend not allowed when using arm-smmuv3,accel=on".

    smmuv3_accel_supports_as in hw/arm/smmuv3-accel.c; libvirt has no iommufd for mediated devices.
    """
    for iommu in _distinct(context):
        for hostdev in _served(context, iommu) if _is_accelerated(context, iommu) else ():
            if context.uses_iommufd(hostdev):
                continue
            fix = f"remove {hostdev.name}, or place it behind another bus"
            if hostdev.kind == "pci":
                fix = (
                    f"write <driver name='vfio' iommufd='yes'/> in line {hostdev.line} (libvirt "
                    f"{IOMMUFD.since}), or <iommufd enabled='yes'/> in the domain (libvirt "
                    f"{DOMAIN_IOMMUFD.since})"
                )
            yield problem(
                "viommu-without-iommufd",
                f"{hostdev.name} is behind an accelerated SMMUv3 and does not use iommufd",
                (f"{context.cite_iommu(iommu)}, accel='on'", context.cite(hostdev)),
                "the host's SMMU uses the guest's tables only through iommufd: QEMU exits",
                fix,
                subject=hostdev.name,
            )


def emulated(context: PreflightContext) -> Iterator[Diagnostic]:
    """QEMU: "Emulated endpoint devices are not allowed" (smmuv3_accel_supports_as)."""
    domain = context.domain
    others = {c.guest for c in domain.controllers} | {h.guest for h in domain.hostdevs}
    places = [guest for guest in domain.taken if guest not in others]
    roots = [(place, context.root_of(place)) for place in places]
    for iommu in _distinct(context):
        behind = [p for p, root in roots if root is not None and iommu.bus in (None, root)]
        if not behind or not _is_accelerated(context, iommu):
            continue
        shown = ", ".join(f"{place.bus:02x}:{place.slot:02x}" for place in behind)
        yield problem(
            "viommu-emulated-device",
            f"emulated devices are behind an accelerated SMMUv3: {shown} in the guest",
            (f"{context.cite_iommu(iommu)}, accel='on'",),
            "it serves only host devices: QEMU exits",
            "remove the <address> of these devices, or place them behind another bus",
        )


def unseen_places(context: PreflightContext) -> Iterator[str]:
    """Devices without a known place, which an SMMUv3 for one bus may serve."""
    if any(iommu.bus is not None for iommu in _smmus(context)):
        names = [hostdev.name for hostdev in context.seen_by_root.get(None, ())]
        if names:
            yield f"which SMMUv3 serves {', '.join(names)}: their places in the guest are unknown"


def _smmus(context: PreflightContext) -> list[DomainIommu]:
    return [iommu for iommu in context.domain.iommus if iommu.model == _SMMU]


def _distinct(context: PreflightContext) -> Iterable[DomainIommu]:
    """The first of equal SMMUs, since each is compared with all devices."""
    smmus = reversed(_smmus(context))
    return {(iommu.bus, iommu.is_accelerated): iommu for iommu in smmus}.values()


def _is_accelerated(context: PreflightContext, iommu: DomainIommu) -> bool:
    """Whether accel='on' is written, and this libvirt does not drop it."""
    libvirt = context.libvirt
    return iommu.is_accelerated and (libvirt is None or SMMU_ACCEL.is_in(libvirt))


def _served(context: PreflightContext, iommu: DomainIommu) -> Sequence[DomainHostdev]:
    """The devices that are known to be behind it."""
    if iommu.bus is None:
        return context.seen_hostdevs
    return context.seen_by_root.get(iommu.bus, ())
