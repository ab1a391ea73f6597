"""`vfiomgr libvirt domain`: a domain with devices of this host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

import click

from vfiomgr.cli.options import READING, WholeNumber, session_options
from vfiomgr.cli.output import print_document, print_text
from vfiomgr.guests.model import PAGES
from vfiomgr.libvirt.backend import LibvirtBackend
from vfiomgr.libvirt.build.named import (
    ADDRESS_BITS,
    MOST_SPARE_PORTS,
    MOST_VCPUS,
    PASID_BITS,
    SPARE_PORTS,
)
from vfiomgr.libvirt.commands.hostdev import iommufd_option, version_options, with_each
from vfiomgr.libvirt.named import planned_domain
from vfiomgr.libvirt.versions import Versions
from vfiomgr.snapshot.completion import complete_host_file
from vfiomgr.snapshot.session import Session, pass_session
from vfiomgr.vgpu.completion import complete_device

if TYPE_CHECKING:
    from collections.abc import Callable

    from vfiomgr.libvirt.build.model import DomainPlan
    from vfiomgr.libvirt.build.named import DomainOptions
    from vfiomgr.units import Version


_MACHINE = (
    click.option(
        "--spare-ports",
        type=WholeNumber(0, MOST_SPARE_PORTS),
        default=SPARE_PORTS,
        show_default=True,
        metavar="N",
        help="Set the number of free root ports, to attach devices later.",
    ),
    click.option(
        "--graphics",
        type=click.Choice(["vnc", "none"]),
        default="vnc",
        show_default=True,
        help="Provide a screen on 127.0.0.1.",
    ),
    click.option(
        "--virt-type", type=click.Choice(["kvm", "qemu"]), default="kvm", show_default=True
    ),
    click.option(
        "--firmware",
        type=click.Choice(["efi", "bios"]),
        default="efi",
        show_default=True,
        help="Choose OVMF (found by libvirt) or SeaBIOS.",
    ),
    click.option(
        "--secure-boot", is_flag=True, help="Start only signed systems; Windows also gets a TPM."
    ),
    click.option(
        "--launch-security",
        type=click.Choice(["tdx", "sev-snp"]),
        help="Make a confidential guest, whose memory the host cannot read.",
    ),
    click.option("--tpm", is_flag=True, help="Add an emulated TPM 2.0 (swtpm)."),
    click.option(
        "--hide-kvm", is_flag=True, help="Hide KVM, for NVIDIA drivers before 465 (Code 43)."
    ),
    click.option(
        "--os",
        "system",
        type=click.Choice(["linux", "windows"]),
        default="linux",
        show_default=True,
        help="Adapt clock, Hyper-V, disk and network to this system.",
    ),
    click.option(
        "--vcpus",
        type=WholeNumber(1, MOST_VCPUS),
        required=True,
        metavar="N",
        help="Set the number of vCPUs; more than 255 need libvirt 10.7 or --viommu intel.",
    ),
    click.option(
        "--memory", required=True, metavar="SIZE", help="Set the memory size, e.g. 16G or 16384M."
    ),
)
"""The guest itself."""


def _complete_boot(
    _context: click.Context, _parameter: click.Parameter, incomplete: str
) -> list[str]:
    """What a guest boots from, but for its own names of devices."""
    return [name for name in ("disk", "cdrom", "network") if name.startswith(incomplete)]


_MEDIA = (
    click.option(
        "--boot",
        multiple=True,
        metavar="disk|cdrom|network|NAME",
        shell_complete=_complete_boot,
        help="Boot from this device first; repeatable.  [default: disk, cdrom]",
    ),
    click.option("--kernel-arguments", metavar="TEXT", help="Set the command line of --kernel."),
    click.option(
        "--initrd",
        metavar="FILE",
        shell_complete=complete_host_file,
        help="Set the initial RAM disk of --kernel.",
    ),
    click.option(
        "--kernel",
        metavar="FILE",
        shell_complete=complete_host_file,
        help="Start this kernel of the host without a boot loader.",
    ),
    click.option(
        "--network",
        "networks",
        multiple=True,
        metavar="NAME|bridge=BR[,…]",
        help="Add a libvirt network or a bridge; options: model=virtio|e1000e, alias=ua-NAME, "
        "mac=ADDRESS.",
    ),
    click.option(
        "--cdrom",
        "cdroms",
        multiple=True,
        metavar="FILE",
        shell_complete=complete_host_file,
        help="Add an installation image; repeatable, e.g. for drivers.",
    ),
    click.option(
        "--disk",
        "disks",
        multiple=True,
        metavar="FILE[,format=F][,bus=B]",
        shell_complete=complete_host_file,
        help="Add an image or block device; bus virtio or sata.",
    ),
)
"""What it boots from, and its networks."""


_DEVICES = (
    iommufd_option,
    click.option(
        "--no-hotplug",
        is_flag=True,
        help="Disable hot-plug: Windows then offers no device to eject.",
    ),
    click.option(
        "--device",
        "devices",
        multiple=True,
        metavar="ADDRESS|UUID[,…]",
        shell_complete=complete_device,
        help="Add a host device; options: managed, unassigned, display, ramfb, vga, only, "
        "rom=FILE, model=DRIVER, subsystem=VENDOR:DEVICE, vf-token=UUID, teaming=ALIAS, "
        "ats=on|off.",
    ),
)
"""The host devices of the guest."""


_HOST = (
    click.option("--locked", is_flag=True, help="Lock all guest memory, without a limit."),
    click.option(
        "--hard-limit", metavar="SIZE", help="Limit the memory that QEMU may use and lock."
    ),
    click.option(
        "--address-bits",
        type=WholeNumber(*ADDRESS_BITS),
        metavar="N",
        help="Limit physical addresses to N bits.",
    ),
    click.option(
        "--fixed-aperture",
        is_flag=True,
        help="Write the BAR window size (for OVMF before 2022.11).",
    ),
    click.option(
        "--viommu",
        type=click.Choice(["intel", "virtio", "amd", "smmuv3"]),
        help="Add a virtual IOMMU, for nested virtualization.",
    ),
    click.option(
        "--ats/--no-ats",
        default=None,
        help="Let devices cache translations of the virtual IOMMU, or not (intel, smmuv3).",
    ),
    click.option(
        "--pasid-bits",
        type=WholeNumber(*PASID_BITS),
        metavar="N",
        help="Set the width of PASIDs of the virtual IOMMU; 0 disables them (smmuv3).",
    ),
    click.option("--hugepages", type=click.Choice(list(PAGES)), help="Use huge pages of the host."),
    click.option("--no-pinning", is_flag=True, help="Let the CPUs run anywhere."),
    click.option(
        "--numa",
        type=click.Choice(["strict", "preferred", "off"]),
        default="strict",
        show_default=True,
        help="Bind memory to the devices' NUMA nodes, or prefer them.",
    ),
)
"""How the guest uses the host."""


def of_guest(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options of a domain."""
    return with_each((*_HOST, *_DEVICES, *_MEDIA, *_MACHINE), function)


