"""Host devices as <hostdev>: who binds them, their addresses, NVLink, what libvirt can read."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NoReturn

from msgspec.structs import replace

from vfiomgr.diagnostic import blocker, refusal
from vfiomgr.errors import UsageError
from vfiomgr.libvirt.hostdev import NO_ROM, DomainHostdev, GuestAddress, GuestHostdev, QemuProperty
from vfiomgr.libvirt.model import (
    ACPI_NODESET,
    DRIVER_MODEL,
    IOMMUFD,
    PCI_DISPLAY,
    QEMU_IOMMUFD,
    QEMU_OVERRIDE,
    UNASSIGNED_ADDRESS,
    VENDOR_FUNCTION,
    lacks_iommufd,
)
from vfiomgr.pci.model import CLASS_DISPLAY, PciDevice
from vfiomgr.value import Value
from vfiomgr.vgpu.guest_device import HostdevOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Sequence

    from vfiomgr.libvirt.model import Feature
    from vfiomgr.pci.model import PciAddress
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.version import Version
    from vfiomgr.vgpu.guest_device import GuestDevice


LAST_BUS = 0xFF
_SUBSYSTEM = re.compile(r"[0-9a-fA-F]{4}:[0-9a-fA-F]{4}")
_NODESET = re.compile(r"\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*")
_MODULE = re.compile(r"[A-Za-z0-9_+-]+")
"""genericName of libvirt's schema (basictypes.rng)."""
_VGA = "0300"
"""The class of VGA controllers."""


def hostdevs_of(unit: GuestDevice, place: GuestAddress | None) -> Iterator[GuestHostdev]:
    """One hostdev a function, all in the slot of a place; None leaves it to libvirt.

    A driver that is named is for functions like the first: no variant has a GPU and its audio.
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
            managed=unit.hostdev_options.is_managed,
            guest=_in_slot(place, number, several=several),
            alias=_alias(str(function.address)),
            driver="vfio",
            is_unassigned=unit.hostdev_options.is_unassigned,
        )
        if function.device_id == unit.functions[0].device_id:
            device = replace(device, driver_model=unit.hostdev_options.driver_model)
        properties = () if number else tuple(_properties(unit.hostdev_options))
        planned = _with_options(device, unit.hostdev_options, number)
        yield GuestHostdev(planned, function.name, properties)


def _properties(hostdev_options: HostdevOptions) -> Iterator[QemuProperty]:
    """What hw/vfio/pci.c knows and libvirt has no word for."""
    if hostdev_options.has_vga:
        yield QemuProperty("x-vga", "bool", "true")
    if hostdev_options.subsystem is not None:
        vendor, _, device = hostdev_options.subsystem.partition(":")
        yield QemuProperty("x-pci-sub-vendor-id", "unsigned", str(int(vendor, 16)))
        yield QemuProperty("x-pci-sub-device-id", "unsigned", str(int(device, 16)))


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
    return GuestHostdev(_with_options(device, unit.hostdev_options, 0), title)


def _alias(name: str) -> str:
    """What libvirt keeps as a device's name: `ua-`, letters, digits and hyphens."""
    return f"ua-vfio-{re.sub('[:.]', '-', name)}"


def _with_options(
    device: DomainHostdev, hostdev_options: HostdevOptions, number: int
) -> DomainHostdev:
    """The options of a device; what there is once concerns its first function."""
    has_rom = hostdev_options.rom != NO_ROM
    device = replace(
        device,
        iommufd=hostdev_options.has_iommufd or None,
        has_rom=has_rom and (number == 0 or hostdev_options.rom is None),
    )
    if number:
        return device
    return replace(
        device,
        display=hostdev_options.display,
        ramfb=hostdev_options.ramfb,
        boot_order=hostdev_options.boot_order,
        acpi_nodes=hostdev_options.acpi_nodes,
        rom_file=hostdev_options.rom if has_rom else None,
    )


def check(
    units: Iterable[GuestDevice], libvirt: Callable[[], Version], qemu: Callable[[], Version | None]
) -> None:
    """Make sure that libvirt and QEMU can do what is asked of them; ask which they are only then.

    Raises:
        Refusal: they cannot; the message names the release that can.
        UsageError: the options of a device exclude each other.

    """
    known = tuple(units)
    ramfbs = [unit for unit in known if unit.hostdev_options.ramfb]
    if len(ramfbs) > 1:
        message = f"ramfb is asked for {len(ramfbs)} devices, and a domain has one at most"
        raise UsageError(message, f"ask for it with {ramfbs[0].name} alone")
    for unit in known:
        _check_options(unit)
        for feature, why in _features(unit):
            feature.require(libvirt(), why)
        if unit.hostdev_options.has_iommufd:
            _check_iommufd(unit, qemu())


