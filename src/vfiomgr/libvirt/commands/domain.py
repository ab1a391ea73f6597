"""What options of a guest mean: `--device NAME,display`, `--disk FILE,format=raw`."""

from __future__ import annotations

import os
import re
import shlex
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import click

from vfiomgr.cli.options import WholeNumber, mebibytes
from vfiomgr.cli.output import note, print_document, print_text
from vfiomgr.cli.session import Session, complete_address, session_options
from vfiomgr.cli.usage import forbid_alone
from vfiomgr.errors import UsageError
from vfiomgr.libvirt.build.model import (
    DirectBoot,
    DiskBus,
    DomainKind,
    DomainRequest,
    Firmware,
    Graphics,
    GuestDisk,
    GuestNetwork,
    IommuModel,
    NetworkModel,
    NumaMode,
    System,
)
from vfiomgr.libvirt.build.numa import MOST_WITHOUT_EIM
from vfiomgr.libvirt.build.plan import plan_guest
from vfiomgr.libvirt.commands import connection
from vfiomgr.libvirt.commands.connection import version_option
from vfiomgr.libvirt.commands.hostdev import refuse_to_hurt, tell_what_waits
from vfiomgr.libvirt.xml import render
from vfiomgr.units import MIB
from vfiomgr.vgpu.guest_device import DeviceRequest, HostdevOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from vfiomgr.libvirt.build.model import GuestPlan
    from vfiomgr.version import Version


_DEVICE_KEYS = (
    "managed, unassigned, display, ramfb, vga, only, rom=FILE|off, model=DRIVER, "
    "subsystem=VENDOR:DEVICE"
)
_FLAGS = {
    "managed": "is_managed",
    "unassigned": "is_unassigned",
    "display": "display",
    "ramfb": "ramfb",
    "vga": "has_vga",
}
_VALUES = {"rom": "rom", "model": "driver_model", "subsystem": "subsystem"}
_SUFFIXES = {".qcow2": "qcow2", ".raw": "raw", ".img": "raw", ".vmdk": "vmdk", ".vdi": "vdi"}
FORMATS = ("qcow2", "raw", "qcow", "qed", "vdi", "vmdk", "vpc")
"""What QEMU writes to and libvirt has a word for (virStorageFileFormat)."""
_NETWORK = re.compile(r"[^/\s\x00-\x1f][^/\x00-\x1f]*")
_BRIDGE = re.compile(r"[A-Za-z0-9_.\-\\:/]+")
"""deviceName of libvirt's schema (basictypes.rng)."""
_BUSES: dict[str, DiskBus] = {"virtio": "virtio", "sata": "sata"}
_MODELS: dict[str, NetworkModel] = {"virtio": "virtio", "e1000e": "e1000e"}
PAGES = {"2M": 2 << 20, "1G": 1 << 30}
"""The sizes of huge pages that an x86 CPU has."""


def parse_device(text: str, *, has_iommufd: bool = False) -> DeviceRequest:
    """`0000:04:00.0,rom=/x.rom`: a name, and how it is given.

    Raises:
        UsageError: a word that says nothing.

    """
    name, *words = text.split(",")
    options: dict[str, object] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if key in _FLAGS and not equals:
            options[_FLAGS[key]] = True
        elif key in _VALUES and value:
            options[_VALUES[key]] = value
        elif word != "only":
            message = f"--device {text}: {word!r} says nothing about a device"
            raise UsageError(message, f"after the name write {_DEVICE_KEYS}")
    has_iommufd = has_iommufd and "unassigned" not in words
    hand_over = HostdevOptions(has_iommufd=has_iommufd, **options)  # type: ignore[arg-type]
    return DeviceRequest(name, hand_over, is_alone="only" in words)


def parse_disk(text: str) -> GuestDisk:
    """`/vm/root.qcow2`, `/dev/vg/root`, `/vm/disk,format=raw,bus=sata`.

    A format is never guessed from what is in a file: a guest could write another there.

    Raises:
        UsageError: neither the name nor the option tells the format.

    """
    path, *words = text.split(",")
    options = dict(word.partition("=")[::2] for word in words)
    known = "raw" if path.startswith("/dev/") else _SUFFIXES.get(os.path.splitext(path)[1])
    for key, value in options.items():
        if key not in ("format", "bus") or not value or (key == "bus" and value not in _BUSES):
            message = f"--disk {text}: {f'{key}={value}'.rstrip('=')!r} says nothing about a disk"
            raise UsageError(
                message, "write --disk FILE, format=qcow2, bus=virtio or sata after it"
            )
    given = options.get("format") or known
    if given is None:
        message = f"--disk {text}: the name does not tell the format"
        raise UsageError(message, f"write --disk {shlex.quote(path)},format=raw or qcow2")
    if given not in FORMATS:
        message = f"--disk {text}: libvirt has no disks of the format {given}"
        converted = f"qemu-img convert -O qcow2 {shlex.quote(path)} disk.qcow2"
        raise UsageError(message, f"it has {', '.join(FORMATS)}; {converted} makes one of them")
    return GuestDisk(os.path.abspath(path), given, _BUSES.get(options.get("bus", "")))


