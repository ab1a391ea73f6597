"""How to make a function ready for a guest: the bind command, or why it is refused."""

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
    """Return all reasons for which `vfiomgr bind` would refuse these functions."""
    try:
        plan_bind(host, Bind(tuple(d.address for d in devices), with_group=with_group))
    except Refusal as refusal:
        return diagnostics_of(refusal)
    return ()


def how_to_bind(
    host: HostSnapshot, devices: Sequence[PciDevice], *, with_group: bool = False
) -> str:
    """Return the command that binds functions, or the remedies if it would be refused."""
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
"""Maximum number of devices reported one by one; each needs a planned bind."""


def tell_of_many(source: HostSource, devices: Sequence[PciDevice]) -> None:
    """Report how to make many devices ready, in one note."""
    names = " ".join(str(device.address) for device in devices)
    source.on_note(
        f"{len(devices)} functions are not ready for a guest; see how to bind them with: "
        f"vfiomgr bind --dry-run {names}"
    )


def tell_how_to_bind(source: HostSource, host: HostSnapshot, devices: Iterable[PciDevice]) -> None:
    """Report how to make each device ready for a guest, or why `bind` refuses it."""
    told: set[Diagnostic] = set()
    for device in devices:
        if host.is_vendor_function(device):
            create = f"vfiomgr vgpu create --parent {device.address} --type …"
            source.on_note(f"{device} has no vGPU; create one with: {create}")
            continue
        begin = f"{device} is on {device.driver or 'no driver'}"
        diagnostics = diagnostics_to_bind(host, [device])
        for found in (each for each in diagnostics if each not in told):
            shown = found.summary
            if found.subject == str(device):
                shown = f"it{shown.removeprefix(found.subject)}"
            source.on_note(f"{begin}; vfiomgr bind refuses it: {shown}; remedy: {found.hint}")
        if not diagnostics:
            source.on_note(f"{begin}; bind it with: vfiomgr bind {device.address}")
        elif told.issuperset(diagnostics):
            source.on_note(f"{begin}; vfiomgr bind refuses it for the same reason")
        told.update(diagnostics)
