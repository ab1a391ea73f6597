"""Where a device of a domain of libvirt is given to, or taken from."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from vfiomgr.errors import Refusal
from vfiomgr.libvirt.model.domain import EXPANDER, ROOT_PORT, Domain, GuestAddress
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vfiomgr.libvirt.model.domain import PciController


class Scope(Value):
    """What of a domain is changed: the running guest, its definition, or both."""

    live: bool
    config: bool

    def __bool__(self) -> bool:
        """Whether anything is."""
        return self.live or self.config

    def __str__(self) -> str:
        """`the running guest and the definition`."""
        parts = ("the running guest",) * self.live + ("the definition",) * self.config
        return " and ".join(parts)


_PORTS = frozenset({ROOT_PORT, "pcie-switch-downstream-port"})
_LAST_BUS = 0xFF
_FIRST_SLOT, _LAST_SLOT = 3, 0x1F
"""Of a conventional root bus: 1 is the chipset's (PIIX3), 2 the first video card's."""
_EXPRESS_ARCHITECTURES = frozenset({"aarch64", "riscv64", "loongarch64", "armv7l"})


def is_express(domain: Domain) -> bool:
    """Whether its machine has PCI Express, so that devices go behind root ports."""
    roots = {controller.model for controller in domain.controllers}
    if roots & {"pcie-root", "pci-root"}:
        return "pcie-root" in roots
    machine = domain.machine or ""
    return "q35" in machine or domain.architecture in _EXPRESS_ARCHITECTURES or ROOT_PORT in roots


def free_ports(domain: Domain) -> tuple[PciController, ...]:
    """Ports that nothing says it is behind."""
    used = {address.bus for address in domain.taken if not address.domain}
    ports = (one for one in domain.controllers if one.model in _PORTS)
    return tuple(port for port in ports if port.index not in used)


def free_places(domain: Domain) -> Iterator[tuple[GuestAddress, bool]]:
    """Places for devices of several functions, and whether each needs a port that is not there."""
    return _behind_ports(domain) if is_express(domain) else _on_root(domain)


def _behind_ports(domain: Domain) -> Iterator[tuple[GuestAddress, bool]]:
    """Free ports of the root complex itself, then new ones behind all that there are.

    A port behind an expander is near one of the guest's NUMA nodes, which may be the wrong one.
    """
    expanders = {one.index for one in domain.controllers if one.model == EXPANDER}
    for port in free_ports(domain):
        if port.guest is None or port.guest.bus not in expanders:
            yield _first_function(port.index), False
    used = {address.bus for address in domain.taken if not address.domain}
    known = {*used, *(controller.index for controller in domain.controllers), 0}
    for index in (*range(max(known) + 1, _LAST_BUS + 1), *range(1, max(known))):
        if index not in known:
            yield _first_function(index), True


def _on_root(domain: Domain) -> Iterator[tuple[GuestAddress, bool]]:
    """Free slots of a conventional root bus."""
    used = {address.slot for address in domain.taken if not address.domain and not address.bus}
    for slot in range(_FIRST_SLOT, _LAST_SLOT + 1):
        if slot not in used:
            yield GuestAddress(0, slot, 0, multifunction=True), False


def _first_function(bus: int) -> GuestAddress:
    return GuestAddress(bus, 0, 0, multifunction=True)


def refuse_full(domain: Domain, names: Sequence[str]) -> NoReturn:
    """Say that there is no place.

    Raises:
        Refusal: always.

    """
    if is_express(domain):
        message = f"{domain.name} has no bus left for {', '.join(names)}: all 255 are in use"
        raise Refusal(message, "take a controller or a device out")
    message = f"{domain.name} has no slot left on its PCI bus for {', '.join(names)}"
    raise Refusal(message, "take a device out, or give the domain the machine q35")