def parse_direct_boot(
    kernel: str | None, initrd: str | None, arguments: str | None
) -> DirectBoot | None:
    """A kernel that QEMU starts itself.

    Raises:
        UsageError: something for a kernel, and none.

    """
    if kernel is not None:
        place = None if initrd is None else os.path.abspath(initrd)
        return DirectBoot(os.path.abspath(kernel), place, arguments)
    for option, value in (("--initrd", initrd), ("--kernel-arguments", arguments)):
        if value is not None:
            forbid_alone(option, "--kernel", "boot loaders have their own")
    return None


def parse_network(text: str) -> GuestNetwork:
    """A network of libvirt's, or `bridge=br0`; `,model=e1000e` may follow.

    Raises:
        UsageError: no name.

    """
    place, comma, word = text.partition(",")
    model = _MODELS.get(word.removeprefix("model="))
    key, equals, name = place.partition("=")
    is_bridge = key == "bridge" and _BRIDGE.fullmatch(name) is not None
    is_network = _NETWORK.fullmatch(place) is not None
    if not (is_bridge or is_network) or (equals and not is_bridge) or (comma and model is None):
        message = f"--network {text!r} is no network"
        hint = "write the name of a network of libvirt's, or bridge=br0; ,model=virtio or e1000e"
        raise UsageError(message, hint)
    return GuestNetwork("bridge" if is_bridge else "network", name or place, model)


_SPARE_PORTS = 4


def _decorated(function: Callable[..., Any], options: Iterable[Any]) -> Callable[..., Any]:
    for decorate in options:
        function = decorate(function)
    return function


def of_guest(function: Callable[..., Any]) -> Callable[..., Any]:
    """All of them."""
    return _of_machine(_of_media(_of_devices(_of_host(function))))


def _of_machine(function: Callable[..., Any]) -> Callable[..., Any]:
    """What the guest is."""
    options = (
        click.option(
            "--spare-ports",
            type=WholeNumber(0, 64),
            default=_SPARE_PORTS,
            show_default=True,
            metavar="N",
            help="Root ports that stay free, to attach devices later.",
        ),
        click.option(
            "--graphics",
            type=click.Choice(["vnc", "none"]),
            default="vnc",
            show_default=True,
            help="A screen on 127.0.0.1.",
        ),
        click.option(
            "--virt-type", type=click.Choice(["kvm", "qemu"]), default="kvm", show_default=True
        ),
        click.option(
            "--firmware",
            type=click.Choice(["efi", "bios"]),
            default="efi",
            show_default=True,
            help="OVMF, which libvirt finds and keeps variables for, or SeaBIOS.",
        ),
        click.option(
            "--secure-boot",
            is_flag=True,
            help="Start signed systems only, with Microsoft's keys enrolled; Windows gets a TPM.",
        ),
        click.option("--tpm", is_flag=True, help="An emulated TPM 2.0 (swtpm)."),
        click.option(
            "--hide-kvm",
            is_flag=True,
            help="Not show KVM: NVIDIA's drivers before 465 stop with Code 43 where they see it.",
        ),
        click.option(
            "--os",
            "system",
            type=click.Choice(["linux", "windows"]),
            default="linux",
            show_default=True,
            help="Windows gets its clock, Hyper-V's interfaces, and a disk and network it knows.",
        ),
        click.option(
            "--vcpus",
            type=WholeNumber(1, 4096),
            required=True,
            metavar="N",
            help="More than 255 need --viommu intel.",
        ),
        click.option("--memory", required=True, metavar="SIZE", help="16G or 16384M."),
    )
    return _decorated(function, options)


def _of_media(function: Callable[..., Any]) -> Callable[..., Any]:
    """What it starts from, and its networks."""
    options = (
        click.option(
            "--boot",
            multiple=True,
            metavar="disk|cdrom|network|NAME",
            help="What the firmware tries, in this order.  [default: disk, cdrom]",
        ),
        click.option("--kernel-arguments", metavar="TEXT", help="For --kernel."),
        click.option("--initrd", metavar="FILE", help="For --kernel."),
        click.option("--kernel", metavar="FILE", help="Of the host's, started past boot loaders."),
        click.option(
            "--network",
            "networks",
            multiple=True,
            metavar="NAME|bridge=BR[,model=M]",
            help="A network of libvirt's or a bridge; virtio or e1000e.  [default: none]",
        ),
        click.option(
            "--cdrom",
            "cdroms",
            multiple=True,
            metavar="FILE",
            help="An image to install from; again for others, such as drivers.",
        ),
        click.option(
            "--disk",
            "disks",
            multiple=True,
            metavar="FILE[,format=F][,bus=B]",
            help="An image or device; bus is virtio or sata.",
        ),
    )
    return _decorated(function, options)


