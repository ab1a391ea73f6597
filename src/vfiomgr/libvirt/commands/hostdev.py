"""`vfiomgr libvirt hostdev`: elements for the devices of this host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack

import click

from vfiomgr.cli.options import (
    READING,
    WholeNumber,
    declared,
    function_only_option,
    session_options,
    with_options,
)
from vfiomgr.cli.output import print_document, print_text
from vfiomgr.guests.model import DeviceOptions
from vfiomgr.libvirt.build.hostdevs import LAST_BUS
from vfiomgr.libvirt.named import FIRST_BUS, planned_hostdevs
from vfiomgr.libvirt.versions import Versions
from vfiomgr.libvirt.xml import render
from vfiomgr.snapshot.session import Session, pass_session
from vfiomgr.vgpu.completion import complete_device


def version_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options that set the versions of libvirt and QEMU."""
    return with_options(
        function,
        click.option(
            "--libvirt-version",
            metavar="VERSION",
            help="Write for this libvirt, e.g. 10.0.  [default: the installed one]",
        ),
        click.option(
            "--qemu-version",
            metavar="VERSION",
            help="Write for this QEMU, e.g. 9.2.  [default: the installed one; unknown with "
            "--libvirt-version]",
        ),
    )


@click.command("hostdev")
@click.argument(
    "devices", nargs=-1, required=True, metavar="ADDRESS|UUID...", shell_complete=complete_device
)
@click.option(
    "--guest-bus",
    type=WholeNumber(1, LAST_BUS),
    default=FIRST_BUS,
    show_default=True,
    help="Set the root port index of the first multifunction device.",
)
@declared(DeviceOptions)
@function_only_option("Leave the other functions of the slot out.")
@version_options
@session_options(*READING)
@pass_session
def hostdev(
    session: Session,
    *,
    devices: tuple[str, ...],
    guest_bus: int,
    only: bool,
    libvirt_version: str | None,
    qemu_version: str | None,
    **options: Unpack[DeviceOptions],
) -> None:
    """Print <hostdev> elements for PCI devices and vGPUs.

    Add them to the <devices> of a domain. The functions of a slot become one multifunction guest
    device. If the libvirt or QEMU of this machine (or --libvirt-version, --qemu-version) does not
    support an element, the command fails and names the release that does. Where kernel, libvirt and
    QEMU have iommufd, the devices use it.

    \b
    Examples:
      vfiomgr libvirt hostdev 0000:04:00.0
      vfiomgr libvirt hostdev f715f63c-0d00-4007-9c5a-b07b0c6c05de --display --ramfb
      vfiomgr libvirt hostdev 04:00.0 --rom /var/lib/libvirt/gpu.rom --boot-order 1
      vfiomgr libvirt hostdev 04:00.0 --guest-bus 3 --function-only
      vfiomgr libvirt hostdev 05:00.0 --managed --unassigned      # for its IOMMU group
      vfiomgr libvirt hostdev 0009:01:00.0 --iommufd --acpi-nodes 1-8 --libvirt-version 12.1
      vfiomgr libvirt hostdev 04:00.0 --libvirt-version 12.8 --qemu-version 11.1    # another host
      vfiomgr libvirt hostdev 05:10.0 --teaming ua-net0           # to migrate the guest
      vfiomgr libvirt hostdev 41:00.4 --driver-model mlx5_vfio_pci --managed --libvirt-version 10.0
    """
    versions = Versions(session, libvirt_version, qemu_version)
    hostdevs = planned_hostdevs(session, devices, guest_bus, versions, only, options)
    elements = [render.hostdev(planned) for planned in hostdevs]
    if session.format == "table":
        print_text("".join(elements))
    else:
        print_document("HostdevList", {"items": elements}, session.format)
