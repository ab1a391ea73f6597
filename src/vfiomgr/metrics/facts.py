"""The facts of metrics: what systemd says of vfiomgr's units, and the devices of earlier runs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from vfiomgr.documents.jsonable import API_VERSION, Misfit, from_jsonable, to_jsonable
from vfiomgr.documents.text import parse_json
from vfiomgr.errors import InvalidDocument
from vfiomgr.metrics.model import DEVICES, KnownDevice, UnitResult
from vfiomgr.metrics.timer import SERVICE
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree
    from vfiomgr.pci.model import PciDevice

_PROPERTIES = ("Id", "ActiveState", "Result", "ExecMainStartTimestampMonotonic")
_KIND = "KnownDevices"


def read_units(tree: HostTree) -> tuple[UnitResult, ...] | None:
    """The units of vfiomgr that have run in this boot; None if systemd does not answer.

    That of the metrics themselves is left out: the age of the file shows whether it works.
    """
    properties = f"--property={','.join(_PROPERTIES)}"
    answer = tree.run(("systemctl", "show", properties, "vfiomgr-*.service"))
    return None if answer is None else tuple(_units(answer))


def _units(text: str) -> Iterator[UnitResult]:
    for block in text.split("\n\n"):
        found = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        if not found.keys() >= set(_PROPERTIES) or found["Id"] == SERVICE.name:
            continue
        name, state, result, started = map(found.__getitem__, _PROPERTIES)
        has_failed = state == "failed" or result != "success"
        if has_failed or state != "inactive" or started != "0":
            yield UnitResult(name.removesuffix(".service"), result, has_failed)


class _Record(Value):
    api_version: str
    kind: str
    devices: tuple[KnownDevice, ...]


def parse_known_devices(text: str | None) -> tuple[KnownDevice, ...]:
    """The devices in the record; none without one.

    Raises:
        InvalidDocument: it is damaged, or of another version.
    """
    if text is None:
        return ()
    try:
        record = from_jsonable(_Record, parse_json(text))
    except (ValueError, Misfit) as error:
        message = f"cannot read {DEVICES}: {error}"
        raise InvalidDocument(message, "write it again: vfiomgr metrics accept") from None
    if (record.api_version, record.kind) != (API_VERSION, _KIND):
        message = f"cannot read {DEVICES}: it is of another version"
        raise InvalidDocument(message, "write it again: vfiomgr metrics accept")
    return record.devices


def render_known_devices(devices: Iterable[KnownDevice]) -> str:
    """The record of devices."""
    listed = tuple(sorted(devices, key=lambda device: device.address))
    return json.dumps(to_jsonable(_Record(API_VERSION, _KIND, listed)), indent=2) + "\n"


def known_devices(devices: Iterable[PciDevice]) -> Iterator[KnownDevice]:
    """What is remembered of devices: physical functions, since others come and go by settings."""
    for device in devices:
        if device.physical_function is None:
            yield KnownDevice(device.address, device.vendor_id, device.device_id, device.short_name)
