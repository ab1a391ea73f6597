"""Where the guests of a host could go: live, or shut down and started there; pure.

Whether a device can migrate with its running guest depends on its driver (see
vfiomgr.libvirt.migration.devices). The memory and CPUs of guests are not in snapshots.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.fleet.placing import NOTHING, Order, Request, Reserved, Wanted, after, ordered, place
from vfiomgr.libvirt.migration.devices import Migratability, migratability_of, vgpu_migratability
from vfiomgr.pci.model import PciDevice
from vfiomgr.value import Value
from vfiomgr.vgpu.model import Vgpu, describe_type

if TYPE_CHECKING:
    from vfiomgr.fleet.model import HostSummary
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.snapshot.values import Holder
    from vfiomgr.users.model import UnknownUsers


_OTHER_DEVICES = "devices other than GPUs are not compared"


class Move(Value):
    """A guest of the host, and where it could go."""

    guest: str
    """The name of the guest, or `pod NAMESPACE/NAME`."""
    devices: tuple[str, ...]
    """The addresses or UUIDs that it has."""
    needs: tuple[str, ...]
    """`2 x 10de:2235`."""
    is_live: bool | None
    """Whether it can move while it runs, by its devices; None if unknown."""
    why: str = ""
    """What prevents a live migration, or what it depends on."""
    host: str | None = None
    """Where it fits, beside the guests before it; None if nowhere."""
    gpus: tuple[str, ...] = ()
    """The GPUs that it would get there."""
    reasons: dict[str, int] = {}  # noqa: RUF012 - msgspec copies it
    """Why other hosts do not fit, with their number."""


class _Guest(Value):
    name: str
    functions: tuple[PciDevice, ...]
    vgpus: tuple[Vgpu, ...]


def drain(
    host: HostSnapshot,
    others: Iterable[HostSummary],
    reserved: Mapping[str, Reserved],
    order: Order = "pack",
) -> tuple[Move, ...]:
    """A place for each guest, one after the other, those with most devices first."""
    left = {other.name: other for other in others}
    moves = []
    for guest in sorted(_guests(host), key=lambda g: (-len(g.functions) - len(g.vgpus), g.name)):
        request, unplaced = _request(guest)
        move = _described(host, guest, request, unplaced)
        found = [place(o, request, reserved.get(o.name, NOTHING)) for o in left.values()]
        fitting = [one for one in ordered(found, order) if one.fits]
        if fitting and not unplaced:
            best = fitting[0]
            left[best.host] = after(left[best.host], request, best)
            move = replace(move, host=best.host, gpus=best.gpus)
        reasons = Counter(one.reason or _OTHER_DEVICES for one in found if one.reason or unplaced)
        moves.append(replace(move, reasons=dict(reasons.most_common())))
    return tuple(moves)


def unknown_guests(host: HostSnapshot) -> UnknownUsers | None:
    """A source that could name a guest with a function or a vGPU, and could not be read."""
    holders: tuple[Holder, ...] = (*_functions(host), *host.vgpus.active)
    return next((each for one in holders for each in host.unknown_users_of(one)), None)


def _functions(host: HostSnapshot) -> Iterator[PciDevice]:
    for device in host.devices:
        if device.is_for_guests and str(device.address) not in host.vgpus.carriers:
            yield device


def _guests(host: HostSnapshot) -> Iterator[_Guest]:
    """The guests and pods that have functions or vGPUs; companions of a function stand with it."""
    functions: dict[str, list[PciDevice]] = {}
    vgpus: dict[str, list[Vgpu]] = {}
    for device in _functions(host):
        for name in _owners(host, device):
            functions.setdefault(name, []).append(device)
    for vgpu in host.vgpus.active:
        for name in _owners(host, vgpu):
            vgpus.setdefault(name, []).append(vgpu)
    for name in functions | vgpus:
        own = functions.get(name, [])
        yield _Guest(name, tuple(_without_companions(host, own)), tuple(vgpus.get(name, ())))


def _owners(host: HostSnapshot, holder: PciDevice | Vgpu) -> Sequence[str]:
    users = [u for u in host.holders(holder) if u.node in host.guest_nodes(holder)]
    names = [f"pod {u.pod}" if u.pod else u.guest or f"{u.command} ({u.pid})" for u in users]
    pod = host.pod_of(holder)
    return list(dict.fromkeys([*names, *([f"pod {pod}"] if pod else [])]))


def _without_companions(host: HostSnapshot, own: Sequence[PciDevice]) -> Iterator[PciDevice]:
    main = {d.address for d in own if d.is_graphics_or_accelerator}
    for device in own:
        slot = {other.address for other in host.slot(device)} - {device.address}
        if device.address in main or main.isdisjoint(slot):
            yield device


def _request(guest: _Guest) -> tuple[Request, tuple[PciDevice, ...]]:
    """What a guest needs, and the devices that summaries do not count: they are not GPUs."""
    kinds = [_type_name(vgpu) for vgpu in guest.vgpus]
    gpus = [d for d in guest.functions if d.is_graphics_or_accelerator]
    entire = [f"{d.vendor_id}:{d.device_id}" for d in gpus if d.physical_function is None]
    wanted = [Wanted("gpu", entire.count(ids), ids) for ids in dict.fromkeys(entire)]
    wanted += [Wanted("vgpu", kinds.count(kind), kind) for kind in dict.fromkeys(kinds)]
    rest = (d for d in guest.functions if d not in gpus or d.physical_function is not None)
    return Request(tuple(wanted)), tuple(rest)


def _type_name(vgpu: Vgpu) -> str:
    return describe_type(vgpu.type, vgpu.type_name).short_name or vgpu.type


def _described(
    host: HostSnapshot, guest: _Guest, request: Request, unplaced: Sequence[PciDevice]
) -> Move:
    states = {str(d.address): migratability_of(host, d) for d in guest.functions}
    states |= {vgpu.name: vgpu_migratability(host, vgpu) for vgpu in guest.vgpus}
    is_live, why = _verdict(guest.name, states)
    needs = [str(one) for one in request.wanted]
    needs += [f"{d.vendor_id}:{d.device_id} (not compared)" for d in unplaced]
    return Move(guest.name, tuple(states), tuple(needs), is_live, why)


def _verdict(name: str, states: Mapping[str, Migratability]) -> tuple[bool | None, str]:
    """Whether all devices can migrate, and the reason of the first one that cannot."""
    if name.startswith("pod "):
        return False, "pods do not migrate; they are started again elsewhere"
    for answer in (False, None):
        for device, one in states.items():
            if one.is_possible is answer or (answer is False and one.remedy):
                return answer, f"{device}: {one.reason}"
    conditions = dict.fromkeys(one.condition for one in states.values() if one.condition)
    return True, "; ".join(conditions)
