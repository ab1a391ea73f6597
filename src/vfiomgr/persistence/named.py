"""The persistent bindings of a host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from vfiomgr.host.owners import NodeOwner
from vfiomgr.pci.model import DeviceIdentity, PciAddress
from vfiomgr.persistence.plan import of_layout
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.persistence.model import PersistedBinding
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.snapshot.source import HostSource


class PersistedFunction(Value):
    """A function that is bound at each boot."""

    address: PciAddress
    driver: str
    owner: Literal["vfiomgr", "layout", "driverctl"]
    """The owner of the rule: vfiomgr, a layout or driverctl."""
    device: Literal["same", "another", "absent", "unrecorded"]
    """Whether the recorded device is at the address now."""
    recorded: DeviceIdentity | None
    node_owner: NodeOwner | None
    """The owner of the VFIO nodes."""
    driver_now: str | None


def persisted(host: HostSource) -> tuple[PersistedFunction, ...]:
    """The persistent bindings of vfiomgr, of an installed layout, and of driverctl."""
    found = host.scan()
    own = (
        PersistedFunction(
            binding.address,
            binding.driver,
            "vfiomgr" if of_layout(found, binding.address) is None else "layout",
            _state(found, binding.address, binding),
            binding.device,
            binding.owner,
            _driver_now(found, binding.address),
        )
        for binding in found.persisted
    )
    others = (
        PersistedFunction(
            entry.address,
            entry.driver,
            "driverctl",
            _state(found, entry.address, None),
            None,
            None,
            _driver_now(found, entry.address),
        )
        for entry in found.driverctl_overrides
    )
    return (*own, *others)


def _state(
    host: HostSnapshot, address: PciAddress, binding: PersistedBinding | None
) -> Literal["same", "another", "absent", "unrecorded"]:
    present = next((d.identity for d in host.devices if d.address == address), None)
    if present is None:
        return "absent"
    if binding is None:
        return "unrecorded"
    return "same" if binding.is_of(present) else "another"


def _driver_now(host: HostSnapshot, address: PciAddress) -> str | None:
    return next((d.driver for d in host.devices if d.address == address), None)
