"""`vfiomgr libvirt domain` and `hostdev`: XML for the devices of this host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

import click

from vfiomgr.cli.completion import complete_address
from vfiomgr.cli.options import READING, WholeNumber, function_only_option, session_options
from vfiomgr.cli.output import print_document, print_text
from vfiomgr.cli.session import Session, pass_session
from vfiomgr.libvirt.build.hostdevs import LAST_BUS
from vfiomgr.libvirt.build.named import (
    ADDRESS_BITS,
    MOST_SPARE_PORTS,
    MOST_VCPUS,
    PAGES,
    SPARE_PORTS,
)
from vfiomgr.libvirt.generate import FIRST_BUS, planned_domain, planned_hostdevs
from vfiomgr.libvirt.xml import render

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from vfiomgr.libvirt.build.model import GuestPlan
    from vfiomgr.libvirt.build.named import DeviceOptions, DomainOptions
    from vfiomgr.version import Version


_MACHINE = (
    click.option(
        "--spare-ports",
        type=WholeNumber(0, MOST_SPARE_PORTS),
        default=SPARE_PORTS,
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
        type=WholeNumber(1, MOST_VCPUS),
        required=True,
        metavar="N",
        help="More than 255 need --viommu intel.",
    ),
    click.option("--memory", required=True, metavar="SIZE", help="16G or 16384M."),
)
"""What the guest is."""


_MEDIA = (
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
"""What it starts from, and its networks."""


_DEVICES = (
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
"""The devices of the host that it gets, and how."""


_HOST = (
    click.option("--locked", is_flag=True, help="Lock all of its memory, without a limit."),
    click.option("--hard-limit", metavar="SIZE", help="All that QEMU may use and lock."),
    click.option(
        "--address-bits",
        type=WholeNumber(*ADDRESS_BITS),
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
"""How it lies on the host."""


_HOSTDEV = (
    click.option(
        "--acpi-nodes",
        metavar="CELLS",
        help="Memoryless cells of the guest for its own memory, 1-8 (libvirt 11.8; GB200).",
    ),
    click.option(
        "--unassigned",
        is_flag=True,
        help="The guest does not get it: libvirt takes it from the host for its IOMMU group.",
    ),
    click.option("--iommufd", is_flag=True, help="Through /dev/iommu (libvirt 12.1)."),
    click.option(
        "--driver-model",
        metavar="DRIVER",
        help="The VFIO driver that libvirt binds it to (libvirt 10.0).",
    ),
    click.option(
        "--boot-order", type=WholeNumber(1), metavar="N", help="When the firmware tries it."
    ),
    click.option("--rom", metavar="FILE|off", help="Its option ROM: a file, or none."),
    click.option("--ramfb", is_flag=True, help="A framebuffer until the guest's driver comes."),
    click.option("--display", is_flag=True, help="Show the vGPU's display in <graphics>."),
    click.option(
        "--managed", is_flag=True, help="Let libvirt bind and unbind, instead of vfiomgr."
    ),
)


def _with(options: Iterable[Any], function: Callable[..., Any]) -> Callable[..., Any]:
    for decorate in options:
        function = decorate(function)
    return function


def of_guest(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options of a domain; --help shows the last ones first."""
    return _with((*_HOST, *_DEVICES, *_MEDIA, *_MACHINE), function)


def of_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options of a device that is given to a guest."""
    return _with(_HOSTDEV, function)


def version_option(function: Any) -> Any:  # noqa: ANN401 - click decorates untyped functions
    """The option that tells the version of libvirt."""
    return click.option(
        "--libvirt-version",
        metavar="VERSION",
        help="Write for this libvirt, e.g. 10.0; by default for the one that is installed.",
    )(function)


@click.command("domain")
@click.argument("name")
@of_guest
@click.option("--explain", is_flag=True, help="Write why each part is so, as comments.")
@version_option
@session_options(*READING)
@pass_session
def domain(
    session: Session,
    *,
    name: str,
    explain: bool,
    libvirt_version: str | None,
    **options: Unpack[DomainOptions],
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
    plan, version = planned_domain(session, name, libvirt_version, options)
    _print(session, plan, version, explain=explain)


def _print(session: Session, plan: GuestPlan, libvirt: Version, *, explain: bool) -> None:
    text = render.domain(plan, with_reasons=explain)
    if session.format == "table":
        print_text(text)
    else:
        body = {
            "name": plan.request.name,
            "libvirt_version": str(libvirt),
            "xml": text,
            "plan": plan,
        }
        print_document("DomainPlan", body, session.format)


@click.command("hostdev")
@click.argument(
    "devices", nargs=-1, required=True, metavar="ADDRESS|UUID...", shell_complete=complete_address
)
@click.option(
    "--guest-bus",
    type=WholeNumber(1, LAST_BUS),
    default=FIRST_BUS,
    show_default=True,
    help="Index of the guest's root port for the first device of several functions.",
)
@of_device
@function_only_option("Leave the other functions of the slot out.")
@version_option
@session_options(*READING)
@pass_session
def hostdev(
    session: Session,
    *,
    devices: tuple[str, ...],
    guest_bus: int,
    only: bool,
    libvirt_version: str | None,
    **options: Unpack[DeviceOptions],
) -> None:
    """Print <hostdev> elements for PCI devices and vGPUs, to put into a domain's <devices>.

    The functions of a slot become one multifunction guest device. What the libvirt of this machine
    (or --libvirt-version) cannot read is refused, with the release that can.

    \b
    Examples:
      vfiomgr libvirt hostdev 0000:04:00.0
      vfiomgr libvirt hostdev f715f63c-0d00-4007-9c5a-b07b0c6c05de --display --ramfb
      vfiomgr libvirt hostdev 04:00.0 --rom /var/lib/libvirt/gpu.rom --boot-order 1
      vfiomgr libvirt hostdev 04:00.0 --guest-bus 3 --function-only
      vfiomgr libvirt hostdev 05:00.0 --managed --unassigned      # of the group of another one
      vfiomgr libvirt hostdev 0009:01:00.0 --iommufd --acpi-nodes 1-8 --libvirt-version 12.1
      vfiomgr libvirt hostdev 41:00.4 --driver-model mlx5_vfio_pci --managed --libvirt-version 10.0
    """
    hostdevs = planned_hostdevs(session, devices, guest_bus, libvirt_version, only, options)
    elements = [render.hostdev(planned) for planned in hostdevs]
    if session.format == "table":
        print_text("".join(elements))
    else:
        print_document("HostdevList", {"items": elements}, session.format)