def _of_devices(function: Callable[..., Any]) -> Callable[..., Any]:
    """The devices of the host that it gets, and how."""
    options = (
        click.option("--iommufd", is_flag=True, help="Devices through /dev/iommu (libvirt 12.1)."),
        click.option(
            "--no-hotplug",
            is_flag=True,
            help="Ports of the devices without hot-plug: Windows does not offer to eject them.",
        ),
        click.option(
            "--device",
            "devices",
            multiple=True,
            metavar="ADDRESS|UUID[,…]",
            shell_complete=complete_address,
            help="A device of the host; managed, unassigned, display, ramfb, vga, only, rom=FILE, "
            "model=DRIVER, subsystem=VENDOR:DEVICE may follow.",
        ),
    )
    return _decorated(function, options)


def _of_host(function: Callable[..., Any]) -> Callable[..., Any]:
    """How it lies on the host."""
    options = (
        click.option("--locked", is_flag=True, help="Lock all of its memory, without a limit."),
        click.option("--hard-limit", metavar="SIZE", help="All that QEMU may use and lock."),
        click.option(
            "--address-bits",
            type=WholeNumber(32, 52),
            metavar="N",
            help="Physical addresses of N bits at most, for systems that fail with the host's.",
        ),
        click.option(
            "--fixed-aperture",
            is_flag=True,
            help="Write the size of the window for large BARs; OVMF before 2022.11 needs it.",
        ),
        click.option(
            "--viommu",
            type=click.Choice(["intel", "virtio", "amd"]),
            help="A virtual IOMMU: for guests that have guests.",
        ),
        click.option("--hugepages", type=click.Choice(list(PAGES)), help="Of the host's pools."),
        click.option("--no-pinning", is_flag=True, help="Its CPUs run anywhere."),
        click.option(
            "--numa",
            type=click.Choice(["strict", "preferred", "off"]),
            default="strict",
            show_default=True,
            help="Memory on the nodes of its devices: only there, or there first.",
        ),
    )
    return _decorated(function, options)


class GuestOptions(TypedDict):
    """What they give to the command."""

    memory: str
    vcpus: int
    system: System
    tpm: bool
    secure_boot: bool
    hide_kvm: bool
    disks: tuple[str, ...]
    cdroms: tuple[str, ...]
    networks: tuple[str, ...]
    boot: tuple[str, ...]
    kernel: str | None
    initrd: str | None
    kernel_arguments: str | None
    firmware: Firmware
    virt_type: DomainKind
    graphics: Graphics
    spare_ports: int
    devices: tuple[str, ...]
    no_hotplug: bool
    numa: NumaMode
    no_pinning: bool
    hugepages: str | None
    viommu: IommuModel | None
    iommufd: bool
    address_bits: int | None
    fixed_aperture: bool
    hard_limit: str | None
    locked: bool


def wish_of(name: str, said: GuestOptions) -> DomainRequest:
    """The guest that somebody wishes for.

    Raises:
        UsageError: a word that means nothing.

    """
    pages, limit = said["hugepages"], said["hard_limit"]
    return DomainRequest(
        name=name,
        memory_bytes=_bytes("--memory", said["memory"]),
        vcpus=said["vcpus"],
        devices=tuple(parse_device(d, has_iommufd=said["iommufd"]) for d in said["devices"]),
        disks=tuple(map(parse_disk, said["disks"])),
        cdroms=tuple(map(os.path.abspath, said["cdroms"])),
        networks=tuple(map(parse_network, said["networks"])),
        boot=said["boot"],
        direct_boot=parse_direct_boot(said["kernel"], said["initrd"], said["kernel_arguments"]),
        firmware=said["firmware"],
        kind=said["virt_type"],
        numa=said["numa"],
        has_pinning=not said["no_pinning"],
        hugepage_bytes=None if pages is None else PAGES[pages],
        viommu=said["viommu"],
        graphics=said["graphics"],
        spare_ports=said["spare_ports"],
        hard_limit_bytes=None if limit is None else _bytes("--hard-limit", limit),
        is_locked=said["locked"],
        has_fixed_aperture=said["fixed_aperture"],
        address_bits=said["address_bits"],
        has_hotplug=not said["no_hotplug"],
        hides_kvm=said["hide_kvm"],
        system=said["system"],
        has_tpm=said["tpm"] or (said["secure_boot"] and said["system"] == "windows"),
        has_secure_boot=said["secure_boot"],
    )


