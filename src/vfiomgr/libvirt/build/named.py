"""A guest as users describe it: `--device NAME,display`, `--disk FILE,format=raw`, `16G`.

Every function raises UsageError for an option that it cannot read.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable
from functools import partial
from typing import Annotated, Required

from msgspec.structs import replace

from vfiomgr.cli.keywords import Keywords, Option, fields_of, negated
from vfiomgr.errors import UsageError, forbid_alone
from vfiomgr.expressions import expression
from vfiomgr.guests import named
from vfiomgr.guests.iommufd import with_iommufd
from vfiomgr.guests.model import HOST_FILE, Acceleration, DeviceRequest, Firmware, IommuModel
from vfiomgr.guests.named import (
    AddressBits,
    FixedAperture,
    HugePages,
    Numa,
    SparePorts,
)
from vfiomgr.libvirt.build.desktop_named import ScreenOptions, with_desktop
from vfiomgr.libvirt.build.model import (
    DirectBoot,
    DiskBus,
    DomainRequest,
    GuestDisk,
    GuestNetwork,
    LaunchSecurity,
    NetworkModel,
    System,
)
from vfiomgr.libvirt.model import OWN_ALIAS
from vfiomgr.units import memory_bytes

_DEVICE_WORDS = (
    "managed",
    "unassigned",
    "display",
    "ramfb",
    "vga",
    "only",
    "rom",
    "driver_model",
    "subsystem",
    "vf_token",
    "teaming",
    "ats",
)
_SUFFIXES = {".qcow2": "qcow2", ".raw": "raw", ".img": "raw", ".vmdk": "vmdk", ".vdi": "vdi"}
FORMATS = ("qcow2", "raw", "qcow", "qed", "vdi", "vmdk", "vpc")
"""Formats that QEMU writes and libvirt has a name for (virStorageFileFormat)."""
_NETWORK = expression(r"[^/\s\x00-\x1f][^/\x00-\x1f]*")
_BRIDGE = expression(r"[A-Za-z0-9_.\-\\:/]+")
"""deviceName of libvirt's schema (basictypes.rng)."""
_BUSES: dict[str, DiskBus] = {"virtio": "virtio", "sata": "sata"}
_MODELS: dict[str, NetworkModel] = {"virtio": "virtio", "e1000e": "e1000e"}
_NETWORK_OPTIONS = {
    "model": expression("|".join(_MODELS)),
    "alias": OWN_ALIAS,
    "mac": expression(r"[0-9a-fA-F][02468aceACE](:[0-9a-fA-F]{2}){5}"),
}
"""A MAC address of one interface is even in its first byte."""


def parse_device(text: str) -> DeviceRequest:
    """Parse `0000:04:00.0,rom=/x.rom`: a name, then options."""
    return named.parse_device(text, "--device", _DEVICE_WORDS)


def parse_disk(text: str) -> GuestDisk:
    """Parse `/vm/root.qcow2`, `/dev/vg/root`, `/vm/disk,format=raw,bus=sata`.

    The format is never guessed from the contents of a file: a guest could write another one there.
    """
    path, *words = text.split(",")
    options = dict(word.partition("=")[::2] for word in words)
    known = "raw" if path.startswith("/dev/") else _SUFFIXES.get(os.path.splitext(path)[1])
    for key, value in options.items():
        if key not in ("format", "bus") or not value or (key == "bus" and value not in _BUSES):
            message = f"invalid option in --disk {text}: {f'{key}={value}'.rstrip('=')!r}"
            raise UsageError(
                message, "write --disk FILE, then format=qcow2, bus=virtio or bus=sata"
            )
    given = options.get("format") or known
    if given is None:
        message = f"cannot derive the disk format from the name: --disk {text}"
        raise UsageError(message, f"write --disk {shlex.quote(path)},format=raw or format=qcow2")
    if given not in FORMATS:
        message = f"libvirt does not support disk format {given}: --disk {text}"
        converted = f"qemu-img convert -O qcow2 {shlex.quote(path)} disk.qcow2"
        raise UsageError(message, f"use one of {', '.join(FORMATS)}; convert with: {converted}")
    return GuestDisk(os.path.abspath(path), given, _BUSES.get(options.get("bus", "")))


