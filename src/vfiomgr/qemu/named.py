"""Guests of QEMU with devices of a host: `vfiomgr.qemu.arguments_for` and `check`."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict, Unpack, get_args

from msgspec.structs import replace

from vfiomgr.diagnostic import refuse
from vfiomgr.errors import UsageError, require_choice, require_known, require_whole
from vfiomgr.guests.checks import check_guest
from vfiomgr.guests.device import units_of
from vfiomgr.guests.iommufd import (
    NO_BACKEND,
    OTHER_KERNEL,
    backend_for,
    has_iommu,
    is_supported_by_kernel,
    with_iommufd,
)
from vfiomgr.guests.model import PAGES, Acceleration, Firmware, GuestRequest, NumaMode
from vfiomgr.guests.named import memory_bytes, parse_device
from vfiomgr.guests.versions import QEMU_EXAMPLE, given_version, version_of_host
from vfiomgr.guests.waiting import note_unbound
from vfiomgr.paths import IOMMU_NODE
from vfiomgr.pci.guest_support import QEMU
from vfiomgr.pci.model import device_text
from vfiomgr.qemu.backend import QemuBackend

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vfiomgr.guests.model import GuestDevice
    from vfiomgr.pci.model import PciAddress
    from vfiomgr.qemu.model import QemuPlan
    from vfiomgr.rules.report import Report
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.snapshot.source import HostSource
    from vfiomgr.units import Version

KEYS = ("display", "ramfb", "vga", "only", "rom", "boot-order", "subsystem", "vf-token", "ats")
"""The options of a device that QEMU has."""
NAME = "guest"
MEMORY, VCPUS, SPARE_PORTS = "4G", 2, 4
MOST_SPARE_PORTS, MOST_VCPUS = 64, 255
ADDRESS_BITS = (32, 52)


class QemuOptions(TypedDict, total=False):
    """A guest; every option may be omitted."""

    memory: str
    """With its unit: `16G`, `16384M`.  [4G]"""
    vcpus: int
    """The number of virtual CPUs.  [2]"""
    accel: Acceleration
    """`kvm` or `qemu`.  [kvm]"""
    firmware: Firmware
    """`efi` (OVMF) or `bios` (SeaBIOS), which have different windows for BARs.  [efi]"""
    spare_ports: int
    """Free root ports, to attach devices later: 0 to 64.  [4]"""
    no_hotplug: bool
    """Disable hot-plug for the devices' ports."""
    numa: NumaMode
    """Bind memory to the NUMA nodes of the devices: `strict`, `preferred` or `off`.  [strict]"""
    hugepages: str | None
    """`2M`, `1G` or another of `PAGES`: use huge pages of the host."""
    iommufd: bool | None
    """Use /dev/iommu for the devices (QEMU 9.0); None to use it where the host has it."""
    address_bits: int | None
    """Maximum width of physical addresses: 32 to 52."""
    fixed_aperture: bool
    """Write the size of the window for large BARs; OVMF before 2022.11 needs it."""


def arguments_for(
    host: HostSource,
    *devices: str | PciAddress,
    qemu_version: str | None = None,
    **options: Unpack[QemuOptions],
) -> tuple[str, ...]:
    """The arguments of qemu-system-x86_64 or -aarch64 for a guest with these devices.

    After the name of a device options can follow, e.g. `04:00.0,rom=/gpu.rom`. The arguments are
    for QEMU `qemu_version`, e.g. `9.2`; None for the installed one.

    Raises:
        UsageError: a name is not that of a device, or an option is invalid.
        UnknownDevice: the host has no such device or vGPU.
        Refusal: the host or QEMU does not support it; the message names the remedy.

    """
    require_known(options, QemuOptions)
    plan = planned_guest(host, [device_text(one) for one in devices], qemu_version, options)
    return tuple(word for one in plan.arguments for word in (f"-{one.option}", one.value))


