"""Requests about functions whose addresses and owners are named as on the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict, Unpack

from vfiomgr.diagnostic import OVERRIDES
from vfiomgr.host.accounts import find_owner
from vfiomgr.passthrough import requests
from vfiomgr.passthrough.steps import ChangeDriver, ReleaseDriver
from vfiomgr.paths import pci_device, vfio_group_node
from vfiomgr.pci.facts import read_driver_state, read_virtual_functions
from vfiomgr.pci.iommu import group_number
from vfiomgr.pci.model import PciAddress, is_vfio_driver
from vfiomgr.pci.reset_capabilities import RESET_METHODS
from vfiomgr.persistence.model import rule_file
from vfiomgr.persistence.program import program_for_units
from vfiomgr.usage import chosen, forbid_alone, forbid_together, require_choice
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vfiomgr.diagnostic import Override
    from vfiomgr.engine.run import Outcome
    from vfiomgr.pci.reset_capabilities import ResetMethod
    from vfiomgr.snapshot.source import HostSource


class BindOptions(TypedDict, total=False):
    """How devices are bound; all of it may be left out."""

    driver: str | None
    """The VFIO driver; None for the variant driver that fits each function, or vfio-pci."""
    only: bool
    """Leave the other functions of the slot alone."""
    with_group: bool
    """Take foreign members of the IOMMU group too."""
    allow: Iterable[Override]
    """Safety checks to override; a refusal names them."""
    reset_method: ResetMethod | None
    """Reset the named functions by this method alone, until unbind."""
    no_d3cold: bool
    """Keep the functions out of D3cold, until unbind."""
    persist: bool
    """Bind them again at each boot and hot-plug."""
    owner: str | None
    """USER or USER:GROUP, by name or number: who may open the VFIO nodes besides root."""
    update_initramfs: bool
    """With `persist`: rebuild the initramfs if its udev rules change (minutes)."""


class Bind:
    """Bind devices to vfio-pci for passthrough, with all functions of their slots."""

    def __init__(self, *devices: str | PciAddress, **options: Unpack[BindOptions]) -> None:
        self.devices = devices
        self.options = options

    def request(self, host: HostSource) -> requests.Bind:
        """The request for a host.

        Raises:
            UsageError: an address or the owner cannot be read, or options contradict each other.
            Refusal: with `persist`, others than root could replace the program that the service
                would run.

        """
        said = self.options
        persist, update = said.get("persist", False), said.get("update_initramfs", False)
        only, with_group = said.get("only", False), said.get("with_group", False)
        _refuse_contradictions(only=only, with_group=with_group)
        if update and not persist:
            forbid_alone("--update-initramfs", "--persist", "no rule is written that it must hold")
        require_choice("--reset-method", said.get("reset_method"), RESET_METHODS)
        allow = chosen("--allow", said.get("allow", ()), OVERRIDES)
        addresses = host.addresses(self.devices)
        owner = said.get("owner")
        tree = host.tree if owner is not None and host.snapshot is None else None
        return requests.Bind(
            addresses,
            driver=said.get("driver"),
            only=only,
            with_group=with_group,
            allow=allow,
            reset_method=said.get("reset_method"),
            no_d3cold=said.get("no_d3cold", False),
            persist=persist,
            owner=None if owner is None else find_owner(tree, owner),
            update_initramfs=update,
            program=_program(host) if persist else None,
        )


class UnbindOptions(TypedDict, total=False):
    """How devices are given back; all of it may be left out."""

    only: bool
    """Leave the other functions of the slot alone."""
    with_group: bool
    """Give back all functions of the IOMMU group."""
    allow: Iterable[Override]
    """`in-use`: try it although a guest holds the device, until the deadline."""
    forget: bool
    """Remove what `persist` wrote, too."""
    update_initramfs: bool
    """With `forget`: rebuild the initramfs if its udev rules change (minutes)."""


class Unbind:
    """Give devices back to the drivers that they had, with driver_override as it was."""

    def __init__(self, *devices: str | PciAddress, **options: Unpack[UnbindOptions]) -> None:
        self.devices = devices
        self.options = options

    def request(self, host: HostSource) -> requests.Unbind:
        """The request for a host.

        Raises:
            UsageError: an address cannot be read, or options contradict each other.

        """
        said = self.options
        forget, update = said.get("forget", False), said.get("update_initramfs", False)
        only, with_group = said.get("only", False), said.get("with_group", False)
        _refuse_contradictions(only=only, with_group=with_group)
        if update and not forget:
            forbid_alone("--update-initramfs", "--forget", "the rules that it holds stay")
        allow = chosen("--allow", said.get("allow", ()), ("in-use",))
        return requests.Unbind(
            host.addresses(self.devices),
            only=only,
            with_group=with_group,
            allow=allow,
            forget=forget,
            update_initramfs=update,
        )


class Reset:
    """Reset a device, by one method or by the first that works."""

    def __init__(
        self,
        device: str | PciAddress,
        method: ResetMethod | None = None,
        allow: Iterable[Override] = (),
    ) -> None:
        self.device = device
        self.method: ResetMethod | None = method
        self.allow = chosen("--allow", allow, OVERRIDES)

    def request(self, host: HostSource) -> requests.Reset:
        """The request for a host.

        Raises:
            UsageError: the address cannot be read.

        """
        require_choice("--method", self.method, RESET_METHODS)
        address = host.address(self.device)
        return requests.Reset(address, self.method, self.allow)


class FunctionState(Value):
    """Who has a function now."""

    address: PciAddress
    driver: str | None
    driver_override: str | None
    iommu_group: int | None
    node: str | None
    """What a guest opens it by, e.g. `/dev/vfio/8`; None where a host driver has it."""


def function_state(host: HostSource, address: PciAddress) -> FunctionState:
    """Who has a function of a tree now; a scan takes many times as long."""
    state = read_driver_state(host.tree, address)
    group = group_number(host.tree, pci_device(address))
    node = None if group is None else vfio_group_node(group)
    is_open = node is not None and is_vfio_driver(state.driver) and host.tree.exists(node)
    return FunctionState(
        address, state.driver, state.driver_override, group, node if is_open else None
    )


def moved_functions(host: HostSource, outcome: Outcome) -> tuple[FunctionState, ...]:
    """The functions that an outcome gave to other drivers, as they are now."""
    steps = outcome.plan.steps
    moved = [step.device for step in steps if isinstance(step, ChangeDriver | ReleaseDriver)]
    return tuple(function_state(host, device.address) for device in moved)


def is_kept(host: HostSource, addresses: Iterable[PciAddress]) -> bool:
    """Whether all of these functions of a tree are bound again at each boot."""
    return all(host.tree.exists(rule_file(address)) for address in addresses)


def virtual_functions(host: HostSource, address: PciAddress) -> tuple[FunctionState, ...]:
    """The virtual functions that a physical one of a tree has now."""
    return tuple(function_state(host, vf) for vf in read_virtual_functions(host.tree, address))


def _program(host: HostSource) -> str | None:
    """What the service runs that binds functions as they arrive."""
    return program_for_units(host)


def _refuse_contradictions(*, only: bool, with_group: bool) -> None:
    if only and with_group:
        why = "one leaves functions out that share the slot, the other takes all of the group"
        forbid_together("--function-only", "--with-group", why)
