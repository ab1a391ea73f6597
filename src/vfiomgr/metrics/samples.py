"""The samples of a host. A value that is unknown has no sample, since a number would be wrong."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar, get_args

from vfiomgr import __version__
from vfiomgr.pci.model import PciDevice, is_address
from vfiomgr.snapshot.health import LANE_SAVERS
from vfiomgr.snapshot.values import DeviceState, Holder
from vfiomgr.vgpu.capacity import Gpu, gpus, rooms

if TYPE_CHECKING:
    from vfiomgr.metrics.model import CheckFacts, KnownDevice, Sample
    from vfiomgr.pci.capabilities import PciLink
    from vfiomgr.pci.error_counters import HealthFacts
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.vgpu.model import Vgpu

_TRANSFERS = 1_000_000_000
"""Transfers per second in a GT/s."""
_Number = TypeVar("_Number", int, float)
_OF_USERS = frozenset({"vfio", "in-use"})
"""The states that only the users of a device tell apart."""


def measured_devices(host: HostSnapshot) -> list[PciDevice]:
    """Graphics cards, accelerators, and what VFIO drivers have; no VFs that carry vGPUs."""
    return [
        device
        for device in host.devices
        if device.is_on_vfio
        or (device.is_graphics_or_accelerator and device.physical_function is None)
    ]


def check_samples(host: HostSnapshot, facts: CheckFacts) -> Iterator[Sample]:
    """All samples of a host with its checks."""
    yield "vfiomgr_build", 1, {"version": __version__}
    devices = measured_devices(host)
    yield from device_samples(host, devices, facts.errors)
    yield from _port_errors(host, devices, facts.errors)
    yield from group_samples(host, (d.iommu_group for d in devices if d.is_on_vfio))
    yield from vgpu_samples(host)
    yield from _missing(host, facts.known_devices or ())
    problems = (one for one in facts.report.findings if one.severity != "ok")
    found = collections.Counter((one.rule, one.severity) for one in problems)
    for (rule, severity), number in sorted(found.items()):
        yield "vfiomgr_findings", number, {"rule": rule, "severity": severity}
    yield "vfiomgr_facts_unknown", len(facts.report.unknown), {}
    if facts.layout is not None:
        labels = {"layout": facts.layout.name}
        yield "vfiomgr_layout_differences", facts.layout.differences, labels
    for unit in facts.units or ():
        labels = {"unit": unit.unit, "result": unit.result}
        yield "vfiomgr_unit_failed", unit.has_failed, labels


def device_samples(
    host: HostSnapshot, devices: list[PciDevice], errors: HealthFacts
) -> Iterator[Sample]:
    """The samples of some functions."""
    yield from _states(host, devices)
    yield from map(_info, devices)
    yield from _assigned(host, devices)
    for device in devices:
        yield from _errors(device, errors)
    yield from _links(host, devices)


def _states(host: HostSnapshot, devices: list[PciDevice]) -> Iterator[Sample]:
    """How many devices of each model are in each state, those that none is in too."""
    known = set(get_args(DeviceState))
    if not all(host.knows_users_of(device) for device in devices if device.is_on_vfio):
        known -= _OF_USERS
    counted = collections.Counter((each.short_name, host.state_of(each)) for each in devices)
    for model in dict.fromkeys(device.short_name for device in devices):
        for state in sorted(known):
            labels = {"model": model, "state": state}
            yield "vfiomgr_devices", counted[model, state], labels


def _info(device: PciDevice) -> Sample:
    group, node = device.iommu_group, device.numa_node
    labels = {
        "address": str(device.address),
        "vendor": device.vendor_id,
        "device": device.device_id,
        "model": device.short_name,
        "driver": device.driver or "",
        "iommu_group": "" if group is None else str(group),
        "numa_node": "" if node is None else str(node),
    }
    return "vfiomgr_device", 1, labels


def _assigned(host: HostSnapshot, devices: Iterable[PciDevice]) -> Iterator[Sample]:
    """The guests of functions, and of the vGPUs of these functions."""
    if host.users.processes is None:
        return
    holders: dict[str, Holder] = {str(device.address): device for device in devices}
    holders |= {
        vgpu.name: vgpu
        for vgpu in host.vgpus.active
        if vgpu.name in holders or _physical(host, vgpu) in holders
    }
    for name, holder in holders.items():
        users = host.users.of_nodes(host.guest_nodes(holder))
        guests = dict.fromkeys(one.guest or one.pod or one.command for one in users)
        free = [""] if host.knows_users_of(holder) else []
        for guest in guests or free:
            yield "vfiomgr_device_assigned", bool(guests), {"address": name, "guest": guest}


def _physical(host: HostSnapshot, vgpu: Vgpu) -> str:
    """The function that a vGPU is part of: its parent, or the physical function of that."""
    parent = host.device_named(vgpu.parent)
    if parent is None or parent.physical_function is None:
        return vgpu.parent
    return str(parent.physical_function)


def _errors(device: PciDevice, errors: HealthFacts) -> Iterator[Sample]:
    found = errors.of(device.address)
    for severity in ("correctable", "nonfatal", "fatal"):
        number = getattr(found, severity, None)
        if number is not None:
            labels = {"address": str(device.address), "severity": severity}
            yield "vfiomgr_aer_errors", number, labels


def _port_errors(
    host: HostSnapshot, devices: Iterable[PciDevice], errors: HealthFacts
) -> Iterator[Sample]:
    """The errors of the ports above functions, which notice those of the links between them."""
    above = dict.fromkeys(name for d in devices for name in d.bridges if is_address(name))
    for port in map(host.device_named, above):
        if port is not None:
            yield from _errors(port, errors)


def _links(host: HostSnapshot, devices: Iterable[PciDevice]) -> Iterator[Sample]:
    links = {str(link.address): link for link in host.links or ()}
    for device in devices:
        link, address = links.get(str(device.address)), str(device.address)
        if link is None:
            continue
        port = links.get(device.bridges[-1])
        for bound, width, speed in (
            ("current", link.width, link.speed),
            ("maximum", link.max_width, link.max_speed),
            ("possible", *(_possible(link, port) if device.driver not in LANE_SAVERS else _NONE)),
        ):
            labels = {"address": address, "bound": bound}
            if width is not None:
                yield "vfiomgr_link_lanes", width, labels
            if speed is not None:
                yield "vfiomgr_link_transfers_per_second", speed * _TRANSFERS, labels


_NONE = (None, None)


def _possible(link: PciLink, port: PciLink | None) -> tuple[int | None, float | None]:
    """The width and speed that both ends of a link can have; None if one end is unknown."""
    if port is None:
        return None, None
    return _least(link.max_width, port.max_width), _least(link.max_speed, port.max_speed)


def _least(one: _Number | None, other: _Number | None) -> _Number | None:
    return None if one is None or other is None else min(one, other)


def group_samples(host: HostSnapshot, numbers: Iterable[int | None]) -> Iterator[Sample]:
    """Whether groups can be assigned."""
    for number in sorted({number for number in numbers if number is not None}):
        if host.group(number) is not None:
            yield "vfiomgr_group_viable", host.is_viable(number), {"iommu_group": str(number)}


def vgpu_samples(host: HostSnapshot) -> Iterator[Sample]:
    """The vGPUs of each GPU by type, and how many more can be created, if that is known."""
    for gpu in gpus(host):
        active = collections.Counter(_type_of(gpu, vgpu) for vgpu in gpu.instances)
        free = {room.type.name or room.type.id: room.more for room in rooms(gpu) if room.is_certain}
        for state, found in (("active", active), ("available", free)):
            for name, number in sorted(found.items()):
                yield "vfiomgr_vgpus", number, {"parent": gpu.name, "type": name, "state": state}


def _type_of(gpu: Gpu, vgpu: Vgpu) -> str:
    known = (kind.name for kind in gpu.types if kind.id == vgpu.type)
    return vgpu.type_name or next(filter(None, known), vgpu.type)


def _missing(host: HostSnapshot, known: Iterable[KnownDevice]) -> Iterator[Sample]:
    """Whether the devices of earlier runs are there, unless functions cannot be listed or read."""
    for one in known if host.pci_unlisted is None else ():
        address = str(one.address)
        if address in host.pci_unidentified:
            continue
        found = host.device_named(address)
        is_there = found is not None and (found.vendor_id, found.device_id) == (
            one.vendor_id,
            one.device_id,
        )
        yield "vfiomgr_device_missing", not is_there, {"address": address, "model": one.model}
