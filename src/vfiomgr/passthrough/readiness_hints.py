"""What makes a function ready for a guest: the bind that would take it, or why there is none."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from vfiomgr.errors import Refusal
from vfiomgr.passthrough.plan import plan_bind
from vfiomgr.passthrough.requests import Bind

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.snapshot.source import HostSource

_ALLOWANCE = re.compile(r"pass --allow ([\w-]+)")
"""As remedies of `vfiomgr bind` name an option of it; other commands do not have it."""


def objections_to_bind(
    host: HostSnapshot, devices: Sequence[PciDevice], *, with_group: bool = False
) -> tuple[tuple[str, str], ...]:
    """Reason and remedy of all that `vfiomgr bind` would refuse these functions for."""
    try:
        plan_bind(host, Bind(tuple(d.address for d in devices), with_group=with_group))
    except Refusal as refusal:
        return refusal.objections
    return ()


def how_to_bind(
    host: HostSnapshot, devices: Sequence[PciDevice], *, with_group: bool = False
) -> str:
    """The command that binds functions, or what is to be done before or instead of it."""
    command = (
        f"vfiomgr bind {' '.join(str(d.address) for d in devices)}" + " --with-group" * with_group
    )
    remedies = [r for _, r in objections_to_bind(host, devices, with_group=with_group)]
    allowed = dict.fromkeys(name for r in remedies for name in _ALLOWANCE.findall(r))
    bind = f"run {command}" + "".join(f" --allow {name}" for name in allowed)
    whole = (_ALLOWANCE.sub(bind, remedy) for remedy in remedies)
    return "; ".join(dict.fromkeys(whole)) or command


MOST = 4
"""Devices that are told of one by one: for each a bind is planned."""


def tell_of_many(source: HostSource, devices: Sequence[PciDevice]) -> None:
    """Say where it is told what makes so many devices ready."""
    names = " ".join(str(device.address) for device in devices)
    source.on_note(
        f"{len(devices)} functions are not ready for a guest; what makes them so, or speaks "
        f"against it: vfiomgr bind --dry-run {names}"
    )


def tell_how_to_bind(source: HostSource, host: HostSnapshot, devices: Iterable[PciDevice]) -> None:
    """Say what makes devices ready for a guest, or what keeps `bind` from it, a line for each."""
    told: set[tuple[str, str]] = set()
    for device in devices:
        if host.is_vendor_function(device):
            create = f"vfiomgr vgpu create --parent {device.address} --type …"
            source.on_note(f"{device} is no vGPU yet: {create}")
            continue
        begin = f"{device} is on {device.driver or 'no driver'}"
        objections = objections_to_bind(host, [device])
        for reason, remedy in (o for o in objections if o not in told):
            shown = reason.replace(f"{device} ", "it ", 1)
            source.on_note(f"{begin}, and vfiomgr bind refuses it: {shown}; remedy: {remedy}")
        if not objections:
            source.on_note(f"{begin}; a guest can have it after: vfiomgr bind {device.address}")
        elif told.issuperset(objections):
            source.on_note(f"{begin}, and vfiomgr bind refuses it for the same reason")
        told.update(objections)
