"""Requests to bind, unbind and reset, with the arguments of the command line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Unpack

from vfiomgr.cli.keywords import Keywords, Option, fields_of
from vfiomgr.diagnostic import OVERRIDES, Override
from vfiomgr.errors import (
    UsageError,
    chosen,
    forbid_alone,
    forbid_together,
    require_choice,
    require_known,
)
from vfiomgr.host.owners import find_owner
from vfiomgr.passthrough import steps as passthrough_steps
from vfiomgr.passthrough.steps import ChangeDriver, ReleaseDriver
from vfiomgr.paths import VFIO_CDEVS, vfio_group_node
from vfiomgr.pci.bars import BarSize
from vfiomgr.pci.capabilities import RESET_METHODS, ResetMethod
from vfiomgr.pci.facts import read_driver_state, read_virtual_functions
from vfiomgr.pci.function import present_bars
from vfiomgr.pci.iommu import group_number
from vfiomgr.pci.model import PciAddress, is_vfio_driver, pci_device
from vfiomgr.persistence.model import rule_file
from vfiomgr.persistence.named import program_for_units
from vfiomgr.units import size
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.engine.run import Outcome
    from vfiomgr.host.tree import HostTree
    from vfiomgr.snapshot.source import HostSource


class BindOptions(Keywords, total=False):
    """Options of Bind; all are optional."""

    driver: Annotated[
        str | None,
        Option(
            "Set the VFIO driver.  [default: best match or vfio-pci]",
            metavar="NAME",
            complete="snapshot.completion:complete_vfio_driver",
        ),
    ]
    only: Annotated[
        bool, Option("Do not bind the other functions of the slot.", flags=("--function-only",))
    ]
    with_group: Annotated[bool, Option("Bind all devices of the IOMMU group.")]
    allow: Annotated[
        Iterable[Override],
        Option(
            f"Override a safety check (the error message names it).  [{', '.join(OVERRIDES)}]",
            metavar="CHECK",
        ),
    ]
    reset_method: Annotated[ResetMethod | None, Option("Use only this reset method until unbind.")]
    no_d3cold: Annotated[bool, Option("Forbid D3cold until unbind.")]
    bars: Annotated[
        Iterable[str],
        Option(
            "Resize a BAR until unbind; repeatable.",
            metavar="N=SIZE",
            flags=("--bar",),
            complete="snapshot.completion:complete_bar",
            parse=BarSize.parse,
        ),
    ]
    persist: Annotated[bool, Option("Bind again at each boot and hot-plug.")]
    at_boot: Annotated[bool, Option("Like --persist, but only from the next boot on.")]
    release: Annotated[bool, Option("First have the desktop release displays; unbind undoes it.")]
    end_sessions: Annotated[
        bool, Option("With --release: end sessions, also if compositors can close it.")
    ]
    owner: Annotated[
        str | None,
        Option(
            "Set the owner of the VFIO nodes.",
            metavar="USER[:GROUP]",
            complete="snapshot.completion:complete_owner",
        ),
    ]
    update_initramfs: bool
    """With `persist`: rebuild the initramfs if its udev rules change (minutes)."""


class Bind:
    """Bind devices to vfio-pci for passthrough, graphics cards with all of their functions."""

    def __init__(self, *devices: str | PciAddress, **options: Unpack[BindOptions]) -> None:
        require_known(options, BindOptions)
        self.devices = devices
        self.options = options

    def request(self, host: HostSource) -> passthrough_steps.Bind:
        """Build the request for a host.

        Raises:
            UsageError: an address or the owner cannot be read, or options contradict each other.
            Refusal: with `persist`, a user other than root could replace the program that the
                service runs.
        """
        fields = fields_of(BindOptions, self.options)
        _refuse_contradictions(fields)
        _check_bars(fields)
        if fields.get("at_boot"):
            for option in ("reset_method", "no_d3cold"):
                if fields.get(option):
                    words = f"--{option.replace('_', '-')}"
                    forbid_together("--at-boot", words, "no udev rule can set it")
            if fields.get("release"):
                forbid_together("--at-boot", "--release", "nothing is released before the boot")
            fields["persist"] = True
        if fields.get("end_sessions") and not fields.get("release"):
            forbid_alone("--end-sessions", "--release", "no session uses a free device")
        if fields.get("update_initramfs") and not fields.get("persist"):
            forbid_alone("--update-initramfs", "--persist", "no udev rule changes")
        addresses = _addresses(host, self.devices)
        if "owner" in fields:
            tree = host.tree if host.snapshot is None else None
            fields["owner"] = find_owner(tree, fields["owner"])
        program = program_for_units(host) if fields.get("persist") else None
        return passthrough_steps.Bind(addresses, program=program, **fields)


class UnbindOptions(Keywords, total=False):
    """Options of Unbind; all are optional."""

    only: Annotated[
        bool, Option("Do not unbind the other functions of the slot.", flags=("--function-only",))
    ]
    with_group: Annotated[bool, Option("Unbind all devices of the IOMMU group.")]
    allow: Annotated[
        Iterable[Override],
        Option("Try even if a guest uses the device (see --timeout).", choices=("in-use",)),
    ]
    forget: Annotated[bool, Option("Also remove the rules of bind --persist.")]
    update_initramfs: bool
    """With `forget`: rebuild the initramfs if its udev rules change (minutes)."""


class Unbind:
    """Return devices to their original drivers, with the original driver_override."""

    def __init__(self, *devices: str | PciAddress, **options: Unpack[UnbindOptions]) -> None:
        require_known(options, UnbindOptions)
        self.devices = devices
        self.options = options

    def request(self, host: HostSource) -> passthrough_steps.Unbind:
        """Build the request for a host.

        Raises:
            UsageError: an address cannot be read, or options contradict each other.
        """
        fields = fields_of(UnbindOptions, self.options)
        _refuse_contradictions(fields)
        if fields.get("update_initramfs") and not fields.get("forget"):
            forbid_alone("--update-initramfs", "--forget", "no udev rule changes")
        return passthrough_steps.Unbind(_addresses(host, self.devices), **fields)


class Reset:
    """Reset a device, by one method or by the first that works; or its entire bus."""

    def __init__(
        self,
        device: str | PciAddress,
        method: ResetMethod | None = None,
        allow: Iterable[Override] = (),
        *,
        with_bus: bool = False,
    ) -> None:
        self.device = device
        self.method: ResetMethod | None = method
        self.allow = chosen("--allow", allow, OVERRIDES)
        self.with_bus = with_bus

    def request(self, host: HostSource) -> passthrough_steps.Reset:
        """Build the request for a host.

        Raises:
            UsageError: the address cannot be read, or options contradict each other.
        """
        require_choice("--method", self.method, RESET_METHODS)
        if self.with_bus and self.method is not None:
            why = "a method resets one function, --with-bus all functions on its bus"
            forbid_together("--method", "--with-bus", why)
        address = host.address(self.device)
        return passthrough_steps.Reset(address, self.method, self.allow, self.with_bus)


class FunctionState(Value):
    """The current driver and VFIO nodes of a function."""

    address: PciAddress
    driver: str | None
    driver_override: str | None
    iommu_group: int | None
    node: str | None
    """The VFIO node: `/dev/vfio/8`, or `/dev/vfio/devices/vfio0` on a kernel without VFIO groups.

    None if the function is on a host driver.
    """
    nodes: tuple[str, ...] = ()
    """All its VFIO nodes: that of its IOMMU group, and its cdev, which iommufd needs."""


def function_state(host: HostSource, address: PciAddress) -> FunctionState:
    """Read the current state of one function, which is much faster than a scan."""
    state = read_driver_state(host.tree, address)
    group = group_number(host.tree, pci_device(address))
    nodes = tuple(_nodes(host.tree, address, group)) if is_vfio_driver(state.driver) else ()
    node = nodes[0] if nodes else None
    return FunctionState(address, state.driver, state.driver_override, group, node, nodes)


def _nodes(tree: HostTree, address: PciAddress, group: int | None) -> Iterator[str]:
    """The VFIO nodes of a function that exist, that of its group first."""
    if group is not None and tree.exists(vfio_group_node(group)):
        yield vfio_group_node(group)
    for name in tree.children(pci_device(address) / "vfio-dev"):
        if tree.exists(VFIO_CDEVS / name):
            yield VFIO_CDEVS / name


def moved_functions(host: HostSource, outcome: Outcome) -> tuple[FunctionState, ...]:
    """Return the current state of the functions whose driver an outcome changed."""
    steps = outcome.plan.steps
    moved = [step.device for step in steps if isinstance(step, ChangeDriver | ReleaseDriver)]
    return tuple(function_state(host, device.address) for device in moved)


def resized_bars(host: HostSource, outcome: Outcome) -> Iterator[str]:
    """The present size of each BAR that an outcome resized, as text."""
    for step in outcome.plan.steps:
        if isinstance(step, ChangeDriver) and step.resized:
            address, resized = step.device.address, {bar.index for bar in step.resized}
            bars = (bar for bar in present_bars(host.tree, address) if bar.index in resized)
            yield from (f"BAR {bar.index} of {address} has {size(bar.size)}" for bar in bars)


def is_kept(host: HostSource, addresses: Iterable[PciAddress]) -> bool:
    """Whether all of these functions are bound again at each boot."""
    return all(host.tree.exists(rule_file(address)) for address in addresses)


def virtual_functions(host: HostSource, address: PciAddress) -> tuple[FunctionState, ...]:
    """Return the current virtual functions of a physical function."""
    return tuple(function_state(host, vf) for vf in read_virtual_functions(host.tree, address))


def _addresses(host: HostSource, devices: tuple[str | PciAddress, ...]) -> tuple[PciAddress, ...]:
    if not devices:
        message = "no device given"
        raise UsageError(message, "list all devices: vfiomgr list --all")
    return host.addresses(devices)


def _check_bars(fields: Mapping[str, Any]) -> None:
    """Refuse two sizes for a BAR, and sizes with rules that do not set them."""
    indexes = [bar.index for bar in fields.get("bars", ())]
    twice = next((index for index in indexes if indexes.count(index) > 1), None)
    if twice is not None:
        message = f"two sizes for BAR {twice}"
        raise UsageError(message, f"pass --bar {twice}=SIZE once")
    for option in ("at_boot", "persist"):
        if indexes and fields.get(option):
            why = "at boot a BAR has the size of the firmware, and no udev rule resizes it"
            forbid_together(f"--{option.replace('_', '-')}", "--bar", why)


def _refuse_contradictions(fields: Mapping[str, object]) -> None:
    if fields.get("only") and fields.get("with_group"):
        why = "one excludes functions of the slot, the other includes all of the group"
        forbid_together("--function-only", "--with-group", why)
