"""What the picture marks: problems of a host and of single functions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.pci.iommu import blockers
from vfiomgr.topology.model import Problem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.pci.links import PciLink
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot

_SHOWN = 3
"""Blocking functions that a text names."""


def of_host(host: HostSnapshot) -> Iterator[Problem]:
    """Problems that concern all devices."""
    if host.devices and host.iommu.is_known and not host.iommu.is_on:
        yield Problem("iommu-off", "error", "IOMMU is off: no device can be passed through")
    if host.pci_unidentified:
        text = f"cannot identify {_listed(host.pci_unidentified)}"
        yield Problem("unidentified", "warning", text)


def of_function(
    host: HostSnapshot, device: PciDevice, link: PciLink | None, port: PciLink | None
) -> Iterator[Problem]:
    """Problems of one function, the gravest first."""
    if device.stuck:
        text = f"stuck in the kernel: {device.stuck} has not returned"
        yield Problem("stuck", "error", text)
    if not device.is_responsive:
        yield Problem("not-responding", "error", "does not respond")
    yield from _of_group(host, device)
    for wedged in host.wedged:
        if wedged.name == str(device.address):
            yield Problem("wedged", "warning", wedged.why)
    yield from of_link(device, link, port)
    if device.driver is None and not device.is_bridge and device.physical_function is None:
        yield Problem("no-driver", "info", "no driver")
    if device.is_boot_display:
        yield Problem("boot-display", "info", "boot display")


def _of_group(host: HostSnapshot, device: PciDevice) -> Iterator[Problem]:
    """Why a function that a guest has, or that is a GPU, cannot be opened by a guest."""
    if device.is_bridge or not (device.is_on_vfio or device.is_graphics_or_accelerator):
        return
    if device.iommu_group is None:
        if host.iommu.is_on:
            yield Problem("no-iommu-group", "error", "no IOMMU group")
        return
    blocking = [
        f"{other.address} is on {other.driver}"
        for other in blockers(host.group_members(device.iommu_group))
        if device.is_on_vfio or other.address.slot != device.address.slot
    ]
    if blocking:
        text = f"group {device.iommu_group} is not viable: {_listed(blocking)}"
        yield Problem("group-not-viable", "warning", text)


def of_link(device: PciDevice, link: PciLink | None, port: PciLink | None) -> Iterator[Problem]:
    """A link that runs below what both of its ends support; `port` is the upper end."""
    if link is None or link.width is None:
        return
    ends = "the device supports" if port is None else "both ends support"
    width = _least(link.max_width, port.max_width if port else None)
    speed = _least(link.max_speed, port.max_speed if port else None)
    if width is not None and link.width < width:
        yield Problem("link-width", "warning", f"link width x{link.width}, {ends} x{width:g}")
    if speed is not None and link.speed is not None and link.speed < speed:
        text = f"link speed {link.speed:g} GT/s, {ends} {speed:g} GT/s"
        if device.is_graphics_or_accelerator:
            yield Problem("link-speed", "info", "link speed below maximum (normal when idle)")
        else:
            yield Problem("link-speed", "warning", text)


def _least(*numbers: float | None) -> float | None:
    return min((number for number in numbers if number is not None), default=None)


def _listed(texts: list[str] | tuple[str, ...]) -> str:
    more = f" and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return ", ".join(texts[:_SHOWN]) + more
