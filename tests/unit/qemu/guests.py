"""Guests of QEMU on the hosts of tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from tests.unit.guest_hosts import two_sockets
from vfiomgr.guests.model import DeviceRequest, GuestRequest
from vfiomgr.guests.named import parse_device
from vfiomgr.qemu.backend import QemuBackend
from vfiomgr.qemu.named import DEVICE_WORDS
from vfiomgr.units import GIB, Version

if TYPE_CHECKING:
    from vfiomgr.qemu.model import QemuPlan
    from vfiomgr.snapshot.model import HostSnapshot

QEMU = Version(11, 1)


def planned(
    *devices: str | DeviceRequest,
    host: HostSnapshot | None = None,
    qemu: Version | None = QEMU,
    **changes: Any,
) -> QemuPlan:
    """The plan of a guest of 64 GiB and 8 CPUs."""
    requests = tuple(
        parse_device(d, "", DEVICE_WORDS) if isinstance(d, str) else d for d in devices
    )
    request = replace(GuestRequest("guest", 64 * GIB, 8, requests), **changes)
    return QemuBackend(qemu).plan(host or two_sockets(), request)


def values(plan: QemuPlan, option: str) -> list[str]:
    """The values of an option, in their order."""
    return [one.value for one in plan.arguments if one.option == option]


def device(plan: QemuPlan, name: str) -> dict[str, str]:
    """The properties of the device with this identifier, and its `driver`."""
    (found,) = (
        one for one in plan.arguments if one.option == "device" and ("id", name) in one.properties
    )
    return {"driver": found.head, **dict(found.properties)}