def _check_options(unit: GuestDevice) -> None:
    hostdev_options = unit.hostdev_options
    if unit.is_vendor_function and hostdev_options.is_managed:
        first = unit.functions[0]
        message = f"{first} is a vGPU of its driver {first.driver}, which libvirt must not unbind"
        raise refusal([blocker("managed-vendor-function", first, message, "leave out --managed")])
    if unit.functions and hostdev_options.ramfb and hostdev_options.boot_order is not None:
        message = f"{unit.name} has ramfb, which the guest's firmware cannot boot from"
        raise UsageError(message, "leave out ramfb or the boot order")
    if (
        hostdev_options.rom is not None
        and hostdev_options.rom != NO_ROM
        and not hostdev_options.rom.startswith("/")
    ):
        message = f"the option ROM {hostdev_options.rom} of {unit.name} has no absolute path"
        raise UsageError(message, f"write it from / on, or {NO_ROM} for none")
    _check_form(hostdev_options)
    if unit.functions:
        _check_model(unit)
        _check_unassigned(unit)
        _check_vga(unit)
        return
    of_functions = {
        "an option ROM": hostdev_options.rom,
        "a driver model": hostdev_options.driver_model,
        "iommufd": hostdev_options.has_iommufd,
        "a boot order": hostdev_options.boot_order is not None,
        "a place outside of the guest": hostdev_options.is_unassigned,
        "NUMA cells of its own": hostdev_options.acpi_nodes is not None,
        "legacy VGA": hostdev_options.has_vga,
        "another subsystem": hostdev_options.subsystem is not None,
    }
    for what in (what for what, is_asked in of_functions.items() if is_asked):
        message = f"{unit.name} is a mediated device, and libvirt has {what} for PCI functions only"
        raise UsageError(message, "leave it out")


def _check_form(hostdev_options: HostdevOptions) -> None:
    if hostdev_options.subsystem is not None and not _SUBSYSTEM.fullmatch(
        hostdev_options.subsystem
    ):
        message = f"{hostdev_options.subsystem} is no subsystem of a PCI device"
        raise UsageError(message, "write vendor and device in hexadecimal: 17aa:3aff")
    if hostdev_options.acpi_nodes is not None and not _NODESET.fullmatch(
        hostdev_options.acpi_nodes
    ):
        message = f"{hostdev_options.acpi_nodes} is no set of the guest's NUMA cells"
        raise UsageError(message, "write numbers and ranges: 1-8, or 1,3")


def _check_model(unit: GuestDevice) -> None:
    model = unit.hostdev_options.driver_model
    if model is None:
        return
    if not _MODULE.fullmatch(model):
        message = f"{model!r} is no name of a driver"
        raise UsageError(message, "write that of its module: vfio-pci, mlx5_vfio_pci")
    if not unit.hostdev_options.is_managed:
        message = f"the driver {model} for {unit.name}: libvirt binds only what is managed"
        bind = f"vfiomgr bind {unit.name} --driver {model}"
        raise UsageError(message, f"ask for managed too, or leave it out and bind it: {bind}")


def _check_unassigned(unit: GuestDevice) -> None:
    """What a guest does not get, it has no options of."""
    hostdev_options = unit.hostdev_options
    own = HostdevOptions(
        is_managed=hostdev_options.is_managed, driver_model=hostdev_options.driver_model
    )
    if hostdev_options.is_unassigned and replace(hostdev_options, is_unassigned=False) != own:
        message = f"{unit.name} is not to be in the guest, and has options of a device there"
        raise UsageError(message, "leave out all but managed and the driver model")


def _check_vga(unit: GuestDevice) -> None:
    if unit.hostdev_options.has_vga and not unit.functions[0].class_code.startswith(_VGA):
        message = f"{unit.functions[0]} is no VGA controller"
        raise UsageError(message, "leave out vga: only graphics cards have those addresses")


def _features(unit: GuestDevice) -> Iterator[tuple[Feature, str]]:
    hostdev_options = unit.hostdev_options
    if hostdev_options == HostdevOptions() and not unit.is_vendor_function:
        return
    if unit.is_vendor_function:
        driver = unit.functions[0].driver or "its vendor's driver"
        yield VENDOR_FUNCTION, f"{unit.functions[0]}, a vGPU on {driver},"
    if hostdev_options.driver_model:
        yield DRIVER_MODEL, f"the driver {hostdev_options.driver_model} for {unit.name}"
    if unit.functions and (hostdev_options.display or hostdev_options.ramfb):
        yield PCI_DISPLAY, f"the display of {unit.name}"
    if hostdev_options.is_unassigned:
        yield UNASSIGNED_ADDRESS, f"{unit.name}, which the guest is not to have,"
    if hostdev_options.acpi_nodes is not None:
        yield ACPI_NODESET, f"cells of {unit.name}'s own"
    if hostdev_options.has_vga or hostdev_options.subsystem is not None:
        yield QEMU_OVERRIDE, f"a property of QEMU's for {unit.name}"
    if hostdev_options.has_iommufd:
        yield IOMMUFD, f"/dev/iommu for {unit.name}"


