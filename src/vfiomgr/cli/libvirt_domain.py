"""`vfiomgr libvirt domain`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from vfiomgr.adapters.libvirt import render
from vfiomgr.cli import libvirt_versions
from vfiomgr.cli.guest_options import (
    PAGES,
    parse_device,
    parse_direct_boot,
    parse_disk,
    parse_network,
)
from vfiomgr.cli.libvirt_hostdev import refuse_to_hurt, tell_what_waits
from vfiomgr.cli.libvirt_versions import version_option
from vfiomgr.cli.output import note, print_document
from vfiomgr.cli.parameters import WholeNumber, mebibytes
from vfiomgr.cli.session import Session, complete_address, session_options
from vfiomgr.errors import UsageError
from vfiomgr.model.guest import MIB, DomainWish
from vfiomgr.planner.guest.domain import plan_guest
from vfiomgr.planner.guest.processors import MOST_WITHOUT_EIM

if TYPE_CHECKING:
    from collections.abc import Callable

    from vfiomgr.model.guest import DomainKind, Firmware, Graphics, IommuModel, NumaMode, System

_SPARE_PORTS = 4


def _of_host(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options that say how the guest lies on the host."""
    for decorate in (
        click.option("--locked", is_flag=True, help="Lock all of its memory, without a limit."),
        click.option("--hard-limit", metavar="SIZE", help="All that QEMU may use and lock."),
        click.option(
            "--fixed-aperture",
            is_flag=True,
            help="Write the size of the window for large BARs; OVMF before 2022.11 needs it.",
        ),
        click.option("--iommufd", is_flag=True, help="Devices through /dev/iommu (libvirt 12.1)."),
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
    ):
        function = decorate(function)
    return function


def _of_guest(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options that say what the guest is, its devices apart."""
    for decorate in (
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
        click.option("--cdrom", metavar="FILE", help="An image to install from."),
        click.option(
            "--disk",
            "disks",
            multiple=True,
            metavar="FILE[,format=F][,bus=B]",
            help="An image or device; bus is virtio or sata.",
        ),
        click.option("--tpm", is_flag=True, help="An emulated TPM 2.0 (swtpm)."),
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
    ):
        function = decorate(function)
    return function


@click.command("domain")
@click.argument("name")
@_of_guest
@click.option(
    "--device",
    "devices",
    multiple=True,
    metavar="ADDRESS|UUID[,…]",
    shell_complete=complete_address,
    help="A device of the host; managed, display, ramfb, only, rom=FILE, model=DRIVER may follow.",
)
@_of_host
@click.option("--explain", is_flag=True, help="Write why each part is so, as comments.")
@version_option
@session_options()
@click.pass_obj
def domain(
    session: Session,
    *,
    name: str,
    memory: str,
    vcpus: int,
    system: System,
    tpm: bool,
    disks: tuple[str, ...],
    cdrom: str | None,
    networks: tuple[str, ...],
    boot: tuple[str, ...],
    kernel: str | None,
    initrd: str | None,
    kernel_arguments: str | None,
    firmware: Firmware,
    virt_type: DomainKind,
    graphics: Graphics,
    spare_ports: int,
    devices: tuple[str, ...],
    numa: NumaMode,
    no_pinning: bool,
    hugepages: str | None,
    viommu: IommuModel | None,
    iommufd: bool,
    fixed_aperture: bool,
    hard_limit: str | None,
    locked: bool,
    explain: bool,
    libvirt_version: str | None,
) -> None:
    """Print the XML of a whole domain that has these devices, for virsh define.

    Slots go whole, as multifunction devices behind root ports. Where the host has several NUMA
    nodes, memory and CPUs lie on those of the devices; devices of several root complexes sit behind
    expanders. BARs get a window that is large enough, or it is refused. --explain tells why.

    \b
    Examples:
      vfiomgr libvirt domain win --memory 16G --vcpus 8 --disk /vm/win.qcow2 --device 04:00.0
      vfiomgr libvirt domain w11 --os windows --tpm --memory 16G --vcpus 8 --disk /vm/w11.qcow2
      vfiomgr libvirt domain os --memory 8G --vcpus 4 --cdrom /os.iso --network default --boot cdrom
      vfiomgr libvirt domain desk --memory 8G --vcpus 4 --device 04:00.0,rom=/gpu.rom --explain
      vfiomgr libvirt domain ml --memory 256G --vcpus 64 --hugepages 1G --device 0000:17:00.0
      vfiomgr libvirt domain nest --memory 8G --vcpus 4 --device 04:00.0 --viommu intel
      vfiomgr libvirt domain tight --memory 8G --vcpus 4 --device 04:00.0 --hard-limit 12G
      vfiomgr libvirt domain k --memory 1G --vcpus 1 --kernel /boot/vmlinuz --initrd /boot/initrd
    """
    wish = DomainWish(
        name=name,
        memory_bytes=_bytes("--memory", memory),
        vcpus=vcpus,
        devices=tuple(parse_device(text, has_iommufd=iommufd) for text in devices),
        disks=tuple(map(parse_disk, disks)),
        cdrom=None if cdrom is None else os.path.abspath(cdrom),
        networks=tuple(map(parse_network, networks)),
        boot=boot,
        direct_boot=parse_direct_boot(kernel, initrd, kernel_arguments),
        firmware=firmware,
        kind=virt_type,
        numa=numa,
        has_pinning=not no_pinning,
        hugepage_bytes=None if hugepages is None else PAGES[hugepages],
        viommu=viommu,
        graphics=graphics,
        spare_ports=spare_ports,
        hard_limit_bytes=None if hard_limit is None else _bytes("--hard-limit", hard_limit),
        is_locked=locked,
        has_fixed_aperture=fixed_aperture,
        system=system,
        has_tpm=tpm,
    )
    host = session.host()
    libvirt = libvirt_versions.libvirt_version(session, libvirt_version)()
    depends = iommufd or vcpus > MOST_WITHOUT_EIM
    qemu = libvirt_versions.qemu_version(session)() if depends else None
    plan = plan_guest(host, wish, libvirt, qemu)
    refuse_to_hurt(session, host, plan.hostdevs)
    text = render.domain(plan, with_reasons=explain)
    if session.format == "table":
        click.echo(text, nl=False)
    else:
        body = {"name": name, "libvirt_version": str(libvirt), "xml": text, "plan": plan}
        print_document("DomainPlan", body, session.format)
    for line in plan.notes:
        note(line)
    tell_what_waits(session, host, plan.hostdevs)


def _bytes(option: str, text: str) -> int:
    """A size of a guest's, with its unit: 16 may be meant as GiB, and would be MiB.

    Raises:
        UsageError: it has no unit, or is no size.

    """
    if text.strip().isdecimal():
        message = f"{option} {text} has no unit"
        raise UsageError(message, f"write {text}G or {int(text) * 1024}M")
    return mebibytes(option, text) * MIB
