"""Rules about the SMMUv3 of ARM guests, and the devices that it serves.

Without `pciBus` it serves all devices of the machine. With it, it serves those behind one root bus:
pcie-root or an expander (pci_setup_iommu_per_bus in hw/arm/smmu-common.c of QEMU).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.diagnostic import finding
from vfiomgr.libvirt.model import DOMAIN_IOMMUFD, EXPANDER, IOMMUFD, SMMU_ACCEL, SMMU_BUS
from vfiomgr.libvirt.preflight.context import ROOT_BUS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from vfiomgr.diagnostic import Diagnostic
    from vfiomgr.libvirt.model import DomainHostdev, DomainIommu
    from vfiomgr.libvirt.preflight.context import PreflightContext

_MODEL = "smmuv3"


def several(context: PreflightContext) -> Iterator[Diagnostic]:
    """libvirt: "IOMMU model smmuv3 must be specified for multiple IOMMU definitions".

    Or "device-pluggable IOMMU with pciBus attribute must be specified for multiple IOMMU
    definitions"; before 11.10 "only a single IOMMU device is supported".
    """
    iommus, libvirt = context.domain.iommus, context.libvirt
    if len(iommus) <= 1:
        return
    is_old = libvirt is not None and not SMMU_BUS.is_in(libvirt)
    if not is_old and all(iommu.model == _MODEL and iommu.bus is not None for iommu in iommus):
        yield from _same_bus(context)
        return
    yield finding(
        "viommu-several",
        "blocker",
        f"the domain has {len(iommus)} IOMMUs, and libvirt accepts several only if each is an "
        "SMMUv3 for a bus of its own",
        (
            *map(context.cite_iommu, iommus),
            *((context.cite_libvirt(),) if is_old else ()),
        ),
        f"libvirt rejects the domain; before {SMMU_BUS.since} it accepts only one IOMMU",
        f"install libvirt {SMMU_BUS.since} or later, or keep one <iommu>"
        if is_old
        else "keep one <iommu>, or write model='smmuv3' and <driver pciBus='INDEX'/> for each",
    )


def _same_bus(context: PreflightContext) -> Iterator[Diagnostic]:
    """QEMU 11.1: "An iommu is already attached to this bus"."""
    by_bus: dict[int | None, list[DomainIommu]] = {}
    for iommu in _smmus(context):
        by_bus.setdefault(iommu.bus, []).append(iommu)
    for bus, smmus in by_bus.items():
        if len(smmus) > 1:
            yield finding(
                "viommu-several",
                "blocker",
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
        yield finding(
            "viommu-wrong-bus",
            "blocker",
            f"an SMMUv3 is for bus {iommu.bus} of the guest, which is not that of an expander",
            (
                context.cite_iommu(iommu),
                f"<controller type='pci' index='{iommu.bus}'>: {model or 'not found'}",
            ),
            "QEMU accepts an SMMUv3 only for pcie-root and for expanders",
            f"write the index of a <controller type='pci' model='{EXPANDER}'> as pciBus in line "
            f"{iommu.line}",
        )


def maps_nothing(context: PreflightContext) -> Iterator[Diagnostic]:
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
        yield finding(
            "viommu-without-mapping",
            "blocker",
            "the guest's IOMMU does not report its mappings to VFIO",
            (
                f"{context.cite_iommu(iommu)}, {accel}",
                *(context.cite(hostdev) for hostdev in taking),
            ),
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
        if not _is_accelerated(context, iommu):
            continue
        for hostdev in _served(context, iommu):
            if context.uses_iommufd(hostdev):
                continue
            fix = f"remove {hostdev.name}, or place it behind another bus"
            if hostdev.kind == "pci":
                fix = (
                    f"write <driver name='vfio' iommufd='yes'/> in line {hostdev.line} (libvirt "
                    f"{IOMMUFD.since}), or <iommufd enabled='yes'/> in the domain (libvirt "
                    f"{DOMAIN_IOMMUFD.since})"
                )
            yield finding(
                "viommu-without-iommufd",
                "blocker",
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
        yield finding(
            "viommu-emulated-device",
            "blocker",
            f"emulated devices are behind an accelerated SMMUv3: {shown} in the guest",
            (f"{context.cite_iommu(iommu)}, accel='on'",),
            "it serves only host devices: QEMU exits",
            "remove the <address> of these devices, or place them behind another bus",
        )


def unseen(context: PreflightContext) -> Iterator[str]:
    """Devices without a known place, which an SMMUv3 for one bus may serve."""
    if any(iommu.bus is not None for iommu in _smmus(context)):
        names = [hostdev.name for hostdev in context.seen_by_root.get(None, ())]
        if names:
            yield f"which SMMUv3 serves {', '.join(names)}: their places in the guest are unknown"


def _smmus(context: PreflightContext) -> list[DomainIommu]:
    return [iommu for iommu in context.domain.iommus if iommu.model == _MODEL]


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
        return [hostdev for hostdev in context.hostdevs if hostdev.is_seen]
    return context.seen_by_root.get(iommu.bus, ())
