"""What makes devices ready for a guest, told with what is printed for that guest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.cli.output import note

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vfiomgr.model.pci import PciDevice
    from vfiomgr.model.snapshot import HostSnapshot


MOST = 4
"""Devices that are told of one by one: for each a bind is planned."""


def tell_of_many(devices: Sequence[PciDevice]) -> None:
    """Say where it is told what makes so many devices ready."""
    names = " ".join(str(device.address) for device in devices)
    note(
        f"{len(devices)} functions are not ready for a guest; what makes them so, or speaks "
        f"against it: vfiomgr bind --dry-run {names}"
    )


def tell_how_to_bind(host: HostSnapshot, devices: Iterable[PciDevice]) -> None:
    """Say what makes devices ready for a guest, or what keeps `bind` from it, a line for each."""
    from vfiomgr.planner.readying import objections_to_bind  # noqa: PLC0415 - not for many

    told: set[tuple[str, str]] = set()
    for device in devices:
        if host.is_vendor_function(device):
            create = f"vfiomgr vgpu create --parent {device.address} --type …"
            note(f"{device} is no vGPU yet: {create}")
            continue
        begin = f"{device} is on {device.driver or 'no driver'}"
        objections = objections_to_bind(host, [device])
        for reason, remedy in (o for o in objections if o not in told):
            shown = reason.replace(f"{device} ", "it ", 1)
            note(f"{begin}, and vfiomgr bind refuses it: {shown}; remedy: {remedy}")
        if not objections:
            note(f"{begin}; a guest can have it after: vfiomgr bind {device.address}")
        elif told.issuperset(objections):
            note(f"{begin}, and vfiomgr bind refuses it for the same reason")
        told.update(objections)