def planned_guest(
    host: HostSource, names: Sequence[str], qemu_version: str | None, options: QemuOptions
) -> QemuPlan:
    """Plan a guest; print the notes.

    Raises:
        VfiomgrError: as `arguments_for`.

    """
    request = _request(names, options)
    given = given_version("--qemu-version", qemu_version, QEMU_EXAMPLE)
    release = given or version_of_host(host, QEMU)
    if release is None:
        host.on_note(
            "the version of QEMU is unknown: what depends on it is not checked (set --qemu-version)"
        )
    seen = host.scan()
    units = units_of(seen, request.devices)
    if _uses_iommufd(host, seen, units, release, asked=options.get("iommufd")):
        request = replace(request, devices=tuple(map(with_iommufd, request.devices)))
    plan = QemuBackend(release).plan(seen, request)
    for line in plan.notes:
        host.on_note(line)
    addresses = [function.address for unit in plan.guest.seen for function in unit.functions]
    note_unbound(host, lambda: seen, addresses, seen)
    return plan


def check(
    host: HostSource,
    *devices: str | PciAddress,
    qemu_version: str | None = None,
    **options: Unpack[QemuOptions],
) -> Report:
    """Check what would prevent the start of a guest with these devices, as for domains.

    Raises:
        VfiomgrError: as `arguments_for`.

    """
    require_known(options, QemuOptions)
    plan = planned_guest(host, [device_text(one) for one in devices], qemu_version, options)
    about = frozenset(function.address for unit in plan.guest.seen for function in unit.functions)
    seen = host.scan(with_users=True, with_readiness=True, with_guests=True, about=about)
    return check_guest(seen, plan.request, plan.guest)


def _uses_iommufd(
    host: HostSource,
    seen: HostSnapshot,
    units: Sequence[GuestDevice],
    release: Version | None,
    *,
    asked: bool | None,
) -> bool:
    """Whether the devices use iommufd: as asked, or where kernel and QEMU have it.

    Raises:
        UsageError: VFIO groups are requested, but the kernel has none.
        Refusal: iommufd is requested, but the kernel does not have it.

    """
    without_groups = [unit.name for unit in units if not unit.has_groups]
    if asked is False and without_groups:
        name = without_groups[0]
        message = f"cannot use VFIO groups for {name}: this kernel has none (CONFIG_VFIO_GROUP)"
        raise UsageError(message, "omit --no-iommufd")
    if asked or without_groups:
        if has_iommu(host, seen) is False:
            message = f"iommufd needs {IOMMU_NODE}, which this host does not have"
            otherwise = OTHER_KERNEL if without_groups else "omit --iommufd"
            refuse("iommufd-missing", "", message, f"run modprobe iommufd, or {otherwise}")
        return True
    backend = NO_BACKEND
    if asked is None and is_supported_by_kernel(host, seen, units):
        backend = backend_for(units, release, f"{IOMMU_NODE} and")
    if backend.why:
        host.on_note(backend.why)
    return backend.has_iommufd


def _request(names: Sequence[str], options: QemuOptions) -> GuestRequest:
    require_whole("--vcpus", options.get("vcpus"), 1, MOST_VCPUS)
    require_whole("--spare-ports", options.get("spare_ports"), 0, MOST_SPARE_PORTS)
    require_whole("--address-bits", options.get("address_bits"), *ADDRESS_BITS)
    require_choice("--hugepages", options.get("hugepages"), tuple(PAGES))
    require_choice("--firmware", options.get("firmware"), get_args(Firmware))
    require_choice("--accel", options.get("accel"), get_args(Acceleration))
    require_choice("--numa", options.get("numa"), get_args(NumaMode))
    pages = options.get("hugepages")
    return GuestRequest(
        name=NAME,
        memory_bytes=memory_bytes("--memory", options.get("memory", MEMORY)),
        vcpus=options.get("vcpus", VCPUS),
        devices=tuple(parse_device(name, "", KEYS) for name in names),
        firmware=options.get("firmware", "efi"),
        kind=options.get("accel", "kvm"),
        numa=options.get("numa", "strict"),
        hugepage_bytes=None if pages is None else PAGES[pages],
        spare_ports=options.get("spare_ports", SPARE_PORTS),
        has_fixed_aperture=options.get("fixed_aperture", False),
        address_bits=options.get("address_bits"),
        has_hotplug=not options.get("no_hotplug", False),
    )
