"""Plan to attach devices to a domain or detach them: which devices, and which calls to libvirt."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.diagnostic import refuse, refuse_if_any
from vfiomgr.errors import UsageError
from vfiomgr.guests.device import units_of
from vfiomgr.guests.model import AttachOptions, DeviceRequest, GuestAddress, GuestDevice
from vfiomgr.libvirt.attach.claims import (
    Scope,
    free_places,
    how_to_read,
    is_express,
    is_given,
    refuse_full,
    unread_domains,
    unread_text,
)
from vfiomgr.libvirt.attach.guards import attach_diagnostics, confidential, detach_diagnostics
from vfiomgr.libvirt.build.confidential import ONLY_SHARED
from vfiomgr.libvirt.build.hostdevs import hostdevs_of
from vfiomgr.libvirt.model import Domain, DomainHostdev, GuestHostdev, Hypervisor, KnownDomain
from vfiomgr.pci.model import PciAddress, PciDevice
from vfiomgr.value import Value
from vfiomgr.vgpu.model import Vgpu

if TYPE_CHECKING:
    from vfiomgr.snapshot.model import HostSnapshot


def usual_scope(domain: KnownDomain, *, live: bool, config: bool) -> Scope:
    """The scope that was asked for, or by default every part that the domain has.

    Raises:
        Refusal: the domain does not have the requested part, or cannot be read.
    """
    name = domain.name
    if domain.is_unread:
        refuse("domain-unread", name, unread_text(domain), how_to_read(domain))
    if live and not domain.is_active:
        remedy = f"omit --live, or start it: virsh start {domain.argument}"
        refuse("domain-not-running", name, f"domain {name} is not running", remedy)
    if config and not domain.is_persistent:
        remedy = "pass only --live, or define it first: virsh define FILE"
        refuse(
            "domain-transient", name, f"domain {name} is transient: it has no definition", remedy
        )
    if live or config:
        return Scope(live=live, config=config)
    return Scope(live=domain.is_active, config=domain.is_persistent)


class AttachRequest(Value):
    """What a user asks for."""

    devices: tuple[str, ...]
    """Addresses and UUIDs, as they are typed."""
    scope: Scope
    managed: bool = False
    """Let libvirt bind and unbind."""
    only: bool = False
    """Leave the other functions of the slot out."""
    allow_claimed: bool = False
    """Also attach devices that another domain has in its definition."""


class Attachment(Value):
    """A device of the guest: one function, several, or a vGPU."""

    scope: Scope
    unit: GuestDevice
    is_active: bool = True
    """For a vGPU: whether it is active, and not only defined."""
    bus: int | None = None
    """The guest's bus, for a device of several functions."""

    @property
    def names(self) -> tuple[str, ...]:
        """Addresses, or the UUID."""
        return tuple(str(device.address) for device in self.functions) or (self.unit.vgpu_uuid,)

    @property
    def functions(self) -> tuple[PciDevice, ...]:
        """The PCI functions; empty for a vGPU."""
        return self.unit.functions

    def hostdevs(self) -> Iterator[GuestHostdev]:
        """One hostdev per function."""
        place = None if self.bus is None else GuestAddress(self.bus, 0, 0)
        return hostdevs_of(self.unit, place)


class AttachPlan(Value):
    """The devices to attach to a domain, and notes."""

    items: tuple[Attachment, ...]
    already: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def plan_attach(
    host: HostSnapshot, hypervisor: Hypervisor, domain: KnownDomain, request: AttachRequest
) -> AttachPlan:
    """Plan the calls to libvirt, one guest device after the other.

    Raises:
        Refusal: lists every reason against it.
        UnknownDevice: the host has no such device.
    """
    wanted = tuple(_units(host, request))
    # the part of the scope in which the domain does not have the entire device
    left = [
        replace(
            unit,
            scope=Scope(
                live=unit.scope.live and not _has(domain.running, unit),
                config=unit.scope.config and not _has(domain.defined, unit),
            ),
        )
        for unit in wanted
    ]
    items = _placed(domain, [unit for unit in left if unit.scope])
    refuse_if_any(attach_diagnostics(host, hypervisor, domain, request, items), frozenset())
    return AttachPlan(
        items=tuple(items),
        already=tuple(
            f"{domain.name} already has {' and '.join(unit.names)}"
            for unit in left
            if not unit.scope
        ),
        notes=(*_attach_notes(host, domain, items), *unread_domains(hypervisor)),
    )