def absolute_path(text: str) -> str:
    """A file of this machine."""
    return os.path.abspath(text)


def parse_direct_boot(
    kernel: str | None, initrd: str | None, arguments: str | None
) -> DirectBoot | None:
    """The kernel that QEMU starts directly."""
    if kernel is not None:
        place = None if initrd is None else os.path.abspath(initrd)
        return DirectBoot(os.path.abspath(kernel), place, arguments)
    for option, value in (("--initrd", initrd), ("--kernel-arguments", arguments)):
        if value is not None:
            forbid_alone(option, "--kernel", "without a kernel the boot loader sets them")
    return None


def parse_network(text: str) -> GuestNetwork:
    """Parse a libvirt network, or `bridge=br0`; `,model=e1000e,alias=ua-net0,mac=…` may follow."""
    place, *words = text.split(",")
    options = dict(word.partition("=")[::2] for word in words)
    key, equals, name = place.partition("=")
    is_bridge = key == "bridge" and _BRIDGE.fullmatch(name) is not None
    is_network = _NETWORK.fullmatch(place) is not None
    is_known = all(
        name in _NETWORK_OPTIONS and _NETWORK_OPTIONS[name].fullmatch(value)
        for name, value in options.items()
    )
    if not (is_bridge or is_network) or (equals and not is_bridge) or not is_known:
        message = f"invalid network: --network {text!r}"
        hint = (
            "write the name of a libvirt network, or bridge=br0; ,model=virtio or ,model=e1000e "
            "may follow, and for teaming ,alias=ua-NAME,mac=52:54:00:12:34:56"
        )
        raise UsageError(message, hint)
    return GuestNetwork(
        "bridge" if is_bridge else "network",
        name or place,
        _MODELS.get(options.get("model", "")),
        options.get("alias"),
        options.get("mac", "").lower() or None,
    )


