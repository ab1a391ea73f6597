"""Rules about the places of devices in the guest: functions, slots, ports, expanders."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import TYPE_CHECKING

from vfiomgr.diagnostic import Diagnostic, finding, info, problem, warning
from vfiomgr.libvirt.model import EXPANDER, ROOT_PORT, DomainHostdev, PciController
from vfiomgr.libvirt.preflight.context import addresses, place, sysfs

if TYPE_CHECKING:
    from vfiomgr.guests.model import GuestAddress
    from vfiomgr.libvirt.preflight.context import AssignedFunction, PreflightContext
    from vfiomgr.pci.model import PciDevice

_LAST_BUS = 255


def without_function_zero(context: PreflightContext) -> Iterator[Diagnostic]:
    """Software looks for functions 1 to 7 only if function 0 exists (PCI specification)."""
    for hostdev, guest in _placed(context):
        if not guest.function:
            continue
        if (guest.bus, guest.slot, 0) in context.times_taken:
            continue
        yield warning(
            "function-without-zero",
            f"the guest cannot find {hostdev.name}: its slot has no function 0",
            (context.cite(hostdev, _written(guest)),),
            "a guest looks for other functions only if function 0 responds; libvirt and QEMU do "
            "not check this",
            f"write function='0x0' in the address of line {hostdev.line}, or add the device with "
            f"function 0 (vfiomgr libvirt hostdev {hostdev.name} prints all functions of its "
            "slot)",
            subject=hostdev.name,
        )


def multifunction(context: PreflightContext) -> Iterator[Diagnostic]:
    """Libvirt sets it by default (virDomainPCIAddressReserveAddr)."""
    for hostdev, guest in _placed(context):
        if guest.function or guest.multifunction:
            continue
        if not any((guest.bus, guest.slot, n) in context.times_taken for n in range(1, 8)):
            continue
        yield info(
            "multifunction-missing",
            f"{hostdev.name} is function 0 of several, but lacks multifunction='on'",
            (context.cite(hostdev, _written(guest)),),
            "libvirt adds it; with multifunction='off' QEMU does not start",
            f"write multifunction='on' in the address of line {hostdev.line}",
            subject=hostdev.name,
        )


def same_place(context: PreflightContext) -> Iterator[Diagnostic]:
    """libvirt: "Attempted double use of PCI Address"."""
    told: set[tuple[int, int, int]] = set()
    for hostdev, guest in _placed(context):
        here, count = place(guest), context.times_taken[place(guest)]
        if here in told or count < 2:  # noqa: PLR2004 - two at one place
            continue
        told.add(here)
        others = [h for h in context.domain.hostdevs if h.guest and place(h.guest) == here]
        yield problem(
            "same-place",
            f"{count} devices are at the same address: {_written(guest)}",
            tuple(context.cite(h, _written(h.guest)) for h in others),
            "each function needs its own address",
            f"write another address in line {hostdev.line}, or omit <address type='pci'>: "
            "libvirt then chooses one",
        )


def slot_of_port(context: PreflightContext) -> Iterator[Diagnostic]:
    """A PCI Express port has one device below it (27)."""
    for hostdev, guest in _placed(context):
        if not guest.slot or not context.is_single_slot(guest.bus):
            continue
        yield problem(
            "slot-not-zero",
            f"{hostdev.name} is in slot {guest.slot} below a port, which has only slot 0",
            (context.cite(hostdev, _written(guest)), _controller(context, guest.bus)),
            "libvirt rejects the domain",
            f"write slot='0x00' in line {hostdev.line}; a second device needs a port of its own",
            subject=hostdev.name,
        )


def on_expander(context: PreflightContext) -> Iterator[Diagnostic]:
    """Only ports can be on an expander (27)."""
    for hostdev, guest in _placed(context):
        if context.model_at(guest.bus) != EXPANDER:
            continue
        yield problem(
            "device-on-expander",
            f"{hostdev.name} is placed directly on a {EXPANDER}",
            (context.cite(hostdev, _written(guest)), _controller(context, guest.bus)),
            "libvirt rejects the domain: only root ports are allowed there",
            f"add <controller type='pci' model='{ROOT_PORT}'> with <address type='pci' "
            f"bus='{guest.bus:#04x}' slot='0x00'/>, and write its index as bus in line "
            f"{hostdev.line}",
            subject=hostdev.name,
        )


def expander_node(context: PreflightContext) -> Iterator[Diagnostic]:
    """libvirt: the node must be one of <cpu><numa> (27)."""
    cells = {cell.number for cell in context.domain.cpu.cells}
    for expander in _expanders(context):
        node = expander.numa_node
        if node is None or node in cells:
            continue
        known = ", ".join(map(str, sorted(cells))) or "none"
        yield problem(
            "expander-node",
            f"an expander has NUMA node {node}, which the guest does not have",
            (f"{context.at(expander.line)}: <node>{node}</node>; guest cells: {known}",),
            "libvirt rejects the domain",
            f"add a <cell id='{node}'> to <numa> of <cpu>, or write another <node> in line "
            f"{expander.line}",
        )


def expander_buses(context: PreflightContext) -> Iterator[Diagnostic]:
    """Bus numbers of an expander start at busNr: its own, one per port, and more below.

    They are above those of pcie.0, and end at 255.
    """
    numbered = [(e.bus_nr, e) for e in _expanders(context) if e.bus_nr is not None]
    numbered.sort(key=itemgetter(0))
    for (number, expander), (following, other) in pairwise(numbered):
        needed = 1 + _below(context, expander.index)
        if number + needed <= following:
            continue
        yield _wrong_number(
            context,
            [expander, other],
            f"the expander with busNr {number} needs {needed} bus numbers, but the next expander "
            f"has busNr {following}",
            f"busNr='{number + needed}' or more",
            is_duplicate=number == following,
        )
    if not numbered:
        return
    (first, lowest), (last, highest) = numbered[0], numbered[-1]
    own, behind = _own_buses(context), 1 + _below(context, highest.index)
    if first < own:
        text = f"the guest's root has {own} buses, but the first expander has busNr {first}"
        yield _wrong_number(context, [lowest], text, f"busNr='{own}' or more")
    if last + behind > _LAST_BUS + 1:
        text = f"the expander with busNr {last} needs {behind} bus numbers, but {_LAST_BUS} is "
        fewer = f"busNr='{_LAST_BUS + 1 - behind}' or less"
        enough = f"{fewer}, and lower ones for other expanders" if numbered[1:] else fewer
        yield _wrong_number(context, [highest], f"{text}the highest", enough)


def _wrong_number(
    context: PreflightContext,
    expanders: Sequence[PciController],
    text: str,
    wanted: str,
    *,
    is_duplicate: bool = False,
) -> Diagnostic:
    """The finding about bus numbers of expanders, of which the last one must have another."""
    why = "the guest's firmware has no number for the last ports, so the guest cannot find their "
    return finding(
        "expander-buses",
        "blocker" if is_duplicate else "warning",
        text,
        tuple(f"{context.at(each.line)}: busNr='{each.bus_nr}'" for each in expanders),
        "QEMU does not start with a duplicate number" if is_duplicate else f"{why}devices",
        f"write {wanted} in line {expanders[-1].line}",
    )


def _placed(context: PreflightContext) -> Iterator[tuple[DomainHostdev, GuestAddress]]:
    for hostdev in context.domain.hostdevs:
        if hostdev.guest is not None:
            yield hostdev, hostdev.guest


def _own_buses(context: PreflightContext) -> int:
    """The buses of pcie.0: itself, and all controllers that are not behind an expander."""
    others = [c for c in context.domain.controllers if c.index and c.model != EXPANDER]
    behind = sum(_below(context, expander.index) for expander in _expanders(context))
    return 1 + len(others) - behind


def _below(context: PreflightContext, index: int, depth: int = 0) -> int:
    """The number of buses below a controller: one for each of its ports, and so on."""
    if depth > len(context.controllers):
        return 0  # controllers that go round in a circle
    below = [c for c in context.domain.controllers if c.guest and c.guest.bus == index]
    return sum(1 + _below(context, c.index, depth + 1) for c in below if c.index != index)


def _expanders(context: PreflightContext) -> list[PciController]:
    return [c for c in context.domain.controllers if c.model == EXPANDER]


def companions_left_out(context: PreflightContext) -> Iterator[Diagnostic]:
    """A GPU's audio, USB and UCSI functions, which the host cannot use alone."""
    told: set[tuple[PciDevice, ...]] = set()
    for taken in context.functions:
        device = taken.device
        whole = context.host.slot(device)
        others = [d for d in whole if d.address not in context.addresses]
        if device.physical_function or not others or whole in told:
            continue
        if not device.is_graphics_or_accelerator:
            continue
        told.add(whole)
        yield info(
            "companion-left-out",
            f"{context.guest} has {device} without the other functions of its slot",
            (context.cite(taken.hostdev), *(f"{sysfs(d)}: {d.class_name}" for d in others)),
            "the guest's driver may need them (audio over HDMI, USB-C), and the device is reset "
            "as one",
            f"{context.completion(device)}; missing: {addresses(others)}",
            subject=device,
        )


