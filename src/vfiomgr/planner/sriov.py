"""SR-IOV: how many virtual functions a physical one has."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from vfiomgr.model.origin import DriverState
from vfiomgr.model.plan import Plan
from vfiomgr.model.step import ChangeDriver, ForgetOrigin, SetAutoprobe, SetVfCount
from vfiomgr.planner import guards
from vfiomgr.planner.guards import Objection
from vfiomgr.planner.locks import device_lock

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.model.intent import SetVirtualFunctions
    from vfiomgr.model.pci import PciDevice
    from vfiomgr.model.snapshot import HostSnapshot
    from vfiomgr.model.step import Step

_CLASS_NETWORK = "02"
_TOOL_DRIVERS = {"nvidia": "/usr/lib/nvidia/sriov-manage"}
"""Drivers whose virtual functions a program of the vendor makes, since it also sets them up."""


def plan_set(host: HostSnapshot, intent: SetVirtualFunctions) -> Plan:
    """Have a number of virtual functions: those that exist are removed before others are made.

    Raises:
        Refusal: a guard forbids it.
        UnknownDevice: the address names nothing.

    """
    device = host.device(intent.address)
    present = _virtual_functions(host, device)
    locks = tuple(sorted({device_lock(device), *map(device_lock, present)}))
    summary = f"set the virtual functions of {device.address} to {intent.count}"
    guards.refuse_if_any(_impossible(device, intent.count), frozenset())
    if device.sriov_numvfs == intent.count:
        already = (
            f"{device} has {intent.count} of {device.sriov_totalvfs} virtual functions already"
        )
        return Plan(summary, tuple(_changes(device, intent)), locks, already=(already,))
    guards.refuse_if_any(
        [
            *guards.stuck(host, device),
            *_no_maker(device, intent.count),
            *(o for vf in present for o in _in_use(host, vf)),
        ],
        frozenset(),
    )
    return Plan(
        summary,
        (*_departures(host, present), *_changes(device, intent)),
        locks,
        notes=tuple(_notes(device, intent)),
    )


def settled(host: HostSnapshot, intent: SetVirtualFunctions) -> SetVirtualFunctions:
    """The intent with what it must restore, so that it can be finished after a crash."""
    if intent.autoprobe_after is not None:
        return intent
    found = host.device(intent.address).sriov_drivers_autoprobe
    return replace(intent, autoprobe_after=found)


def _virtual_functions(host: HostSnapshot, device: PciDevice) -> list[PciDevice]:
    return [d for d in host.devices if d.address in device.virtual_functions]


def _departures(host: HostSnapshot, present: list[PciDevice]) -> Iterator[Step]:
    """Each function leaves its driver by itself, so that a roll-back gives it back to that one."""
    for device in present:
        if device.driver is not None:
            before = DriverState(device.driver, device.driver_override, device.power_control)
            after = DriverState(None, device.driver_override)
            yield ChangeDriver(device.identity, before, after)
        origin = host.origin(device)
        if origin is not None:
            yield ForgetOrigin(origin)


def _changes(device: PciDevice, intent: SetVirtualFunctions) -> Iterator[Step]:
    """The numbers, and autoprobe as each of them wants it.

    It is off also while functions are removed: a roll-back makes them again, and no host driver
    shall take those that had none.
    """
    identity, present = device.identity, device.sriov_numvfs or 0
    autoprobe = device.sriov_drivers_autoprobe
    restored = autoprobe if intent.autoprobe_after is None else intent.autoprobe_after
    changes = present != intent.count
    numbers = [(present, 0, False)] if changes and present else []
    numbers += [(0, intent.count, intent.autoprobe)] if changes and intent.count else []
    for before, after, wanted in numbers:
        if autoprobe is not None and autoprobe is not wanted:
            yield SetAutoprobe(identity, before=autoprobe, after=wanted)
            autoprobe = wanted
        yield SetVfCount(identity, before=before, after=after)
    if autoprobe is not None and restored is not None and autoprobe is not restored:
        yield SetAutoprobe(identity, before=autoprobe, after=restored)


def _impossible(device: PciDevice, count: int) -> Iterator[Objection]:
    """What no state of the host would change."""
    if device.physical_function is not None:
        yield Objection(
            f"{device} is a virtual function itself",
            f"name its physical function: vfiomgr sriov set {device.physical_function} {count}",
        )
    elif not device.sriov_totalvfs:
        yield Objection(
            f"{device} makes no virtual functions: it has no SR-IOV, or it is switched off",
            "vfiomgr sriov list shows which do; switch SR-IOV on in the firmware setup, or in the "
            "device's own firmware with the vendor's tool",
        )
    elif count > device.sriov_totalvfs:
        yield Objection(
            f"{device} makes at most {device.sriov_totalvfs} virtual functions, not {count}",
            "ask for fewer; the device's own firmware settings may raise the limit",
        )


def _no_maker(device: PciDevice, count: int) -> Iterator[Objection]:
    """The driver of the physical function makes the virtual ones (sriov_configure)."""
    if device.driver is None:
        yield Objection(
            f"{device} has no driver, and it takes one to make virtual functions",
            "load its host driver with modprobe, or give the function back with vfiomgr unbind",
        )
    elif device.is_on_vfio:
        yield Objection(
            f"{device} is on {device.driver}, which makes no virtual functions (ENOENT)",
            f"give it back first: vfiomgr unbind {device.address}",
        )
    elif device.driver in _TOOL_DRIVERS:
        option = "-e" if count else "-d"
        yield Objection(
            f"{device} is on {device.driver}, which sets its virtual functions up in its own way",
            f"run {_TOOL_DRIVERS[device.driver]} {option} {device.address}",
        )


def _in_use(host: HostSnapshot, device: PciDevice) -> Iterator[Objection]:
    """All virtual functions go when their number changes."""
    yield from guards.stuck(host, device)
    yield from guards.carries_vgpus(host, device)
    for guard in (guards.held_by_guest, guards.open_nodes, guards.host_use):
        for objection in guard(host, device):
            remedy = "take it out of use first: all virtual functions go when their number changes"
            yield replace(objection, remedy=remedy, allowance=None)


def _notes(device: PciDevice, intent: SetVirtualFunctions) -> Iterator[str]:
    if device.sriov_numvfs and device.class_code.startswith(_CLASS_NETWORK):
        yield "MAC addresses, VLANs and trust of the present virtual functions are lost"
    if not intent.count:
        return
    if device.sriov_drivers_autoprobe is None:
        yield "this kernel has no sriov_drivers_autoprobe: host drivers may take the new functions"
    elif not device.sriov_drivers_autoprobe and not intent.autoprobe:
        yield f"sriov_drivers_autoprobe of {device.address} is 0, and stays so"
