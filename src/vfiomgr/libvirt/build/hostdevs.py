"""Host devices as <hostdev>: who binds them, their addresses, and what libvirt can read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.diagnostic import Diagnostic, blocker, refuse, refuse_if_any
from vfiomgr.errors import UsageError
from vfiomgr.expressions import expression
from vfiomgr.guests.iommufd import OTHER_KERNEL
from vfiomgr.guests.model import AttachOptions, GuestAddress, GuestDevice
from vfiomgr.guests.options import (
    check_options,
    check_qemu,
    check_together,
    depends_on_qemu,
    qemu_properties,
)
from vfiomgr.libvirt.model import OWN_ALIAS, DomainHostdev, GuestHostdev
from vfiomgr.libvirt.releases import IOMMUFD, MDEV_NEEDS_GROUPS, needed_features

if TYPE_CHECKING:
    from vfiomgr.units import Version


LAST_BUS = 0xFF
_MODULE = expression(r"[A-Za-z0-9_+-]+")
"""genericName of libvirt's schema (basictypes.rng)."""
_ETHERNET = "0200"


def hostdevs_of(unit: GuestDevice, place: GuestAddress | None) -> Iterator[GuestHostdev]:
    """One hostdev per function, all in the slot of a place; for None libvirt chooses the place.

    A named driver applies to functions like the first one: no variant driver is for a GPU and its
    audio.
    """
    if unit.vgpu is not None and not unit.functions:
        yield _mediated(unit, place)
        return
    several = len(unit.functions) > 1
    for number, function in enumerate(unit.functions):
        device = DomainHostdev(
            line=0,
            kind="pci",
            address=function.address,
            guest=_in_slot(place, number, several=several),
            alias=_alias(str(function.address)),
            driver="vfio",
        )
        if function.device_id == unit.functions[0].device_id:
            device = replace(device, driver_model=unit.options.driver_model)
        properties = () if number else tuple(qemu_properties(unit.options))
        planned = device.with_options(unit.options, is_first=number == 0)
        yield GuestHostdev(planned, function.name, properties)


def _in_slot(place: GuestAddress | None, number: int, *, several: bool) -> GuestAddress | None:
    if place is None:
        return None
    return replace(place, function=number, multifunction=several and number == 0)


def _mediated(unit: GuestDevice, place: GuestAddress | None) -> GuestHostdev:
    vgpu = unit.vgpu
    assert vgpu is not None  # noqa: S101 - by the caller
    device = DomainHostdev(
        line=0,
        kind="mdev",
        uuid=vgpu.uuid,
        guest=place if unit.model == "vfio-pci" else None,
        alias=_alias(str(vgpu.uuid)),
        model=unit.model,
    )
    title = f"{vgpu.type_name or vgpu.type} on {vgpu.parent}"
    return GuestHostdev(device.with_options(unit.options), title)


def _alias(name: str) -> str:
    """The alias of a device that libvirt keeps: `ua-`, letters, digits and hyphens."""
    return f"ua-vfio-{re.sub('[:.]', '-', name)}"


def check(
    units: Iterable[GuestDevice], libvirt: Callable[[], Version], qemu: Callable[[], Version | None]
) -> None:
    """Make sure that libvirt and QEMU support the request; query their versions only if needed.

    Raises:
        Refusal: they do not support it; the message names the release that does.
        UsageError: the options of a device contradict each other.
    """
    known = tuple(units)
    check_together(known)
    for unit in known:
        refuse_if_any(without_groups(unit))
        if unit.is_vendor_function and unit.options.is_managed:
            first = unit.functions[0]
            message = f"{first} is a vGPU on driver {first.driver}, which libvirt must not unbind"
            refuse("managed-vendor-function", first, message, "omit --managed")
        check_options(unit)
        _check_options(unit)
        for feature, why in needed_features(unit):
            is_needed = feature == IOMMUFD and not unit.has_groups
            feature.require(libvirt(), why, OTHER_KERNEL if is_needed else "omit it")
        if depends_on_qemu(unit):
            check_qemu(unit, qemu())


def without_groups(unit: GuestDevice) -> Iterator[Diagnostic]:
    """The reason why libvirt cannot assign a mediated device on a kernel without VFIO groups."""
    if not unit.has_groups and not unit.functions:
        yield blocker(
            "vfio-groups-missing",
            unit.name,
            f"this kernel has no VFIO groups, which vGPU {unit.name} needs: {MDEV_NEEDS_GROUPS}",
            OTHER_KERNEL,
        )


def _check_options(unit: GuestDevice) -> None:
    if unit.functions:
        _check_model(unit)
        _check_unassigned(unit)
        _check_teaming(unit)
    elif unit.options.has_iommufd:
        message = f"cannot set iommufd for {unit.name}: {MDEV_NEEDS_GROUPS}"
        raise UsageError(message, "omit it for mediated devices")


def _check_model(unit: GuestDevice) -> None:
    model = unit.options.driver_model
    if model is None:
        return
    if not _MODULE.fullmatch(model):
        message = f"invalid driver name: {model!r}"
        raise UsageError(message, "write the name of its module, e.g. vfio-pci or mlx5_vfio_pci")
    if not unit.options.is_managed:
        message = f"cannot set driver {model} for {unit.name}: libvirt binds only managed devices"
        bind = f"vfiomgr bind {unit.name} --driver {model}"
        raise UsageError(message, f"add managed, or bind the device yourself: {bind}")


def _check_unassigned(unit: GuestDevice) -> None:
    """Refuse guest options for a device that the guest does not get."""
    options = unit.options
    own = AttachOptions(is_managed=options.is_managed, driver_model=options.driver_model)
    if options.is_unassigned and replace(options, is_unassigned=False) != own:
        message = f"{unit.name} is unassigned, but has options of a guest device"
        raise UsageError(message, "omit all options except managed and the driver model")


def _check_teaming(unit: GuestDevice) -> None:
    """Refuse devices that QEMU does not unplug for a migration (pci_qdev_realize in hw/pci/pci.c).

    They must be Ethernet devices, alone in their slot of the guest.
    """
    partner = unit.options.partner
    if partner is None:
        return
    if not OWN_ALIAS.fullmatch(partner):
        message = f"invalid alias for the teaming of {unit.name}: {partner!r}"
        raise UsageError(message, "write ua- and letters, digits or hyphens, e.g. ua-net0")
    if not unit.functions[0].class_code.startswith(_ETHERNET):
        message = f"cannot use teaming for {unit.functions[0]}: it is not an Ethernet device"
        remedy = "omit teaming: QEMU only replaces network devices"
        refuse("teaming-unsupported", unit.functions[0], message, remedy)
    if len(unit.functions) > 1:
        message = f"cannot use teaming for {unit.names}: QEMU replaces only one function"
        remedy = "assign a virtual function, or the function alone"
        refuse("teaming-unsupported", unit.name, message, remedy)


def places(units: Iterable[GuestDevice], first_bus: int) -> Iterator[GuestHostdev]:
    """Hostdevs for an existing domain: devices of several functions from the given bus on.

    A single function gets no guest address: libvirt finds a free port for it.

    Raises:
        UsageError: the guest has fewer free buses than slots to place.
    """
    bus = first_bus
    for unit in units:
        several = len(unit.functions) > 1 and not unit.options.is_unassigned
        if several and bus > LAST_BUS:
            message = f"no guest bus left for {unit.name}"
            raise UsageError(message, "pass a lower --guest-bus")
        yield from hostdevs_of(unit, GuestAddress(bus, 0, 0) if several else None)
        bus += several
