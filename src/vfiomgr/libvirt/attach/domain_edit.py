"""Which devices come into a domain that is there, where they sit, and which go."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from vfiomgr.diagnostic import blocker, refusal, refuse_if_any
from vfiomgr.libvirt.attach.claims import disk_diagnostic, free_places, refuse_full
from vfiomgr.libvirt.hostdev import DomainHostdev, GuestAddress
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from vfiomgr.libvirt.model import Domain
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.vgpu.guest_device import HostdevOptions


class NewPort(Value):
    """A root port that a domain lacks, and the device that it is for."""

    index: int
    device: str


class Placed(Value):
    """A device of a guest, by the names of its functions, and where the first of them goes."""

    names: tuple[str, ...]
    guest: GuestAddress | None
    """None where libvirt is to find a place."""


class Additions(Value):
    """What comes into a domain."""

    placed: tuple[Placed, ...] = ()
    ports: tuple[NewPort, ...] = ()
    already: tuple[str, ...] = ()
    """Devices that it has."""


class Removals(Value):
    """What goes out of a domain."""

    devices: tuple[DomainHostdev, ...] = ()
    absent: tuple[str, ...] = ()
    """Devices that it has not."""
    orphans: tuple[str, ...] = ()
    """Functions that stay, and that the guest cannot find without those that go."""


def plan_additions(
    domain: Domain, devices: Iterable[tuple[str, ...]], *, is_unassigned: bool = False
) -> Additions:
    """Places for devices, each a tuple of functions that become one device of the guest.

    A function that goes alone gets no address: libvirt finds a port for it, or adds one. None has
    what the guest is not to have (`is_unassigned`). Several get a bus that nothing else says it is
    on: that of a free root port, else of a new one.

    Raises:
        Refusal: a device is there in part, or there is no place.

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
        if there:
            _refuse_part(domain, names, there)
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


def refuse_contradictions(domain: Domain, coming: Iterable[tuple[str, HostdevOptions]]) -> None:
    """Make sure that libvirt takes the domain with devices that come, as they are handed over.

    It rejects an order of booting beside `<boot dev>`, the same order twice, and a second ramfb.

    Raises:
        Refusal: it would not.

    """
    orders, diagnostics = set(domain.boot_orders), []
    has_ramfb = next((h.name for h in domain.hostdevs if h.ramfb), None)
    for name, hostdev_options in coming:
        known = domain.hostdev(name)
        if known is not None:
            diagnostics += [disk_diagnostic(domain, known)] if known.element == "disk" else []
            continue
        order = hostdev_options.boot_order
        if order is not None and domain.has_os_boot:
            diagnostics.append(
                blocker(
                    "boot-order-twice",
                    name,
                    f"{name} is to have a boot order, and <os> of {domain.name} has <boot dev>",
                    f"take <boot dev> out of line {domain.line('os/boot')}, and give the disk a "
                    "<boot order> too; or leave out --boot-order",
                )
            )
        elif order in orders:
            diagnostics.append(
                blocker(
                    "boot-order-twice",
                    name,
                    f"{name} is to have the boot order {order}, which another device of "
                    f"{domain.name} has",
                    f"pass --boot-order {max(orders) + 1}, or give the other one a later order",
                )
            )
        if hostdev_options.ramfb and has_ramfb is not None:
            diagnostics.append(
                blocker(
                    "several-ramfb",
                    name,
                    f"{name} is to have ramfb, which {has_ramfb} of {domain.name} has",
                    "leave out --ramfb, or take it from the other one: a guest has one of its kind",
                )
            )
        orders |= set() if order is None else {order}
    refuse_if_any(diagnostics, frozenset())


def plan_removals(
    domain: Domain, names: Iterable[str], host: HostSnapshot | None, *, only: bool
) -> Removals:
    """The named devices with the other functions of their slots, unless `only`.

    Which functions belong together the host tells; of one that it does not have, the domain: those
    of one slot that are in one slot of the guest, too.

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


def _refuse_part(domain: Domain, names: Sequence[str], there: Sequence[str]) -> NoReturn:
    """Functions of one device cannot come one after the other: their place is given at once."""
    missing = ", ".join(name for name in names if name not in there)
    message = f"{domain.name} has {', '.join(there)}, and not {missing} of the same slot"
    remedy = f"pass --remove {there[0]} too, to add them as one device, or --function-only"
    raise refusal([blocker("slot-split", domain.name, message, remedy)])


def _companions(
    domain: Domain, device: DomainHostdev, host: HostSnapshot | None
) -> Iterator[DomainHostdev]:
    """Those that go to a guest with it, and are in this domain."""
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
