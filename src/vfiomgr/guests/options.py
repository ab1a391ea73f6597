"""The options of a guest's devices: what they exclude, and QEMU's properties for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from vfiomgr.diagnostic import refuse
from vfiomgr.errors import UsageError
from vfiomgr.expressions import expression
from vfiomgr.guests.iommufd import OTHER_KERNEL, QEMU_IOMMUFD, lacks_iommufd
from vfiomgr.guests.model import NO_ROM, AttachOptions, GuestDevice, QemuProperty
from vfiomgr.units import Version

_SUBSYSTEM = expression(r"[0-9a-fA-F]{4}:[0-9a-fA-F]{4}")
_NODESET = expression(r"\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*")
_ATS = ("on", "off")
_QEMU_ATS = Version(11, 1)
"""The QEMU whose vfio-pci has the property `ats`."""
_VGA = "0300"
"""The class of VGA controllers."""


def qemu_properties(options: AttachOptions) -> Iterator[QemuProperty]:
    """Properties of hw/vfio/pci.c for the first function, for which libvirt has no element."""
    if options.has_vga:
        yield QemuProperty("x-vga", "bool", "true")
    if options.subsystem is not None:
        vendor, _, device = options.subsystem.partition(":")
        yield QemuProperty("x-pci-sub-vendor-id", "unsigned", str(int(vendor, 16)))
        yield QemuProperty("x-pci-sub-device-id", "unsigned", str(int(device, 16)))
    if options.vf_token is not None:
        yield QemuProperty("vf-token", "string", options.vf_token.lower())
    if options.ats is not None:
        yield QemuProperty("ats", "string", options.ats)


def check_together(units: Sequence[GuestDevice]) -> None:
    """Make sure that one device at most has ramfb, each place in the boot order, each ACPI index.

    Raises:
        UsageError: several have it.
    """
    _check_once(units, "boot order", lambda options: options.boot_order)
    _check_once(units, "ACPI index", lambda options: options.acpi_index)
    with_ramfb = [unit for unit in units if unit.options.ramfb]
    if len(with_ramfb) > 1:
        message = f"cannot use ramfb for {len(with_ramfb)} devices: a guest can have one"
        raise UsageError(message, f"set it only for {with_ramfb[0].name}")


def _check_once(
    units: Sequence[GuestDevice], what: str, number_of: Callable[[AttachOptions], int | None]
) -> None:
    by_number: dict[int, str] = {}
    for unit in units:
        number = number_of(unit.options)
        if number is None:
            continue
        if number in by_number:
            message = f"{what} {number} is set for {by_number[number]} and for {unit.name}"
            raise UsageError(message, "use each number once")
        by_number[number] = unit.name


def check_options(unit: GuestDevice) -> None:
    """Make sure that the options of a device do not contradict each other.

    Raises:
        UsageError: they do, or one has an invalid value.
    """
    options = unit.options
    if unit.functions and options.ramfb and options.boot_order is not None:
        message = f"cannot boot from {unit.name}: it has ramfb"
        raise UsageError(message, "omit ramfb or the boot order")
    if options.rom is not None and options.rom != NO_ROM and not options.rom.startswith("/"):
        message = (
            f"cannot use the option ROM {options.rom} for {unit.name}: the path is not absolute"
        )
        raise UsageError(message, f"write an absolute path, or {NO_ROM} to disable the ROM")
    _check_form(options)
    if unit.functions:
        _check_vga(unit)
    else:
        _check_mediated(unit)


_FOR_MEDIATED = frozenset({"display", "ramfb", "has_iommufd"})
"""The options that are not only for PCI functions."""
_WHAT = {
    "is_managed": "managed",
    "rom": "an option ROM",
    "driver_model": "a driver model",
    "boot_order": "a boot order",
    "is_unassigned": "a place outside the guest",
    "acpi_nodes": "its own NUMA cells",
    "acpi_index": "an ACPI index",
    "has_vga": "legacy VGA",
    "subsystem": "another subsystem ID",
    "vf_token": "a VF token",
    "partner": "teaming",
    "ats": "ATS",
}
"""What messages call an option."""


def _check_mediated(unit: GuestDevice) -> None:
    usual = AttachOptions()
    for name in AttachOptions.__struct_fields__:
        if name not in _FOR_MEDIATED and getattr(unit.options, name) != getattr(usual, name):
            what = _WHAT.get(name, name)
            message = f"cannot set {what} for {unit.name}: only PCI functions support this"
            raise UsageError(message, "omit it for mediated devices")


def _check_form(options: AttachOptions) -> None:
    if options.subsystem is not None and not _SUBSYSTEM.fullmatch(options.subsystem):
        message = f"invalid PCI subsystem ID: {options.subsystem}"
        raise UsageError(message, "write vendor and device in hexadecimal, e.g. 17aa:3aff")
    if options.acpi_nodes is not None and not _NODESET.fullmatch(options.acpi_nodes):
        message = f"invalid set of guest NUMA cells: {options.acpi_nodes}"
        raise UsageError(message, "write numbers and ranges, e.g. 1-8 or 1,3")
    if options.ats not in (None, *_ATS):
        message = f"invalid value of ats: {options.ats!r}"
        raise UsageError(message, f"write one of {', '.join(_ATS)}")


def _check_vga(unit: GuestDevice) -> None:
    if unit.options.has_vga and not unit.functions[0].class_code.startswith(_VGA):
        message = f"{unit.functions[0]} is not a VGA controller"
        raise UsageError(message, "omit vga")


def depends_on_qemu(unit: GuestDevice) -> bool:
    """Whether `check_qemu` compares the version of QEMU for a device."""
    options = unit.options
    return options.has_iommufd or options.ats is not None


def check_qemu(unit: GuestDevice, qemu: Version | None) -> None:
    """Make sure that QEMU has what the options of a device need; an unknown one passes.

    Raises:
        Refusal: it lacks it; the message names the release that has it.
    """
    if unit.options.has_iommufd:
        _check_iommufd(unit, qemu)
    if unit.options.ats is not None and qemu is not None and qemu < _QEMU_ATS:
        message = f"ats of {unit.name} needs QEMU {_QEMU_ATS} or later; this is {qemu}"
        remedy = f"install QEMU {_QEMU_ATS} or later, or omit ats"
        refuse("qemu-too-old", unit.name, message, remedy)


def _check_iommufd(unit: GuestDevice, qemu: Version | None) -> None:
    if lacks_iommufd(qemu):
        needed = QEMU_IOMMUFD
        message = f"/dev/iommu for {unit.name} needs QEMU {needed} or later; this is {qemu}"
        otherwise = "omit --iommufd" if unit.has_groups else OTHER_KERNEL
        remedy = f"install QEMU {needed} or later, or {otherwise}"
        refuse("iommufd-missing", unit.name, message, remedy)
