"""What makes a function ready for a guest: the bind that would take it, or why there is none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.diagnostic import diagnostics_of
from vfiomgr.errors import Refusal
from vfiomgr.passthrough.plan import plan_bind
from vfiomgr.passthrough.requests import Bind

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vfiomgr.diagnostic import Diagnostic
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.snapshot.source import HostSource


def diagnostics_to_bind(
    host: HostSnapshot, devices: Sequence[PciDevice], *, with_group: bool = False
) -> tuple[Diagnostic, ...]:
    """All that `vfiomgr bind` would refuse these functions for."""
    try:
        plan_bind(host, Bind(tuple(d.address for d in devices), with_group=with_group))
    except Refusal as refusal:
        return diagnostics_of(refusal)
    return ()


def how_to_bind(
    host: HostSnapshot, devices: Sequence[PciDevice], *, with_group: bool = False
) -> str:
    """The command that binds functions, or what is to be done before or instead of it."""
    command = (
        f"vfiomgr bind {' '.join(str(d.address) for d in devices)}" + " --with-group" * with_group
    )
    found = diagnostics_to_bind(host, devices, with_group=with_group)
    options = (remedy.option for diagnostic in found for remedy in diagnostic.remedies)
    allowed = dict.fromkeys(o.value for o in options if o is not None and o.name == "allow")
    bind = f"run {command}" + "".join(f" --allow {name}" for name in allowed)
    told = (d.in_words(lambda o: bind if o.name == "allow" else o.words).hint for d in found)
    return "; ".join(dict.fromkeys(told)) or command


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
    told: set[Diagnostic] = set()
    for device in devices:
        if host.is_vendor_function(device):
            create = f"vfiomgr vgpu create --parent {device.address} --type …"
            source.on_note(f"{device} is no vGPU yet: {create}")
            continue
        begin = f"{device} is on {device.driver or 'no driver'}"
        diagnostics = diagnostics_to_bind(host, [device])
        for found in (each for each in diagnostics if each not in told):
            shown = found.summary
            if found.subject == str(device):
                shown = f"it{shown.removeprefix(found.subject)}"
            source.on_note(f"{begin}, and vfiomgr bind refuses it: {shown}; remedy: {found.hint}")
        if not diagnostics:
            source.on_note(f"{begin}; a guest can have it after: vfiomgr bind {device.address}")
        elif told.issuperset(diagnostics):
            source.on_note(f"{begin}, and vfiomgr bind refuses it for the same reason")
        told.update(diagnostics)
