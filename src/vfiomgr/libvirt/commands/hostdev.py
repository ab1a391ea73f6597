"""`vfiomgr libvirt hostdev`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import click

from vfiomgr.cli.options import WholeNumber
from vfiomgr.cli.output import print_document, print_text
from vfiomgr.cli.session import Session, complete_address, session_options
from vfiomgr.libvirt.build.hostdevs import LAST_BUS, check, places
from vfiomgr.libvirt.commands import connection
from vfiomgr.libvirt.commands.connection import version_option
from vfiomgr.libvirt.xml import render
from vfiomgr.vgpu.guest_device import DeviceRequest, HostdevOptions, units_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.vgpu.guest_device import GuestHostdev

_FIRST_BUS = 8
"""Behind the devices that a domain of virt-install has; libvirt adds the ports up to it."""


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


class DeviceOptions(TypedDict):
    """What the options of `of_device` give to a command."""

    managed: bool
    display: bool
    ramfb: bool
    rom: str | None
    boot_order: int | None
    driver_model: str | None
    iommufd: bool
    unassigned: bool
    acpi_nodes: str | None


def hand_over(options: DeviceOptions) -> HostdevOptions:
    """What they say of the device."""
    return HostdevOptions(
        is_managed=options["managed"],
        display=options["display"],
        ramfb=options["ramfb"],
        rom=options["rom"],
        boot_order=options["boot_order"],
        driver_model=options["driver_model"],
        has_iommufd=options["iommufd"],
        is_unassigned=options["unassigned"],
        acpi_nodes=options["acpi_nodes"],
    )


@click.command("hostdev")
@click.argument(
    "devices", nargs=-1, required=True, metavar="ADDRESS|UUID...", shell_complete=complete_address
)
@click.option(
    "--guest-bus",
    type=WholeNumber(1, LAST_BUS),
    default=_FIRST_BUS,
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
    host = session.slots_of(devices)
    units = units_of(
        host, [DeviceRequest(name, hand_over(options), is_alone=only) for name in devices]
    )
    check(
        units,
        connection.libvirt_version(session, libvirt_version),
        connection.qemu_version(session),
    )
    hostdevs = tuple(places(units, guest_bus))
    refuse_to_hurt(lambda: session.host(with_users=True), hostdevs, host)
    elements = [render.hostdev(planned) for planned in hostdevs]
    if session.format == "table":
        print_text("".join(elements))
    else:
        print_document("HostdevList", {"items": elements}, session.format)
    tell_what_waits(session.host, hostdevs, host)


def refuse_to_hurt(
    around: Callable[[], HostSnapshot], hostdevs: Iterable[GuestHostdev], host: HostSnapshot
) -> None:
    """What libvirt is to bind, it binds without any guard: so they are kept here.

    `host` knows the devices, `around` gives all of the host, which is asked for where it matters.

    Raises:
        Refusal: `vfiomgr bind` would refuse one of the devices.

    """
    devices = [host.device(h.device.address) for h in hostdevs if h.device.address]
    managed = [h.device.address for h in hostdevs if h.device.managed]
    taken = [d.address for d in devices if d.address in managed and not d.is_on_vfio]
    if taken:
        from vfiomgr.diagnostic import refuse_if_any  # noqa: PLC0415 - only then
        from vfiomgr.passthrough.guards import taking  # noqa: PLC0415 - only then

        whole = around()
        refuse_if_any(taking(whole, [whole.device(address) for address in taken]), frozenset())


def tell_what_waits(
    around: Callable[[], HostSnapshot], hostdevs: Iterable[GuestHostdev], host: HostSnapshot
) -> None:
    """What makes devices ready for the guest that vfiomgr is to bind."""
    bound = [h.device.address for h in hostdevs if not h.device.managed and h.device.address]
    waiting = [a for a in bound if not host.is_ready_for_guests(host.device(a))]
    if waiting:
        from vfiomgr.passthrough import commands as passthrough_commands  # noqa: PLC0415 - only then

        if len(waiting) > passthrough_commands.MOST:
            passthrough_commands.tell_of_many([host.device(address) for address in waiting])
            return
        whole = around()
        passthrough_commands.tell_how_to_bind(whole, [whole.device(address) for address in waiting])
