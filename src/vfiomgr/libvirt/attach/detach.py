"""Taking devices from a domain: which are meant, and what a running guest cannot give back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.diagnostic import Diagnostic, blocker, refuse_if_any
from vfiomgr.errors import UsageError
from vfiomgr.libvirt.attach.claims import disk_diagnostic
from vfiomgr.libvirt.attach.ports import Scope
from vfiomgr.pci.model import PciAddress
from vfiomgr.value import Value
from vfiomgr.vgpu.guest_device import DomainHostdev

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vfiomgr.libvirt.model.domain import Domain, KnownDomain


class Detachment(Value):
    """A device that a domain gives back."""

    scope: Scope
    hostdev: DomainHostdev


class DetachPlan(Value):
    """What a domain is to give back, and what there is to say of it."""

    items: tuple[Detachment, ...]
    already: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def plan_detach(
    domain: KnownDomain, devices: Sequence[str], scope: Scope, *, only: bool
) -> DetachPlan:
    """What libvirt is to be asked for; the host is not looked at: its device may be gone.

    Raises:
        Refusal: with everything that speaks against it.

    """
    wanted = dict.fromkeys(name for text in devices for name in _meant(domain, text, only=only))
    items = [item for name in wanted if (item := _detachment(domain, name, scope)) is not None]
    refuse_if_any(_diagnostics(domain, items), frozenset())
    found = {item.hostdev.name for item in items}
    return DetachPlan(
        items=tuple(items),
        already=tuple(
            f"{domain.name} does not have {name}" for name in wanted if name not in found
        ),
        notes=tuple(_notes(domain, items)),
    )


def _meant(domain: KnownDomain, text: str, *, only: bool) -> Iterator[str]:
    """The device, and the other functions of its slot that the domain has.

    Function 0 gone, a guest would never see the others.
    """
    hostdevs = [h for version in _versions(domain) for h in version.hostdevs]
    known = {h.address for h in hostdevs if h.address is not None}
    try:
        address = PciAddress.parse(text, known)
    except UsageError:
        if text.count("-") != 4:  # noqa: PLR2004 - a UUID has five parts
            raise
        yield text.lower()
        return
    yield str(address)
    if not only:
        yield from map(str, sorted(_companions(domain, address)))


def _companions(domain: KnownDomain, address: PciAddress) -> set[PciAddress]:
    """Other functions of its slot that sit in the same slot of the guest."""
    found = set()
    for version in _versions(domain):
        own = version.hostdev(str(address))
        for other in version.hostdevs if own is not None else ():
            same_slot = other.address is not None and other.address.slot == address.slot
            if other.address and same_slot and own and _place(other) == _place(own):
                found.add(other.address)
    return found - {address}


def _place(hostdev: DomainHostdev) -> tuple[int, int, int] | None:
    guest = hostdev.guest
    return None if guest is None else (guest.domain, guest.bus, guest.slot)


def _versions(domain: KnownDomain) -> list[Domain]:
    return [version for version in (domain.running, domain.defined) if version is not None]


def _detachment(domain: KnownDomain, name: str, scope: Scope) -> Detachment | None:
    running = domain.running.hostdev(name) if domain.running and scope.live else None
    defined = domain.defined.hostdev(name) if domain.defined and scope.config else None
    hostdev = running or defined
    if hostdev is None:
        return None
    return Detachment(Scope(live=running is not None, config=defined is not None), hostdev)


def _diagnostics(domain: KnownDomain, items: Sequence[Detachment]) -> Iterator[Diagnostic]:
    for item in items:
        hostdev = item.hostdev
        if hostdev.element == "disk":
            yield disk_diagnostic(domain, hostdev)
        elif hostdev.element == "interface":
            yield blocker(
                "device-is-interface",
                hostdev.name,
                f"{hostdev.name} is a network interface of {domain.name}, with an address and more",
                f"virsh detach-interface {domain.argument} hostdev",
            )
        elif item.scope.live and _is_multifunction(domain.running, hostdev):
            yield blocker(
                "multifunction-device",
                hostdev.name,
                f"{hostdev.name} is a function of a device with several, which libvirt takes from "
                "no running guest",
                f"pass --config: {domain.name} is without it once it is started anew",
            )


def _is_multifunction(domain: Domain | None, hostdev: DomainHostdev) -> bool:
    """Whether qemuDomainDetachDeviceLive refuses it (src/qemu/qemu_hotplug.c)."""
    guest = hostdev.guest
    if domain is None or guest is None:
        return False
    place = (guest.domain, guest.bus, guest.slot)
    others = [a for a in domain.taken if (a.domain, a.bus, a.slot) == place]
    return guest.multifunction or guest.function > 0 or len(others) > 1


def _notes(domain: KnownDomain, items: Sequence[Detachment]) -> Iterator[str]:
    for item in items:
        running = domain.running.hostdev(item.hostdev.name) if domain.running else None
        if running is not None and not item.scope.live:
            yield f"{item.hostdev.name}: the running guest has it until it is started anew"
