"""The options of `vfiomgr libvirt domain`, and the wish that they are."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, TypedDict

import click

from vfiomgr.cli.guest_options import (
    PAGES,
    parse_device,
    parse_direct_boot,
    parse_disk,
    parse_network,
)
from vfiomgr.cli.parameters import WholeNumber, mebibytes
from vfiomgr.cli.session import complete_address
from vfiomgr.errors import UsageError
from vfiomgr.model.guest import (
    MIB,
    DomainKind,
    DomainWish,
    Firmware,
    Graphics,
    IommuModel,
    NumaMode,
    System,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

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


def wish_of(name: str, said: GuestOptions) -> DomainWish:
    """The guest that somebody wishes for.

    Raises:
        UsageError: a word that means nothing.

    """
    pages, limit = said["hugepages"], said["hard_limit"]
    return DomainWish(
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