@click.command("domain")
@click.argument("name")
@of_guest
@click.option("--explain", is_flag=True, help="Add the reason for each part as a comment.")
@version_options
@session_options(*READING)
@pass_session
def domain(
    session: Session,
    *,
    name: str,
    explain: bool,
    libvirt_version: str | None,
    qemu_version: str | None,
    **options: Unpack[DomainOptions],
) -> None:
    """Print the XML of a complete domain with these devices.

    Define it with `vfiomgr libvirt edit FILE --define`. All functions of a slot become one
    multifunction device behind a root port. If the host has several NUMA nodes, memory and CPUs are
    placed on the nodes of the devices, and devices of several root complexes are placed behind
    expanders. The window for BARs is made large enough; if that is impossible, the command fails.
    --explain adds the reasons. If kernel, libvirt and QEMU have iommufd, the devices use it, except
    for several GPUs or network adapters, which could then not access each other's memory.
    docs/libvirt.md has more examples.

    \b
    Examples:
      vfiomgr libvirt domain win --memory 16G --vcpus 8 --disk /vm/win.qcow2 --device 04:00.0
      vfiomgr libvirt domain w11 --os windows --secure-boot --no-hotplug --memory 16G --vcpus 8 \\
        --disk /vm/w11.qcow2 --cdrom /iso/w11.iso --cdrom /iso/virtio-win.iso --device 04:00.0
      vfiomgr libvirt domain os --memory 8G --vcpus 4 --cdrom /os.iso --network default --tpm \\
        --boot cdrom
      vfiomgr libvirt domain desk --memory 8G --vcpus 4 --device 04:00.0,rom=/gpu.rom --explain
      vfiomgr libvirt domain ml --memory 256G --vcpus 64 --hugepages 1G --device 0000:17:00.0
      vfiomgr libvirt domain soft --memory 1G --vcpus 1 --virt-type qemu --device 41:00.4
    """
    versions = Versions(session, libvirt_version, qemu_version)
    plan = planned_domain(session, name, versions, options)
    _print(session, plan, versions.libvirt, explain=explain)


def _print(session: Session, plan: DomainPlan, libvirt: Version, *, explain: bool) -> None:
    text = LibvirtBackend(libvirt, with_reasons=explain).render(plan)
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
