"""Hostdev elements of functions and vGPUs, as `vfiomgr libvirt hostdev` makes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.libvirt.build.hostdevs import places
from vfiomgr.libvirt.xml import render
from vfiomgr.vgpu.guest_device import DeviceRequest, HostdevOptions, units_of

if TYPE_CHECKING:
    from vfiomgr.snapshot.model import HostSnapshot


def hostdevs(
    host: HostSnapshot, *names: str, first_bus: int = 8, hand_over: HostdevOptions | None = None
) -> list[str]:
    """The elements of the named devices, slots whole."""
    units = units_of(host, [DeviceRequest(name, hand_over or HostdevOptions()) for name in names])
    return [render.hostdev(planned) for planned in places(units, first_bus)]
