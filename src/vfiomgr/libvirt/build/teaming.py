"""Teaming: a virtio interface replaces a network device of the host during a migration.

QEMU unplugs the device for the migration and the guest uses the virtio interface instead, whose
alias the device names (formatdomain, "Teaming a virtio/hostdev NIC pair"). The guest pairs the two
by their MAC address (net_failover); that of a plain `<hostdev>` is the one set on the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from vfiomgr.errors import UsageError

if TYPE_CHECKING:
    from vfiomgr.guests.model import GuestDevice
    from vfiomgr.libvirt.build.model import DomainRequest, GuestNetwork
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot


def check_partners(request: DomainRequest) -> None:
    """Check that each device with teaming has a virtio interface of its own, with its MAC address.

    Raises:
        UsageError: there is none, or it is not for teaming.
    """
    aliases = [network.alias for network in request.networks if network.alias is not None]
    partners = [d.options.partner for d in request.devices if d.options.partner]
    for names, what in ((aliases, "networks have"), (partners, "devices have teaming with")):
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            message = f"several {what} the alias {twice}"
            raise UsageError(message, "use a different alias for each pair, e.g. ua-net0, ua-net1")
    for partner in partners:
        _check(request, partner, _network(request, partner))


def _check(request: DomainRequest, partner: str, network: GuestNetwork | None) -> None:
    if network is None:
        message = f"no network has the alias {partner}, which a device names for teaming"
        told = f"--network default,model=virtio,alias={partner},mac=52:54:00:12:34:56"
        raise UsageError(message, f"add the interface that replaces it, e.g. {told}")
    if request.model_of(network) != "virtio":
        message = f"network {partner} cannot replace a device: its model is not virtio"
        raise UsageError(message, f"add model=virtio to --network {network.name}")
    if network.mac is None:
        message = f"network {partner} has no MAC address, by which the guest pairs it"
        raise UsageError(message, "add mac=ADDRESS, which must be that of the device")


def advice(units: Iterable[GuestDevice]) -> Iterator[str]:
    """What a domain needs for devices with teaming, if only the devices are written."""
    for unit in units:
        partner = unit.options.partner
        if partner is not None:
            yield (
                f"{unit.name} needs a virtio interface with <alias name='{partner}'/>, "
                "<teaming type='persistent'/> and the same MAC address"
            )


def notes(
    host: HostSnapshot, request: DomainRequest, units: Iterable[GuestDevice]
) -> Iterator[str]:
    """How each device gets the MAC address of its partner."""
    for unit in units:
        partner = unit.options.partner
        network = None if partner is None else _network(request, partner)
        if network is not None:
            yield (
                f"{unit.name} needs the MAC address of {partner} before the guest starts: "
                f"{how_to_set(host, unit.functions[0], network.mac or '')}"
            )


def _network(request: DomainRequest, alias: str) -> GuestNetwork | None:
    return next((network for network in request.networks if network.alias == alias), None)


def how_to_set(host: HostSnapshot, function: PciDevice, mac: str) -> str:
    """How a device gets a MAC address on its host."""
    physical = host.device_named(str(function.physical_function))
    if physical is None or function.address not in physical.virtual_functions:
        return f"set {mac} with the device's own tools"
    number = physical.virtual_functions.index(function.address)
    interface = f"with INTERFACE, the network interface of {physical.address}"
    return f"ip link set INTERFACE vf {number} mac {mac}, {interface}"