def _bytes(option: str, text: str) -> int:
    """A size of a guest's, with its unit: 16 may be meant as GiB, and would be MiB.

    Raises:
        UsageError: it has no unit, or is no size.

    """
    if text.strip().isdecimal():
        message = f"{option} {text} has no unit"
        raise UsageError(message, f"write {text}G or {int(text) * 1024}M")
    return mebibytes(option, text) * MIB


@click.command("domain")
@click.argument("name")
@of_guest
@click.option("--explain", is_flag=True, help="Write why each part is so, as comments.")
@version_option
@session_options()
@click.pass_obj
def domain(
    session: Session,
    *,
    name: str,
    explain: bool,
    libvirt_version: str | None,
    **options: Unpack[GuestOptions],
) -> None:
    """Print the XML of a whole domain that has these devices, for virsh define.

    Slots go whole, as multifunction devices behind root ports. Where the host has several NUMA
    nodes, memory and CPUs lie on those of the devices; devices of several root complexes sit behind
    expanders. BARs get a window that is large enough, or it is refused. --explain tells why.

    \b
    Examples:
      vfiomgr libvirt domain win --memory 16G --vcpus 8 --disk /vm/win.qcow2 --device 04:00.0
      vfiomgr libvirt domain w11 --os windows --secure-boot --no-hotplug --memory 16G --vcpus 8 \\
        --disk /vm/w11.qcow2 --cdrom /iso/w11.iso --cdrom /iso/virtio-win.iso --device 04:00.0
      vfiomgr libvirt domain os --memory 8G --vcpus 4 --cdrom /os.iso --network default --tpm \\
        --boot cdrom
      vfiomgr libvirt domain desk --memory 8G --vcpus 4 --device 04:00.0,rom=/gpu.rom --explain
      vfiomgr libvirt domain old --memory 8G --vcpus 4 --device 04:00.0,vga --firmware bios \\
        --graphics none --hide-kvm
      vfiomgr libvirt domain lap --memory 8G --vcpus 4 --device 01:00.0,subsystem=17aa:3aff
      vfiomgr libvirt domain pair --memory 8G --vcpus 4 --device 04:00.0,managed \\
        --device 05:00.0,managed,unassigned
      vfiomgr libvirt domain ml --memory 256G --vcpus 64 --hugepages 1G --device 0000:17:00.0
      vfiomgr libvirt domain any --memory 8G --vcpus 4 --device 04:00.0 --numa off --spare-ports 8
      vfiomgr libvirt domain pin --memory 8G --vcpus 4 --device 04:00.0 --no-pinning --locked
      vfiomgr libvirt domain nest --memory 8G --vcpus 4 --device 04:00.0,only --viommu intel
      vfiomgr libvirt domain tight --memory 8G --vcpus 4 --device 04:00.0 --hard-limit 12G
      vfiomgr libvirt domain big --memory 64G --vcpus 8 --device 04:00.0 --fixed-aperture
      vfiomgr libvirt domain narrow --memory 8G --vcpus 4 --device 04:00.0 --address-bits 42
      vfiomgr libvirt domain fd --memory 8G --vcpus 4 --device 04:00.0 --iommufd \\
        --libvirt-version 12.2
      vfiomgr libvirt domain soft --memory 1G --vcpus 1 --virt-type qemu --device 41:00.4
      vfiomgr libvirt domain k --memory 1G --vcpus 1 --kernel /boot/vmlinuz --initrd /boot/initrd \\
        --kernel-arguments console=ttyS0
    """
    wish = wish_of(name, options)
    host = session.host()
    libvirt = connection.libvirt_version(session, libvirt_version)()
    depends = options["iommufd"] or wish.vcpus > MOST_WITHOUT_EIM
    qemu = connection.qemu_version(session)() if depends else None
    plan = plan_guest(host, wish, libvirt, qemu)
    refuse_to_hurt(lambda: session.host(with_users=True), plan.hostdevs, host)
    _print(session, plan, libvirt, explain=explain)
    for line in plan.notes:
        note(line)
    tell_what_waits(lambda: host, plan.hostdevs, host)


def _print(session: Session, plan: GuestPlan, libvirt: Version, *, explain: bool) -> None:
    text = render.domain(plan, with_reasons=explain)
    if session.format == "table":
        print_text(text)
    else:
        body = {
            "name": plan.wish.name,
            "libvirt_version": str(libvirt),
            "xml": text,
            "plan": plan,
        }
        print_document("DomainPlan", body, session.format)
