"""The links and PCIe errors of the devices that guests have, and what was read of them before.

A link is compared with what both of its ends support: PCIe 6.0, 4.2.7, negotiates the highest speed
and width that they share. A link keeps its width; GPUs lower the speed of theirs while they are
idle, as their drivers in guests decide, so one reading shows nothing about it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from vfiomgr.documents.jsonable import from_jsonable, to_jsonable
from vfiomgr.documents.text import parse_json
from vfiomgr.errors import HostError, VfiomgrError
from vfiomgr.host.owners import NotARecord, read_own
from vfiomgr.paths import RUNTIME
from vfiomgr.pci.capabilities import PciLink, read_links
from vfiomgr.pci.error_counters import HealthFacts, read_error_kinds
from vfiomgr.pci.model import PciAddress, PciDevice, is_address
from vfiomgr.users.laptop import is_gpu_off
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree
    from vfiomgr.snapshot.model import HostSnapshot

RECORD = RUNTIME / "health.json"
"""What processes that run regularly have read in this boot."""
_LIMIT = 1 << 20
INTERVAL = 60.0
"""Seconds between two readings of which the difference is a rate."""
MOST_PER_MINUTE, QUIET_PER_MINUTE = 8.0, 1.0
"""Corrected errors per minute from which on a link is faulty, and below which it no longer is.

NVIDIA allows 8 replays per minute (DCGM_LIMIT_MAX_PCIREPLAY_RATE of DCGM).
"""


LANE_SAVERS = frozenset({"amdgpu", "radeon"})
"""Drivers that turn off lanes to save power (r600_set_pcie_lanes of radeon, the PCIe levels of
amdgpu)."""


class WorseLink(Value):
    """A link that has been worse than both ends support in each reading since a moment."""

    port: PciAddress
    """The port above it."""
    width: int | None
    """Lanes in use."""
    speed: float | None
    """The highest one of these readings."""
    seconds: float
    """The first such reading, in seconds since boot."""
    readings: int = 1
    """How many there were, each at least `INTERVAL` after the one before."""
    last: float = 0.0
    """The last one that was counted, in seconds since boot."""


class HealthRecord(Value):
    """What regular readings of a boot found."""

    boot_id: str
    """The boot of the kernel."""
    readings: tuple[HealthFacts, ...] = ()
    """The last two that are at least `INTERVAL` apart, the older one first."""
    links: tuple[WorseLink, ...] = ()
    """The links that were worse than both ends support."""
    known: tuple[PciAddress, ...] = ()
    """The functions for guests of any reading."""
    flooded: tuple[PciAddress, ...] = ()
    """The functions with too many corrected errors at the last reading."""


_OF_CARDS = {("1022", "1470"), ("1022", "1471")}
"""Switches of graphics cards with another vendor's ID: Vega 10 PCIe Bridge (pci.ids)."""


class Rise(Value):
    """The number of errors in a time; that since boot if there is no earlier reading."""

    count: int
    seconds: float
    is_since_boot: bool = False

    @property
    def per_minute(self) -> float:
        """The mean; 0 if the time is unknown, or too short for one."""
        return self.count * 60 / self.seconds if self.seconds >= INTERVAL else 0.0


