"""libvirt's <hostdev> elements, from templates/libvirt (https://libvirt.org/formatdomain.html)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from vfiomgr.adapters.resources import resource_directory
from vfiomgr.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from jinja2 import Environment, Template

    from vfiomgr.model.attachment import NamedVgpu
    from vfiomgr.model.domain import DomainHostdev
    from vfiomgr.model.pci import PciDevice
    from vfiomgr.model.vgpu import Vgpu

DEFAULT_GUEST_BUS = 8
"""Behind the devices that a domain of virt-install has; libvirt adds the ports up to it."""
LAST_GUEST_BUS = 0xFF
_HOSTDEV_MODELS = ("vfio-pci", "vfio-ap", "vfio-ccw")


@dataclass(frozen=True, slots=True)
class GuestAddress:
    """Where a function sits in the guest: behind a root port with index `bus` in slot 0."""

    bus: int
    slot: int
    function: int
    multifunction: bool


def pci_hostdevs(
    slots: Iterable[Sequence[PciDevice]], *, first_bus: int, managed: bool, slot: int = 0
) -> Iterator[str]:
    """One element a function; the functions of a slot make one multifunction guest device.

    A function that goes alone gets no guest address: libvirt finds a free port for it.

    Raises:
        UsageError: more slots than guest buses are left.

    """
    bus = first_bus
    for functions in slots:
        ordered = sorted(functions, key=lambda device: device.address)
        several = len(ordered) > 1
        if several and bus > LAST_GUEST_BUS:
            message = f"no guest bus is left for {ordered[0].address}"
            raise UsageError(message, "choose a lower --guest-bus")
        for position, device in enumerate(ordered):
            address = GuestAddress(bus, slot, position, position == 0) if several else None
            yield _template("hostdev-pci.xml.j2").render(
                device=device, guest=address, managed=managed
            )
        bus += several


def mdev_hostdev(vgpu: Vgpu | NamedVgpu, device_api: str) -> str:
    """One element for a mediated device; `device_api` is the attribute of its type.

    Raises:
        UsageError: libvirt has no hostdev model for that API.

    """
    if device_api not in _HOSTDEV_MODELS:
        message = f"libvirt has no hostdev model for the device API {device_api!r} of {vgpu.uuid}"
        raise UsageError(message, f"it knows {', '.join(_HOSTDEV_MODELS)}")
    return _template("hostdev-mdev.xml.j2").render(vgpu=vgpu, model=device_api)


def hostdev_source(hostdev: DomainHostdev) -> str:
    """The element that names a device of a domain, for libvirt to find it there."""
    return _template("hostdev-source.xml.j2").render(hostdev=hostdev)


def _template(name: str) -> Template:
    return _environment().get_template(name)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # noqa: PLC0415 - slow

    environment = Environment(
        loader=FileSystemLoader(resource_directory("templates") / "libvirt"),
        undefined=StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["comment"] = _comment
    return environment


def _comment(text: str) -> str:
    """The text as a comment may hold it: no two hyphens in a row, nothing unprintable."""
    return "".join(c for c in re.sub(r"-(?=-)", "- ", text) if c.isprintable()).rstrip("-")
