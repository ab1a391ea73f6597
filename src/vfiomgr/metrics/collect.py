"""Reads a host for its metrics, without waking a device, and remembers its devices."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.check import check
from vfiomgr.engine.locks import hold
from vfiomgr.errors import HostError, VfiomgrError
from vfiomgr.metrics.facts import (
    known_devices,
    parse_known_devices,
    read_units,
    render_known_devices,
)
from vfiomgr.metrics.model import DEVICES, CheckFacts, KnownDevice
from vfiomgr.metrics.samples import measured_devices
from vfiomgr.metrics.timer import LOCK
from vfiomgr.pci.capabilities import SLEEPING
from vfiomgr.pci.error_counters import read_health
from vfiomgr.pci.model import PciAddress, PciDevice, is_address
from vfiomgr.persistence.facts import read_named
from vfiomgr.persistence.installed_layout import FILE, RECORD, parse_record
from vfiomgr.persistence.steps import ChangeFiles, FileChange
from vfiomgr.snapshot.health import keep_health
from vfiomgr.vgpu.reader import with_gpu_modes

if TYPE_CHECKING:
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.snapshot.source import HostSource
    from vfiomgr.snapshot.values import Holder


def collect(source: HostSource) -> tuple[HostSnapshot, CheckFacts]:
    """The facts of a host; sleeping devices are left alone.

    Therefore users of devices are only looked for among processes, and nvidia-smi is not run while
    a GPU of its driver sleeps.
    """
    is_live = source.snapshot is None
    files = read_named(source.files, (FILE, RECORD)) if is_live else source.scan().files
    layout, text = parse_record(files.text(RECORD)), files.text(FILE)
    host = source.scan(with_readiness=True, with_health=True, with_resets=layout is not None)
    facts, may_ask = CheckFacts(check(host)), not any(map(_is_nvidia_asleep, host.devices))
    if is_live:
        devices = measured_devices(host)
        holders: tuple[Holder, ...] = (*devices, *host.vgpus.active)
        host = source.with_holders(host, {n for one in holders for n in host.guest_nodes(one)})
        if host.vgpus.parents and may_ask:
            host = with_gpu_modes(host, source.tree)
        ports = {PciAddress.parse(name) for d in devices for name in d.bridges if is_address(name)}
        facts = replace(
            facts,
            errors=read_health(source.tree, (*(d.address for d in devices), *sorted(ports))),
            known_devices=_known(source),
            units=read_units(source.tree),
        )
    if layout is None or text is None:
        return host, facts
    drift = import_module("vfiomgr.metrics.drift")  # slow, by pydantic
    has_modes = may_ask or not is_live
    state = drift.layout_state(source, host, layout.name, text, has_modes=has_modes)
    return host, replace(facts, layout=state)


def _is_nvidia_asleep(device: PciDevice) -> bool:
    """Whether nvidia-smi would wake a function."""
    return device.driver == "nvidia" and device.runtime_status == SLEEPING


def _known(source: HostSource) -> tuple[KnownDevice, ...] | None:
    try:
        return parse_known_devices(source.files.read_text(DEVICES))
    except VfiomgrError as error:
        source.on_note(f"missing devices are unknown: {error.message}; {error.hint}")
        return None


def remember(source: HostSource, host: HostSnapshot, facts: CheckFacts) -> None:
    """Add new devices of this host to its record; those that are missing stay in it.

    Links and errors of devices are recorded too, for later checks. An error is a note: it changes
    no metric.
    """
    try:
        if facts.known_devices is not None:
            _remember_devices(source, host)
    except (OSError, VfiomgrError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        source.on_note(f"cannot update {DEVICES}: {why}")
    try:
        keep_health(source.files, host)
    except HostError as error:
        source.on_note(error.message)


def _remember_devices(source: HostSource, host: HostSnapshot) -> None:
    known = {device.address: device for device in known_devices(measured_devices(host))}
    with hold(source.files, (LOCK,), source.on_note):  # `metrics accept` may have replaced it
        before = source.files.read_text(DEVICES)
        known |= {device.address: device for device in parse_known_devices(before)}
        text = render_known_devices(known.values())
        if before != text:
            source.files.make_directory(DEVICES.parent)
            source.files.replace(DEVICES, text.encode())


def acceptance(source: HostSource) -> ChangeFiles:
    """The request to record the present devices, and no others."""
    tree = source.files
    before = tree.read_text(DEVICES)
    found = measured_devices(source.scan_devices())
    after = render_known_devices(known_devices(found))
    changes = (FileChange(DEVICES, before, after),) if before != after else ()
    notes = []
    try:
        there = {device.address for device in found}
        gone = [one for one in parse_known_devices(before) if one.address not in there]
        notes = [f"no longer expected: {one.address} ({one.model})" for one in gone]
    except VfiomgrError as error:
        notes = [error.message]
    already = ("all recorded devices are present",)
    return ChangeFiles("record the present devices", changes, (LOCK,), tuple(notes), already)