class DeviceHealth(Value, dict=True):
    """The error counters of physical functions, ports among them."""

    now: HealthFacts
    """The counters as they were read."""
    before: HealthRecord | None = None
    """What regular readings of this boot found; None without any."""
    is_gpu_off: bool = False
    """Whether the firmware of a laptop turned its discrete GPU off; read if a device is gone."""

    @cached_property
    def base(self) -> HealthFacts | None:
        """The last earlier reading that is long enough ago."""
        earlier = self.before.readings if self.before is not None else ()
        old = (one for one in reversed(earlier) if self.now.seconds - one.seconds >= INTERVAL)
        return next(old, None)

    def rise(self, address: PciAddress, kind: str = "correctable") -> Rise | None:
        """The errors of a kind since the last reading; None for a function without counters.

        The counters of a function that was added again begin with 0.
        """
        count: int | None = getattr(self.now.of(address), kind, None)
        if count is None:
            return None
        if self.base is None:
            return Rise(count, self.now.seconds, is_since_boot=True)
        past: int | None = getattr(self.base.of(address), kind, None)
        new = count if past is None or past > count else count - past
        return Rise(new, self.now.seconds - self.base.seconds)

    def is_flooded(self, address: PciAddress, kind: str = "correctable") -> bool:
        """Whether a function has too many errors, or had and still is not quiet."""
        found = self.rise(address, kind)
        was = self.before is not None and address in self.before.flooded
        limit = QUIET_PER_MINUTE if was else MOST_PER_MINUTE
        return found is not None and found.per_minute >= limit

    def noted(self) -> HealthRecord:
        """The record with the present errors."""
        record = self.before or HealthRecord("")
        readings = record.readings
        if not readings or self.now.seconds - readings[-1].seconds >= INTERVAL:
            readings = (*readings[-1:], self.now)
        flooded = (each.address for each in self.now.functions if self.is_flooded(each.address))
        return replace(record, readings=readings, flooded=tuple(flooded))

    def worse_link(self, port: PciAddress) -> WorseLink | None:
        """What regular readings found about the link below a port."""
        known = self.before.links if self.before is not None else ()
        return next((link for link in known if link.port == port), None)


class Hop(Value):
    """A link on the way to a device, between a port and the function below it."""

    device: PciDevice
    port: PciDevice
    below: PciDevice
    ends: tuple[PciLink, PciLink]
    """The link as the port and as the function below it show it."""
    is_of_gpu: bool
    """Whether the lower end is a GPU or a switch of its card, and lowers the speed when idle."""
    width: int | None
    """Lanes in use, as either end shows them."""
    best_width: int | None
    """Lanes that both ends support."""
    speed: float | None
    """GT/s now."""
    best_speed: float | None

    @property
    def is_narrow(self) -> bool:
        """Whether it has fewer lanes than both ends support.

        Not while a driver of the host may have turned off lanes.
        """
        return self.below.driver not in LANE_SAVERS and _is_less(self.width, self.best_width)

    @property
    def is_slow(self) -> bool:
        """Whether it is slower than both ends support."""
        return _is_less(self.speed, self.best_speed)


def _is_less(now: float | None, best: float | None) -> bool:
    return now is not None and best is not None and now < best


def _hop(device: PciDevice, port: PciDevice, below: PciDevice, *ends: PciLink, own: bool) -> Hop:
    widths, speeds = [e.width for e in ends if e.width], [e.speed for e in ends if e.speed]
    most, fastest = [e.max_width for e in ends], [e.max_speed for e in ends]
    return Hop(
        *(device, port, below, (ends[0], ends[1]), own),
        min(widths, default=None),
        None if None in most else min(filter(None, most)),
        min(speeds, default=None),
        None if None in fastest else min(filter(None, fastest)),
    )


def path_to(host: HostSnapshot, device: PciDevice) -> list[PciDevice]:
    """The bridges above a device, the uppermost first, and itself."""
    above = map(host.device_named, filter(is_address, device.bridges))
    return [*(bridge for bridge in above if bridge is not None), device]


def hops(host: HostSnapshot, device: PciDevice) -> Iterator[Hop]:
    """The links on the way to a device of which both ends are awake, the lowest first.

    A switch has a port that leads up above each port that leads down, and no link between them.
    """
    way = [*path_to(host, device)][::-1]
    is_gpu = any(one.is_graphics_or_accelerator for one in host.slot(device))
    for below, port in zip(way[::2], way[1::2], strict=False):
        of_port, of_below = host.link_of(port.address), host.link_of(below.address)
        if of_port is not None and of_below is not None:
            ids = below.vendor_id, below.device_id
            is_own = below.vendor_id == device.vendor_id or ids in _OF_CARDS
            yield _hop(device, port, below, of_port, of_below, own=is_gpu and is_own)


