"""`vfiomgr libvirt hostdev`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import click

from vfiomgr.adapters.libvirt import render
from vfiomgr.cli.change import tell_how_to_bind
from vfiomgr.cli.output import print_document
from vfiomgr.cli.parameters import WholeNumber
from vfiomgr.cli.session import Session, complete_address, session_options
from vfiomgr.errors import Refusal, UnknownDevice
from vfiomgr.planner.guards import bridge, refuse_if_any, taking

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vfiomgr.model.pci import PciDevice
    from vfiomgr.model.snapshot import HostSnapshot
    from vfiomgr.model.vgpu import Vgpu

_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)


@click.command("hostdev")
@click.argument(
    "devices", nargs=-1, required=True, metavar="ADDRESS|UUID...", shell_complete=complete_address
)
@click.option(
    "--guest-bus",
    type=WholeNumber(1, render.LAST_GUEST_BUS),
    default=render.DEFAULT_GUEST_BUS,
    show_default=True,
    help="Index of the guest's root port for the first device of several functions.",
)
@click.option("--managed", is_flag=True, help="Let libvirt bind and unbind, instead of vfiomgr.")
@click.option("--only", is_flag=True, help="Leave the other functions of the slot out.")
@session_options()
@click.pass_obj
def hostdev(
    session: Session, *, devices: tuple[str, ...], guest_bus: int, managed: bool, only: bool
) -> None:
    """Print <hostdev> elements for PCI devices and vGPUs, to put into a domain's <devices>.

    The functions of a slot become one multifunction guest device.

    \b
    Examples:
      vfiomgr libvirt hostdev 0000:04:00.0
      vfiomgr libvirt hostdev f715f63c-0d00-4007-9c5a-b07b0c6c05de
    """
    host = session.host()
    vgpus = [_vgpu(host, text) for text in devices if _UUID.fullmatch(text)]
    slots = _slots(host, [text for text in devices if not _UUID.fullmatch(text)], only=only)
    functions = [device for slot in slots for device in slot]
    own = [device for device in functions if host.is_vendor_function(device)]
    waiting = [d for d in functions if not d.is_on_vfio and d not in own]
    if managed:
        _refuse_to_manage(own)
        refuse_if_any(taking(host, waiting), frozenset())
    elements = list(render.pci_hostdevs(slots, first_bus=guest_bus, managed=managed))
    elements += [render.mdev_hostdev(vgpu, _device_api(host, vgpu)) for vgpu in vgpus]
    if session.format == "table":
        click.echo("".join(elements), nl=False)
    else:
        print_document("HostdevList", {"items": elements}, session.format)
    if not managed:
        tell_how_to_bind(host, [d for d in functions if not host.is_ready_for_guests(d)])


def _refuse_to_manage(functions: Sequence[PciDevice]) -> None:
    """Unbound from its driver, such a function is lost until all are made anew.

    Raises:
        Refusal: there is one.

    """
    for device in functions:
        message = f"{device} is a vGPU of its driver {device.driver}, which libvirt must not unbind"
        raise Refusal(message, "leave out --managed")


def _slots(host: HostSnapshot, texts: Sequence[str], *, only: bool) -> list[tuple[PciDevice, ...]]:
    """The named functions by slot, each slot whole unless `only`, in the order of naming."""
    named = [host.device(host.parse_address(text)) for text in texts]
    refuse_if_any([o for device in named for o in bridge(host, device)], frozenset())
    slots: dict[object, dict[object, PciDevice]] = {}
    for device in named:
        key = device.address if device.physical_function else device.address.slot
        functions = (device,) if only else host.slot(device)
        slots.setdefault(key, {}).update({d.address: d for d in functions})
    return [tuple(functions.values()) for functions in slots.values()]


def _vgpu(host: HostSnapshot, uuid: str) -> Vgpu:
    found = host.vgpu(uuid)
    if found is None:
        message = f"there is no active vGPU {uuid}"
        raise UnknownDevice(message, "vfiomgr vgpu list shows the active ones")
    return found


def _device_api(host: HostSnapshot, vgpu: Vgpu) -> str:
    """`device_api` of the vGPU's type; a recorded host may not tell, GPUs have vfio-pci."""
    for parent in host.vgpu_parents:
        for vgpu_type in parent.types:
            if (parent.name, vgpu_type.id) == (vgpu.parent, vgpu.type) and vgpu_type.device_api:
                return vgpu_type.device_api
    return "vfio-pci"