def companions_apart(context: PreflightContext) -> Iterator[Diagnostic]:
    """Functions of one device that are several devices in the guest."""
    for slot in _slots(context):
        places = {(t.hostdev.guest.bus, t.hostdev.guest.slot) for t in slot if t.hostdev.guest}
        unplaced = sum(t.hostdev.guest is None for t in slot)
        has_gpu = any(taken.device.is_graphics_or_accelerator for taken in slot)
        if len(places) + unplaced < 2 or not has_gpu:  # noqa: PLR2004 - several places
            continue
        yield info(
            "companions-apart",
            f"the functions of {slot[0].device} are {len(places) + unplaced} separate devices in "
            "the guest",
            tuple(context.cite(t.hostdev, _written(t.hostdev.guest)) for t in slot),
            "some drivers look for the other functions beside function 0, as on the host",
            context.completion(slot[0].device),
        )


def _slots(context: PreflightContext) -> list[list[AssignedFunction]]:
    """The functions of each device of the host from which the domain has several."""
    found: dict[tuple[PciDevice, ...], list[AssignedFunction]] = defaultdict(list)
    for taken in context.seen:
        if taken.device.physical_function is None:
            found[context.host.slot(taken.device)].append(taken)
    return [sorted(slot, key=lambda t: t.device.address) for slot in found.values() if slot[1:]]


