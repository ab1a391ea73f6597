"""`vfiomgr libvirt domain`: a domain with devices of this host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

import click

from vfiomgr.cli.options import READING, declared, flag, session_options
from vfiomgr.cli.output import print_document, print_text
from vfiomgr.libvirt.backend import LibvirtBackend
from vfiomgr.libvirt.build.named import DomainOptions
from vfiomgr.libvirt.commands.hostdev import version_options
from vfiomgr.libvirt.named import planned_domain
from vfiomgr.libvirt.versions import Versions
from vfiomgr.snapshot.session import Session, pass_session

if TYPE_CHECKING:
    from vfiomgr.libvirt.build.model import DomainPlan
    from vfiomgr.units import Version


def complete_boot(
    _context: click.Context, _parameter: click.Parameter, incomplete: str
) -> list[str]:
    """What a guest boots from, but for its own names of devices."""
    return [name for name in ("disk", "cdrom", "network") if name.startswith(incomplete)]


def complete_audio(
    _context: click.Context, _parameter: click.Parameter, incomplete: str
) -> list[str]:
    """Where the sound of a guest can go."""
    known = ("spice", "pipewire,user=", "pulseaudio,user=", "none")
    return [name for name in known if name.startswith(incomplete)]


@click.command("domain")
@click.argument("name")
@declared(DomainOptions)
@flag("--explain", text="Add the reason for each part as a comment.")
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
      vfiomgr libvirt domain pc --os windows --desktop --memory 16G --vcpus 8 --device 04:00.0 \\
        --disk /vm/pc.qcow2,bus=virtio --cdrom /iso/w11.iso --cdrom /iso/virtio-win.iso
      vfiomgr libvirt domain tv --memory 8G --vcpus 4 --device 04:00.0 --usb 046d:c52b \\
        --looking-glass 2560x1440,kvmfr --graphics spice --audio spice \\
        --evdev /dev/input/by-id/usb-Logitech_K120-event-kbd,toggle=scrolllock
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