def _check_iommufd(unit: GuestDevice, qemu: Version | None) -> None:
    if lacks_iommufd(qemu):
        needed = QEMU_IOMMUFD
        message = f"/dev/iommu for {unit.name} needs QEMU {needed}: this is {qemu}"
        remedy = f"install QEMU {needed} or later, or leave out --iommufd"
        raise refusal([blocker("iommufd-missing", unit.name, message, remedy)])


def places(units: Iterable[GuestDevice], first_bus: int) -> Iterator[GuestHostdev]:
    """Hostdevs for a domain that is there: devices of several functions from a bus on.

    A function that goes alone gets no guest address: libvirt finds a free port for it.

    Raises:
        UsageError: more slots than guest buses are left.

    """
    bus = first_bus
    for unit in units:
        several = len(unit.functions) > 1 and not unit.hostdev_options.is_unassigned
        if several and bus > LAST_BUS:
            message = f"no guest bus is left for {unit.name}"
            raise UsageError(message, "choose a lower --guest-bus")
        yield from hostdevs_of(unit, GuestAddress(bus, 0, 0) if several else None)
        bus += several


_NVIDIA = "10de"


class NvlinkShare(Value):
    """The switches and GPUs of a host, and those of them that a guest gets."""

    switches: tuple[PciDevice, ...]
    gpus: tuple[PciDevice, ...]
    own_switches: tuple[PciDevice, ...]
    own_gpus: tuple[PciDevice, ...]

    @property
    def outside(self) -> tuple[PciDevice, ...]:
        """What of the fabric the guest does not get."""
        own = {*self.own_switches, *self.own_gpus}
        return tuple(device for device in (*self.switches, *self.gpus) if device not in own)

    @property
    def is_divided(self) -> bool:
        """Whether the guest gets switches, which drive the whole of it, and not all the rest."""
        return bool(self.own_switches and self.outside)

    @property
    def needs_partition(self) -> bool:
        """Whether Fabric Manager has to join its GPUs; one alone works without."""
        return not self.own_switches and len(self.own_gpus) > 1


def nvlink_share(host: HostSnapshot, inside: Container[PciAddress]) -> NvlinkShare | None:
    """What of the fabric is among some functions; None on a host without NVSwitches."""
    switches = tuple(device for device in host.devices if device.is_nvswitch)
    gpus = tuple(filter(_is_gpu, host.devices))
    if not switches:
        return None
    return NvlinkShare(
        switches,
        gpus,
        tuple(device for device in switches if device.address in inside),
        tuple(device for device in gpus if device.address in inside),
    )


def nvlink_notes(host: HostSnapshot, units: Sequence[GuestDevice]) -> Iterator[str]:
    """What is to be done before the start, so that CUDA finds a fabric (else error 802).

    NVIDIA's Fabric Manager knows three ways: all GPUs and all switches in one guest; GPUs in
    guests, the switches with the host, which activates partitions; vGPUs, also with partitions.

    Raises:
        Refusal: some of the switches without the others, or without all of their GPUs.

    """
    share = nvlink_share(host, {f.address for unit in units for f in unit.functions})
    if share is None:
        return
    if share.is_divided:
        _refuse_division(share)
    vgpus = [unit for unit in units if _is_nvidia_vgpu(host, unit)]
    if vgpus and not share.own_switches:
        yield (
            "this host has NVSwitches: Fabric Manager (FABRIC_MODE=2) has to activate the "
            f"partition of {', '.join(unit.name for unit in vgpus)} before the guest starts"
        )
    elif share.needs_partition:
        yield (
            f"this host has NVSwitches: Fabric Manager (FABRIC_MODE=1) has to activate a partition "
            f"of these {len(share.own_gpus)} GPUs before the guest starts, and to deactivate it "
            "after"
        )


def _refuse_division(share: NvlinkShare) -> NoReturn:
    """Say what would stay outside."""
    shown = ", ".join(str(device.address) for device in share.outside)
    message = (
        "a guest that has an NVSwitch drives the whole fabric, and these of it would stay "
        f"outside: {shown} (CUDA would fail with error 802)"
    )
    remedy = "name them too, or leave all NVSwitches to the host's Fabric Manager"
    raise refusal([blocker("fabric-divided", "", message, remedy)])


def _is_gpu(device: PciDevice) -> bool:
    return (
        device.vendor_id == _NVIDIA
        and device.class_code.startswith(CLASS_DISPLAY)
        and device.physical_function is None
    )


def _is_nvidia_vgpu(host: HostSnapshot, unit: GuestDevice) -> bool:
    if unit.vgpu is None:
        return False
    parent = host.device_named(unit.vgpu.parent)
    return parent is not None and parent.vendor_id == _NVIDIA