def no_spare_port(context: PreflightContext) -> Iterator[Diagnostic]:
    """A port takes one device; libvirt adds ports itself, except for hot-plug."""
    ports = [c for c in context.domain.controllers if c.model == ROOT_PORT and c.has_hotplug]
    if not ports:
        return
    used = {address.bus for address in context.domain.taken}
    free = [port for port in ports if port.index not in used]
    if len(free) > context.domain.unplaced:
        return
    yield info(
        "no-free-port",
        f"no free root port: no device can be attached while {context.guest} runs",
        tuple(f"{context.at(p.line)}: root port {p.index}" for p in ports[-1:]),
        context.fix(
            'libvirt cannot add a port to a running domain ("No more available PCI slots")',
            "QEMU cannot add a port to a running guest",
        ),
        context.fix(
            f"add <controller type='pci' model='{ROOT_PORT}'/> once for each device to attach "
            "later",
            "pass --spare-ports N, with a port for each device to attach later",
        ),
    )


def _written(guest: GuestAddress | None) -> str:
    if guest is None:
        return "without an address"
    return f"guest address bus {guest.bus:#04x} slot {guest.slot:#04x} function {guest.function:#x}"


def _controller(context: PreflightContext, bus: int) -> str:
    controller = context.controllers[bus]
    return f"{context.at(controller.line)}: controller {bus} is a {controller.model}"