def carriers(host: HostSnapshot, devices: Iterable[PciDevice] | None = None) -> list[PciDevice]:
    """The physical functions with the links of devices for guests, one of each slot: its GPU.

    Without `devices` these are all functions for guests and those with vGPUs.
    """
    if devices is None:
        vgpus = host.vgpus.carriers
        devices = (d for d in host.devices if d.is_for_guests or str(d.address) in vgpus)
    found: dict[tuple[int, int, int], PciDevice] = {}
    for device in devices:
        physical = host.device_named(str(device.physical_function or "")) or device
        known = found.setdefault(physical.address.slot, physical)
        if physical.is_graphics_or_accelerator and not known.is_graphics_or_accelerator:
            found[physical.address.slot] = physical
    return list(found.values())


def read_health(tree: HostTree, host: HostSnapshot) -> DeviceHealth:
    """Read the counters and the record of this boot; no device is woken."""
    watched = (device.address for device in host.devices if device.physical_function is None)
    record = _read_record(tree)
    is_of_boot = record is not None and record.boot_id == host.kernel.boot_id
    found = DeviceHealth(read_error_kinds(tree, watched), record if is_of_boot else None)
    return replace(found, is_gpu_off=is_gpu_off(tree)) if missing(host, found) else found


def missing(host: HostSnapshot, health: DeviceHealth | None) -> set[PciAddress]:
    """The functions that vfiomgr bound or regular readings saw in this boot, and that are gone."""
    bound = (o.device.address for o in host.origins if o.boot_id == host.kernel.boot_id)
    record = None if health is None else health.before
    return {*bound, *(() if record is None else record.known)} - {d.address for d in host.devices}


def _read_record(tree: HostTree) -> HealthRecord | None:
    """The record; None if there is none, or if it is not one of this version of vfiomgr."""
    try:
        return from_jsonable(HealthRecord, parse_json(read_own(tree, RECORD, _LIMIT).decode()))
    except (OSError, NotARecord, ValueError, VfiomgrError, RecursionError):
        return None


def noted(host: HostSnapshot) -> HealthRecord:
    """The record with the present reading; the links of functions that sleep stay as they were."""
    health = host.health or DeviceHealth(HealthFacts())
    record = health.noted()
    seen = {hop.port.address: hop for device in carriers(host) for hop in hops(host, device)}
    links = [link for link in record.links if link.port not in seen]
    for port, hop in seen.items():
        known = health.worse_link(port)
        if not (hop.is_narrow or hop.is_slow):
            continue
        if known is None or known.width != hop.width:
            now = health.now.seconds
            links.append(WorseLink(port, hop.width, hop.speed, now, last=now))
        else:
            links.append(_read_again(known, hop, health.now.seconds))
    own = (each.address for device in carriers(host) for each in host.slot(device))
    return replace(
        record,
        boot_id=host.kernel.boot_id or "",
        links=tuple(links),
        known=tuple(sorted({*record.known, *own})),
    )


def _read_again(known: WorseLink, hop: Hop, now: float) -> WorseLink:
    speed = max(filter(None, (known.speed, hop.speed)), default=None)
    if now - known.last < INTERVAL:
        return replace(known, speed=speed)
    return replace(known, speed=speed, readings=known.readings + 1, last=now)


def keep_health(tree: HostTree, host: HostSnapshot) -> None:
    """Read links and counters, and write the record with them, for later checks of this boot.

    Raises:
        HostError: the record cannot be written.
    """
    now = replace(host, links=read_links(tree, host.devices), health=read_health(tree, host))
    data = msgspec.json.format(msgspec.json.encode(to_jsonable(noted(now)))) + b"\n"
    try:
        tree.make_directory(RUNTIME)
        tree.replace(RECORD, data, durable=False)
    except OSError as error:
        message = f"cannot write {RECORD}: {error.strerror}"
        raise HostError(message, "run the command as root, e.g. with sudo") from error
