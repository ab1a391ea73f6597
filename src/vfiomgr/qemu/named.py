"""Guests of QEMU with devices of a host: `vfiomgr.qemu.arguments_for` and `check`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Unpack

from msgspec.structs import replace

from vfiomgr.cli.keywords import Keywords, Option, fields_of, negated
from vfiomgr.diagnostic import refuse
from vfiomgr.errors import UsageError
from vfiomgr.guests.backend import check_guest
from vfiomgr.guests.device import units_of
from vfiomgr.guests.iommufd import (
    NO_BACKEND,
    OTHER_KERNEL,
    backend_for,
    has_iommu,
    is_supported_by_kernel,
    with_iommufd,
)
from vfiomgr.guests.model import Acceleration, Firmware, GuestDevice, GuestRequest
from vfiomgr.guests.named import (
    AddressBits,
    FixedAperture,
    HugePages,
    Numa,
    SparePorts,
    parse_device,
)
from vfiomgr.guests.versions import QEMU_EXAMPLE, given_version, version_of_host
from vfiomgr.guests.waiting import note_unbound
from vfiomgr.paths import IOMMU_NODE
from vfiomgr.pci.guest_support import QEMU
from vfiomgr.pci.model import PciAddress, device_text
from vfiomgr.qemu.backend import QemuBackend
from vfiomgr.units import memory_bytes

if TYPE_CHECKING:
    from vfiomgr.qemu.model import QemuPlan
    from vfiomgr.rules.runner import Report
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.snapshot.source import HostSource
    from vfiomgr.units import Version

DEVICE_WORDS = (
    "display",
    "ramfb",
    "vga",
    "only",
    "rom",
    "boot_order",
    "subsystem",
    "vf_token",
    "ats",
)
"""The options of a device that QEMU has."""
NAME = "guest"


class QemuOptions(Keywords, total=False):
    """A guest; every option may be omitted."""

    memory: Annotated[
        str,
        Option(
            "Set the memory size, e.g. 16G or 16384M.",
            metavar="SIZE",
            default="4G",
            field="memory_bytes",
            parse=partial(memory_bytes, "--memory"),
        ),
    ]
    vcpus: Annotated[
        int, Option("Set the number of vCPUs.", metavar="N", default=2, least=1, most=255)
    ]
    accel: Annotated[
        Acceleration,
        Option(
            "Run on the host's CPU (KVM), or on one that QEMU emulates.",
            default="kvm",
            field="kind",
        ),
    ]
    firmware: Annotated[
        Firmware, Option("Set the BAR window for OVMF or for SeaBIOS.", default="efi")
    ]
    spare_ports: SparePorts
    no_hotplug: Annotated[
        bool, Option("Disable hot-plug for the devices' ports.", field="has_hotplug", parse=negated)
    ]
    numa: Numa
    hugepages: HugePages
    iommufd: Annotated[bool | None, Option("Use /dev/iommu (QEMU 9.0), or VFIO groups.")]
    address_bits: AddressBits
    fixed_aperture: FixedAperture


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
    seen = host.scan(with_readiness=bool(request.devices))
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
    plan = planned_guest(host, [device_text(one) for one in devices], qemu_version, options)
    about = frozenset(function.address for unit in plan.guest.seen for function in unit.functions)
    seen = host.scan(
        with_users=True,
        with_readiness=True,
        with_guests=True,
        with_health=True,
        about=about,
    )
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
    fields = fields_of(QemuOptions, options)
    fields.pop("iommufd", None)
    devices = tuple(parse_device(name, "", DEVICE_WORDS) for name in names)
    return GuestRequest(name=NAME, devices=devices, **fields)