class MachineOptions(Keywords, total=False):
    """A guest without its screen; only its memory and its CPUs are required."""

    memory: Required[
        Annotated[
            str,
            Option(
                "Set the memory size, e.g. 16G or 16384M.",
                metavar="SIZE",
                field="memory_bytes",
                parse=partial(memory_bytes, "--memory"),
            ),
        ]
    ]
    vcpus: Required[
        Annotated[
            int,
            Option(
                "Set the number of vCPUs; more than 255 need libvirt 10.7 or --viommu intel.",
                metavar="N",
                least=1,
                most=4096,
            ),
        ]
    ]
    system: Annotated[
        System,
        Option(
            "Adapt clock, Hyper-V, disk and network to this system.",
            flags=("--os",),
            default="linux",
        ),
    ]
    hide_kvm: Annotated[
        bool, Option("Hide KVM, for NVIDIA drivers before 465 (Code 43).", field="hides_kvm")
    ]
    tpm: Annotated[bool | None, Option("Add an emulated TPM 2.0 (swtpm).", field="has_tpm")]
    launch_security: Annotated[
        LaunchSecurity | None,
        Option("Make a confidential guest, whose memory the host cannot read."),
    ]
    secure_boot: Annotated[
        bool | None,
        Option("Start only signed systems; Windows also gets a TPM.", field="has_secure_boot"),
    ]
    firmware: Annotated[
        Firmware, Option("Choose OVMF (found by libvirt) or SeaBIOS.", default="efi")
    ]
    virt_type: Annotated[Acceleration, Option(default="kvm", field="kind")]
    spare_ports: SparePorts
    disks: Annotated[
        Iterable[str],
        Option(
            "Add an image or block device; bus virtio or sata.",
            flags=("--disk",),
            metavar="FILE[,format=F][,bus=B]",
            complete=HOST_FILE,
            parse=parse_disk,
        ),
    ]
    cdroms: Annotated[
        Iterable[str],
        Option(
            "Add an installation image; repeatable, e.g. for drivers.",
            flags=("--cdrom",),
            metavar="FILE",
            complete=HOST_FILE,
            parse=absolute_path,
        ),
    ]
    networks: Annotated[
        Iterable[str],
        Option(
            "Add a libvirt network or a bridge; options: model=virtio|e1000e, alias=ua-NAME, "
            "mac=ADDRESS.",
            flags=("--network",),
            metavar="NAME|bridge=BR[,…]",
            parse=parse_network,
        ),
    ]
    kernel: Annotated[
        str | None,
        Option(
            "Start this kernel of the host without a boot loader.",
            metavar="FILE",
            complete=HOST_FILE,
        ),
    ]
    initrd: Annotated[
        str | None,
        Option("Set the initial RAM disk of --kernel.", metavar="FILE", complete=HOST_FILE),
    ]
    kernel_arguments: Annotated[
        str | None, Option("Set the command line of --kernel.", metavar="TEXT")
    ]
    boot: Annotated[
        Iterable[str],
        Option(
            "Boot from this device first; repeatable.  [default: disk, cdrom]",
            metavar="disk|cdrom|network|NAME",
            complete="libvirt.commands.domain:complete_boot",
        ),
    ]
    devices: Annotated[
        Iterable[str],
        Option(
            "Add a host device; options: managed, unassigned, display, ramfb, vga, only, "
            "rom=FILE, model=DRIVER, subsystem=VENDOR:DEVICE, vf-token=UUID, teaming=ALIAS, "
            "ats=on|off.",
            flags=("--device",),
            metavar="ADDRESS|UUID[,…]",
            complete="vgpu.completion:complete_device",
            parse=parse_device,
        ),
    ]
    no_hotplug: Annotated[
        bool,
        Option(
            "Disable hot-plug: Windows then offers no device to eject.",
            field="has_hotplug",
            parse=negated,
        ),
    ]
    iommufd: Annotated[bool | None, Option("Use /dev/iommu (libvirt 12.1), or VFIO groups.")]
    numa: Numa
    no_pinning: Annotated[
        bool, Option("Let the CPUs run anywhere.", field="has_pinning", parse=negated)
    ]
    pin_cores: Annotated[
        bool | None,
        Option("Give each vCPU a CPU of its own, by core and L3 cache.", field="has_own_cpus"),
    ]
    hugepages: HugePages
    pasid_bits: Annotated[
        int | None,
        Option(
            "Set the width of PASIDs of the virtual IOMMU; 0 disables them (smmuv3).",
            metavar="N",
            least=0,
            most=20,
        ),
    ]
    ats: Annotated[
        bool | None,
        Option(
            "Let devices cache translations of the virtual IOMMU, or not (intel, smmuv3).",
            field="has_ats",
        ),
    ]
    viommu: Annotated[IommuModel | None, Option("Add a virtual IOMMU, for nested virtualization.")]
    fixed_aperture: FixedAperture
    address_bits: AddressBits
    hard_limit: Annotated[
        str | None,
        Option(
            "Limit the memory that QEMU may use and lock.",
            metavar="SIZE",
            field="hard_limit_bytes",
            parse=partial(memory_bytes, "--hard-limit"),
        ),
    ]
    locked: Annotated[bool, Option("Lock all guest memory, without a limit.", field="is_locked")]


class DomainOptions(MachineOptions, ScreenOptions, total=False):
    """A guest; only its memory and its CPUs are required."""


def request_of(name: str, options: DomainOptions) -> DomainRequest:
    """The guest that a user asks for.

    Raises:
        TypeError: a keyword is unknown or missing.
        UsageError: an option has an invalid value.
    """
    fields = with_desktop(fields_of(DomainOptions, options))
    has_iommufd = fields.pop("iommufd", None)
    is_smmu = fields.get("viommu") == "smmuv3"
    if is_smmu and has_iommufd is False:
        message = "cannot use --viommu smmuv3 with VFIO groups: it needs iommufd"
        raise UsageError(message, "omit --no-iommufd")
    if has_iommufd or is_smmu:
        fields["devices"] = tuple(map(with_iommufd, fields.get("devices", ())))
    texts = (fields.pop(key, None) for key in ("kernel", "initrd", "kernel_arguments"))
    request = DomainRequest(name=name, direct_boot=parse_direct_boot(*texts), **fields)
    if request.has_secure_boot and request.is_windows and "has_tpm" not in fields:
        return replace(request, has_tpm=True)
    return request
