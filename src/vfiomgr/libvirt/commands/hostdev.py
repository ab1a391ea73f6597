"""`vfiomgr libvirt hostdev`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

import click

from vfiomgr.cli.options import WholeNumber
from vfiomgr.cli.output import print_document, print_text
from vfiomgr.cli.session import Session, complete_address, session_options
from vfiomgr.libvirt.build.hostdevs import LAST_BUS
from vfiomgr.libvirt.commands.connection import version_option
from vfiomgr.libvirt.hostdevs import FIRST_BUS, planned_hostdevs
from vfiomgr.libvirt.xml import render

if TYPE_CHECKING:
    from collections.abc import Callable

    from vfiomgr.libvirt.build.named import DeviceOptions


def of_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options of a device that is given to a guest."""
    for decorate in (
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
    ):
        function = decorate(function)
    return function


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
@click.option("--only", is_flag=True, help="Leave the other functions of the slot out.")
@version_option
@session_options()
@click.pass_obj
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
      vfiomgr libvirt hostdev 04:00.0 --guest-bus 3 --only
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
