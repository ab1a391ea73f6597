"""Which devices to add to an existing domain, where to place them, and which to remove."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from vfiomgr.diagnostic import blocker, refuse, refuse_if_any
from vfiomgr.documents.xml_text import Document, read_document
from vfiomgr.guests.model import AttachOptions, GuestAddress, GuestDevice
from vfiomgr.libvirt.attach.claims import disk_diagnostic, free_places, refuse_full
from vfiomgr.libvirt.build.address_spaces import space_diagnostics
from vfiomgr.libvirt.build.hostdevs import hostdevs_of
from vfiomgr.libvirt.model import Domain, DomainHostdev, GuestHostdev
from vfiomgr.libvirt.xml import render
from vfiomgr.libvirt.xml.edit import add_elements, remove_hostdevs, root_port
from vfiomgr.libvirt.xml.read import domain_of
from vfiomgr.pci.model import PciAddress
from vfiomgr.units import is_uuid
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.snapshot.model import HostSnapshot


class NewPort(Value):
    """A root port to add to a domain, and the device that it is for."""

    index: int
    device: str


class Placed(Value):
    """A device of a guest: the names of its functions, and the place of the first one."""

    names: tuple[str, ...]
    guest: GuestAddress | None
    """None if libvirt chooses the place."""


class Additions(Value):
    """The devices to add to a domain."""

    placed: tuple[Placed, ...] = ()
    ports: tuple[NewPort, ...] = ()
    already: tuple[str, ...] = ()
    """Devices that the domain already has."""


class Removals(Value):
    """The devices to remove from a domain."""

    devices: tuple[DomainHostdev, ...] = ()
    absent: tuple[str, ...] = ()
    """Devices that the domain does not have."""
    orphans: tuple[str, ...] = ()
    """Functions that stay, but that the guest cannot find without the removed ones."""


class Edited(Value):
    """A text before and after, and the devices added and removed."""

    before: Document
    after: bytes
    removals: Removals
    additions: Additions
    screens: int = 0
    """How many emulated graphics cards were removed."""

    @property
    def is_changed(self) -> bool:
        """Whether there is a change to write."""
        return self.after != self.before.text

    @property
    def added(self) -> frozenset[tuple[str, ...]]:
        """The functions of each added device."""
        return frozenset(one.names for one in self.additions.placed)


def edited(
    document: Document,
    host: HostSnapshot | None,
    units: Sequence[GuestDevice],
    removed: Sequence[str],
    *,
    only: bool,
) -> tuple[Edited, tuple[GuestHostdev, ...]]:
    """Remove devices from the text of a domain, then add others.

    Raises:
        Refusal: the domain has a part of a device, or no place for it; or libvirt would reject it.
    """
    domain = domain_of(document.root)
    known = [device.address for device in domain.hostdevs if device.address is not None]
    names = [one.lower() if is_uuid(one) else str(PciAddress.parse(one, known)) for one in removed]
    removals = plan_removals(domain, names, host, only=only)
    text = remove_hostdevs(document, removals.devices) if removals.devices else document.text
    if not units:
        return Edited(document, text, removals, Additions()), ()
    left = read_document(text, document.source)
    by_names = {unit.function_names: unit for unit in units}
    staying = domain_of(left.root)
    refuse_contradictions(staying, ((unit.function_names[0], unit.options) for unit in units))
    if host is not None:
        refuse_if_any(space_diagnostics(host, staying, units), frozenset())
    is_unassigned = not any(unit.is_seen for unit in units)
    additions = plan_additions(staying, by_names, is_unassigned=is_unassigned)
    coming = [(by_names[one.names], one.guest) for one in additions.placed]
    hostdevs = tuple(h for unit, guest in coming for h in hostdevs_of(unit, guest))
    ports = [root_port(port.index, port.device) for port in additions.ports]
    after = add_elements(left, [render.hostdev(planned) for planned in hostdevs], ports)
    return Edited(document, after, removals, additions), hostdevs


def plan_additions(
    domain: Domain, devices: Iterable[tuple[str, ...]], *, is_unassigned: bool = False
) -> Additions:
    """Choose a place for each device; a device is a tuple of functions.

    A single function gets no address: libvirt finds a port for it, or adds one. A function that the
    guest does not get (`is_unassigned`) gets none either. Several functions get a bus that nothing
    else uses: that of a free root port, or of a new one.

    Raises:
        Refusal: the domain has a part of a device, or no place for it.
    """
    placed: list[Placed] = []
    already: list[str] = []
    places = free_places(domain)
    ports: list[NewPort] = []
    for names in devices:
        there = [name for name in names if domain.hostdev(name) is not None]
        if len(there) == len(names):
            already += names
            continue
        if there:  # the place of a device is assigned at once, not function by function
            missing = ", ".join(name for name in names if name not in there)
            message = f"{domain.name} has {', '.join(there)}, but not {missing} of the same slot"
            remedy = f"pass --remove {there[0]} too, to add them as one device"
            refuse("slot-split", domain.name, message, f"{remedy}; or pass --function-only")
        if len(names) == 1 or is_unassigned:
            placed.append(Placed(names, None))
            continue
        guest, is_new = next(places, (None, False))
        if guest is None:
            refuse_full(domain, names)
        placed.append(Placed(names, guest))
        if is_new:
            ports.append(NewPort(guest.bus, names[0]))
    return Additions(tuple(placed), tuple(ports), tuple(already))


def refuse_contradictions(domain: Domain, coming: Iterable[tuple[str, AttachOptions]]) -> None:
    """Make sure that libvirt accepts the domain with the added devices.

    libvirt rejects a boot order beside `<boot dev>`, a boot order that occurs twice, and a second
    ramfb.
    """
    orders, diagnostics = set(domain.boot_orders), []
    has_ramfb = next((h.name for h in domain.hostdevs if h.ramfb), None)
    for name, options in coming:
        known = domain.hostdev(name)
        if known is not None:
            diagnostics += [disk_diagnostic(domain, known)] if known.element == "disk" else []
            continue
        order = options.boot_order
        if order is not None and domain.has_os_boot:
            diagnostics.append(
                blocker(
                    "boot-order-twice",
                    name,
                    f"cannot set a boot order for {name}: <os> of {domain.name} has <boot dev>",
                    f"remove <boot dev> in line {domain.line('os/boot')} and give the disk a "
                    "<boot order> instead; or omit --boot-order",
                )
            )
        elif order in orders:
            diagnostics.append(
                blocker(
                    "boot-order-twice",
                    name,
                    f"cannot set boot order {order} for {name}: another device of {domain.name} "
                    "has it",
                    f"pass --boot-order {max(orders) + 1}, or give the other device a later order",
                )
            )
        if options.ramfb and has_ramfb is not None:
            diagnostics.append(
                blocker(
                    "several-ramfb",
                    name,
                    f"cannot enable ramfb for {name}: {has_ramfb} of {domain.name} has it",
                    "omit --ramfb, or remove ramfb from the other device: a guest can have one",
                )
            )
        orders |= set() if order is None else {order}
    refuse_if_any(diagnostics, frozenset())


def plan_removals(
    domain: Domain, names: Iterable[str], host: HostSnapshot | None, *, only: bool
) -> Removals:
    """The named devices and, unless `only`, the other functions of their slots.

    The host shows which functions belong together. If the host does not have a function, the
    functions of its slot are those that also share a slot of the guest.

    Raises:
        Refusal: one is the controller of an NVMe disk.
    """
    gone: dict[DomainHostdev, None] = {}
    absent = []
    for name in names:
        device = domain.hostdev(name)
        if device is None:
            absent.append(name)
            continue
        gone[device] = None
        if not only:
            gone.update(dict.fromkeys(_companions(domain, device, host)))
    disks = (device for device in gone if device.element == "disk")
    refuse_if_any([disk_diagnostic(domain, device) for device in disks], frozenset())
    devices = tuple(device for device in domain.hostdevs if device in gone)
    return Removals(devices, tuple(absent), tuple(_orphans(domain, devices)))


def _companions(
    domain: Domain, device: DomainHostdev, host: HostSnapshot | None
) -> Iterator[DomainHostdev]:
    """The other functions that belong to the device and are in this domain."""
    address = device.address
    if address is None:
        return
    known = None if host is None else host.device_named(str(address))
    if known is not None and host is not None:
        names = [str(function.address) for function in host.slot(known)]
        yield from (one for name in names if (one := domain.hostdev(name)) is not None)
        return
    for other in domain.hostdevs:
        same = other.address is not None and other.address.slot == address.slot
        if same and device.guest is not None and _is_in_slot(other, device.guest):
            yield other


def _is_in_slot(device: DomainHostdev, guest: GuestAddress) -> bool:
    return device.guest is not None and device.guest.device == guest.device


def _orphans(domain: Domain, gone: Sequence[DomainHostdev]) -> Iterator[str]:
    """A guest looks for functions of a slot only where there is a function 0 (PCI 3.0, 3.2.2.3)."""
    for first in gone:
        if first.guest is None or first.guest.function:
            continue
        for other in domain.hostdevs:
            if other not in gone and _is_in_slot(other, first.guest):
                yield other.name
