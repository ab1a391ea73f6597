"""`vfiomgr libvirt domain`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

import click

from vfiomgr.adapters.libvirt import render
from vfiomgr.cli import libvirt_versions
from vfiomgr.cli.domain_options import GuestOptions, of_guest, wish_of
from vfiomgr.cli.libvirt_hostdev import refuse_to_hurt, tell_what_waits
from vfiomgr.cli.libvirt_versions import version_option
from vfiomgr.cli.output import note, print_document, print_text
from vfiomgr.cli.session import Session, session_options
from vfiomgr.planner.guest.domain import plan_guest
from vfiomgr.planner.guest.processors import MOST_WITHOUT_EIM

if TYPE_CHECKING:
    from vfiomgr.model.guest import GuestPlan
    from vfiomgr.model.version import Version


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
    libvirt = libvirt_versions.libvirt_version(session, libvirt_version)()
    depends = options["iommufd"] or wish.vcpus > MOST_WITHOUT_EIM
    qemu = libvirt_versions.qemu_version(session)() if depends else None
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