def _units(host: HostSnapshot, request: AttachRequest) -> Iterator[Attachment]:
    """Group the functions of a slot into one device; a vGPU may be only defined."""
    options = AttachOptions(is_managed=request.managed)
    requests = [DeviceRequest(name, options, is_alone=request.only) for name in request.devices]
    defined = tuple(
        Vgpu(known.uuid, "mdev", known.parent, known.type_id, None, None, None, None, None)
        for known in host.defined.vgpus
        if host.vgpus.named(known.uuid) is None
    )
    vgpus = replace(host.vgpus, active=(*host.vgpus.active, *defined))
    for unit in units_of(replace(host, vgpus=vgpus), requests):
        yield Attachment(request.scope, unit, is_active=unit.vgpu not in defined)


def _has(domain: Domain | None, unit: Attachment) -> bool:
    return all(is_given(domain, name) for name in unit.names)


def _placed(domain: KnownDomain, units: Iterable[Attachment]) -> list[Attachment]:
    """Place several functions on a bus of their own; libvirt adds the port if it is new.

    libvirt places a single function itself.
    """
    defined = domain.defined
    if defined is None or not is_express(defined):
        return list(units)
    places, found = free_places(defined), []
    for unit in units:
        bus = None
        if len(unit.functions) > 1:
            place, _ = next(places, (None, False))
            if place is None:
                refuse_full(defined, unit.names)
            bus = place.bus
        found.append(replace(unit, bus=bus))
    return found


def _attach_notes(
    host: HostSnapshot, domain: KnownDomain, items: Sequence[Attachment]
) -> Iterator[str]:
    starting = {d.uuid for d in host.defined.vgpus if d.autostart}
    for item in items:
        uuid = item.unit.vgpu_uuid
        if not item.is_active and uuid not in starting:
            yield (
                f"vGPU {uuid} is not active; start it before {domain.name}: vfiomgr vgpu start "
                f"{uuid}"
            )
        if domain.is_active and not item.scope.live and not _has(domain.running, item):
            yield f"{' and '.join(item.names)}: takes effect when {domain.name} is restarted"
    if confidential(domain, items) is not None:
        yield ONLY_SHARED


# ---- detach


class Detachment(Value):
    """A device to detach from a domain."""

    scope: Scope
    hostdev: DomainHostdev


class DetachPlan(Value):
    """The devices to detach from a domain, and notes."""

    items: tuple[Detachment, ...]
    already: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def plan_detach(
    domain: KnownDomain, devices: Sequence[str], scope: Scope, *, only: bool
) -> DetachPlan:
    """Plan the calls to libvirt; the host is not checked, because the device may be gone.

    Raises:
        Refusal: lists every reason against it.
    """
    wanted = dict.fromkeys(name for text in devices for name in _meant(domain, text, only=only))
    items = []
    for name in wanted:
        running = domain.running.hostdev(name) if domain.running and scope.live else None
        defined = domain.defined.hostdev(name) if domain.defined and scope.config else None
        if hostdev := running or defined:
            there = Scope(live=running is not None, config=defined is not None)
            items.append(Detachment(there, hostdev))
    refuse_if_any(detach_diagnostics(domain, items), frozenset())
    found = {item.hostdev.name for item in items}
    return DetachPlan(
        items=tuple(items),
        already=tuple(
            f"{domain.name} does not have {name}" for name in wanted if name not in found
        ),
        notes=tuple(
            f"{item.hostdev.name}: stays in the running guest until it is restarted"
            for item in items
            if domain.running and domain.running.hostdev(item.hostdev.name) and not item.scope.live
        ),
    )


def _meant(domain: KnownDomain, text: str, *, only: bool) -> Iterator[str]:
    """The device, and the other functions of its slot that the domain has.

    Without function 0 a guest would never find the others.
    """
    versions = [version for version in (domain.running, domain.defined) if version is not None]
    known = {h.address for one in versions for h in one.hostdevs if h.address is not None}
    try:
        address = PciAddress.parse(text, known)
    except UsageError:
        if text.count("-") != 4:  # noqa: PLR2004 - a UUID has five parts
            raise
        yield text.lower()
        return
    yield str(address)
    if not only:
        yield from map(str, sorted(_companions(versions, address)))


def _companions(versions: Iterable[Domain], address: PciAddress) -> set[PciAddress]:
    """The other functions of the device that share its slot of the guest."""
    found = set()
    for version in versions:
        own = version.hostdev(str(address))
        for other in version.hostdevs if own is not None else ():
            if other.address is None or other.address.slot != address.slot or own is None:
                continue
            if (other.guest and other.guest.device) == (own.guest and own.guest.device):
                found.add(other.address)
    return found - {address}
