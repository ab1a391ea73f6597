"""Lists of devices: the options that filter them, and what lists show."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import click

from vfiomgr.cli.options import WholeNumber, WordChoice, with_options
from vfiomgr.cli.output import note, or_dash
from vfiomgr.pci.names import DEVICE_KINDS
from vfiomgr.snapshot.completion import (
    complete_address,
    complete_driver,
    complete_group,
    complete_numa_node,
    complete_vendor,
)
from vfiomgr.snapshot.values import DeviceState

if TYPE_CHECKING:
    from vfiomgr.pci.model import PciAddress, PciDevice
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.snapshot.session import Session
    from vfiomgr.vgpu.model import Vgpu

_NO_DRIVER = "none"
_STATES: tuple[str, ...] = get_args(DeviceState)
_DIGITS = frozenset("0123456789abcdef")
_MOST_DIGITS = 6


class _State(WordChoice):
    """The state of a device; `in use` as in tables is `in-use`."""

    def convert(
        self,
        value: Any,  # noqa: ANN401 - as click has it
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> str:
        """Read it."""
        return super().convert(value.replace(" ", "-"), param, ctx)


class Filter(NamedTuple):
    """What was asked for; of several values of an option one is enough, of options all count."""

    addresses: tuple[str, ...] = ()
    drivers: tuple[str, ...] = ()
    groups: tuple[int, ...] = ()
    classes: tuple[str, ...] = ()
    vendors: tuple[str, ...] = ()
    states: tuple[str, ...] = ()
    nodes: tuple[int, ...] = ()

    def select(self, session: Session, host: HostSnapshot) -> Selection:
        """The criteria with the addresses of a host.

        Raises:
            UsageError: an address is malformed, or the host has no such device.
        """
        found = [host.device(address).address for address in session.addresses(self.addresses)]
        return Selection(self, frozenset(found))

    def nothing_found(self, host: HostSnapshot, what: str) -> str:
        """Why a list is empty: no device has the vendor or driver, or none matches all filters."""
        devices = host.devices
        drivers = {device.driver or _NO_DRIVER for device in devices}
        drivers |= {vgpu.driver for vgpu in host.vgpus.active if vgpu.driver}
        for value in self.vendors:
            if not any(_is_by(device, value) for device in devices):
                makers = {device.short_name.partition(" ")[0].casefold() for device in devices}
                return f"no device has vendor {value}{_meant(value, makers)}"
        for value in self.drivers:
            if value not in drivers:
                return f"no device has driver {value}{_meant(value, drivers)}"
        return f"none of {what} matches"


def _meant(value: str, known: set[str]) -> str:
    """A question with the closest value that a device of this host has."""
    from difflib import get_close_matches  # noqa: PLC0415 - needed only for mistakes

    near = get_close_matches(value, sorted(known), 1)
    return f". Did you mean {near[0]}?" if near else ""


class Selection(NamedTuple):
    """A filter, and the devices of a host that it names."""

    wanted: Filter
    addresses: frozenset[PciAddress]

    def has_device(self, device: PciDevice) -> bool:
        """Whether all criteria but the state hold for a function."""
        return self._has_hardware(device) and self._has_place(
            device.driver, device.iommu_group, device.numa_node
        )

    def has_vgpu(self, host: HostSnapshot, vgpu: Vgpu) -> bool:
        """Whether they hold for a vGPU; its address, class and vendor are those of its parent."""
        device = host.device_named(vgpu.parent)
        is_meant = self._has_hardware(device) if device is not None else self._is_any_hardware
        return is_meant and self._has_place(vgpu.driver, vgpu.iommu_group, vgpu.numa_node)

    @property
    def _is_any_hardware(self) -> bool:
        return not (self.addresses or self.wanted.classes or self.wanted.vendors)

    def _has_hardware(self, device: PciDevice) -> bool:
        wanted = self.wanted
        return (
            (not self.addresses or device.address in self.addresses)
            and (not wanted.classes or device.class_code.startswith(wanted.classes))
            and (not wanted.vendors or any(_is_by(device, vendor) for vendor in wanted.vendors))
        )

    def _has_place(self, driver: str | None, group: int | None, node: int | None) -> bool:
        wanted = self.wanted
        return (
            (not wanted.drivers or (driver or _NO_DRIVER) in wanted.drivers)
            and (not wanted.groups or group in wanted.groups)
            and (not wanted.nodes or node in wanted.nodes)
        )


def _is_by(device: PciDevice, vendor: str) -> bool:
    """Whether a device is of a vendor, by its ID or the beginning of its name."""
    names = (device.short_name.casefold(), device.name.casefold())
    return vendor == device.vendor_id or any(name.startswith(vendor) for name in names)


def _class_digits(
    context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> tuple[str, ...]:
    """What the class codes begin with that were asked for.

    Raises:
        click.BadParameter: a text is neither a name nor the digits of a class.
    """
    found: list[str] = []
    for value in values:
        text = value.lower().removeprefix("0x")
        is_code = len(text) in range(2, _MOST_DIGITS + 1) and _DIGITS.issuperset(text)
        if text not in DEVICE_KINDS and not is_code:
            message = f"{value!r} is not one of {', '.join(DEVICE_KINDS)}, or the digits of a class"
            raise click.BadParameter(message, context, parameter)
        found += DEVICE_KINDS.get(text, (text,))
    return tuple(found)


def _complete_class(
    _context: click.Context, _parameter: click.Parameter, incomplete: str
) -> list[str]:
    return [name for name in DEVICE_KINDS if name.startswith(incomplete)]


_FILTER_OPTIONS = (
    click.argument("addresses", nargs=-1, metavar="[ADDRESS]...", shell_complete=complete_address),
    click.option(
        "--driver",
        "drivers",
        multiple=True,
        metavar="NAME",
        shell_complete=complete_driver,
        help="Devices bound to this driver; `none` for no driver.",
    ),
    click.option(
        "--group",
        "groups",
        multiple=True,
        type=WholeNumber(0),
        metavar="NUMBER",
        shell_complete=complete_group,
        help="Devices in this IOMMU group.",
    ),
    click.option(
        "--class",
        "classes",
        multiple=True,
        callback=_class_digits,
        shell_complete=_complete_class,
        metavar="CLASS",
        help="gpu, nic, nvme, usb, audio …, or the first digits of the class code.",
    ),
    click.option(
        "--vendor",
        "vendors",
        multiple=True,
        metavar="VENDOR",
        shell_complete=complete_vendor,
        help="Vendor ID, or the beginning of its name.",
    ),
    click.option(
        "--state",
        "states",
        multiple=True,
        type=_State(_STATES),
        help="Devices in this state.",
    ),
    click.option(
        "--numa",
        "nodes",
        multiple=True,
        type=WholeNumber(0),
        metavar="NODE",
        shell_complete=complete_numa_node,
        help="Devices at this NUMA node.",
    ),
)


def filter_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a command with the options of a filter, which it takes as `wanted`."""

    def with_filter(
        *arguments: object,
        addresses: tuple[str, ...],
        drivers: tuple[str, ...],
        groups: tuple[int, ...],
        classes: tuple[str, ...],
        vendors: tuple[str, ...],
        states: tuple[str, ...],
        nodes: tuple[int, ...],
        **options: object,
    ) -> object:
        makers = tuple(vendor.casefold().removeprefix("0x") for vendor in vendors)
        wanted = Filter(addresses, drivers, groups, classes, makers, states, nodes)
        return command(*arguments, wanted=wanted, **options)

    return with_options(update_wrapper(with_filter, command), *_FILTER_OPTIONS)


def note_no_devices(host: HostSnapshot) -> None:
    """Say why a list of all functions is empty."""
    note("no PCI device is listed" if host.pci_unidentified else "this host has no PCI devices")


def group_cell(host: HostSnapshot, device: PciDevice) -> str:
    """The IOMMU group of a function as a cell; a recording need not show groups at all."""
    return or_dash(device.iommu_group) if host.iommu.is_known else "unknown"
