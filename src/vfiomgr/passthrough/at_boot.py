"""A bind at the next boot: what of a device that is in use does not prevent it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.diagnostic import Option, Remedy
from vfiomgr.passthrough import guards

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vfiomgr.diagnostic import Diagnostic
    from vfiomgr.passthrough.steps import Bind
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot

_OF_PROCESSES = frozenset({"in-use", "held-by-guest", guards.PERSISTENCE_MODE})
_UNKNOWN_OF_PROCESSES = frozenset({"processes", "open-files", guards.PERSISTENCE_MODE})
"""Kinds of unknown users."""


def ends_at_reboot(host: HostSnapshot, diagnostic: Diagnostic) -> bool:
    """Whether a reboot removes the reason of a refusal: processes, except those of a pod.

    A pod keeps its devices across a reboot, even if it has not opened them.
    """
    name = diagnostic.subject.partition(" ")[0]
    in_pod = host.users.agent is not None and name in {
        *host.users.agent.pods,
        *host.users.agent.claimed,
    }
    unknown = {
        each.kind
        for each in host.users.unknown
        if diagnostic.rule == guards.UNKNOWN and diagnostic.summary.endswith(f": {each.why}")
    }
    is_of_processes = bool(unknown) and unknown <= _UNKNOWN_OF_PROCESSES
    return (diagnostic.rule in _OF_PROCESSES or is_of_processes) and not in_pod


def reasons(
    host: HostSnapshot, request: Bind, targets: Iterable[PciDevice], found: list[Diagnostic]
) -> list[Diagnostic]:
    """The reasons to refuse a bind at the next boot, or a bind now, with --at-boot as a remedy."""
    ending = [one for one in found if ends_at_reboot(host, one)]
    later = [one for one in found if one not in ending]
    if request.at_boot:
        return later
    is_pinned = request.reset_method is not None or request.no_d3cold
    if is_pinned or any(one.override not in request.allow for one in later):
        return found
    if all(host.files.binding(device.address) is not None for device in targets):
        return found
    way = Remedy("bind it at the next boot: ", Option("at-boot", _command(request)))
    return [replace(one, remedies=(*one.remedies, way)) if one in ending else one for one in found]


def _command(request: Bind) -> str:
    """The command that binds the same functions in the same way at the next boot."""
    words = ["vfiomgr bind --at-boot", *map(str, request.addresses)]
    if request.driver is not None:
        words.append(f"--driver {request.driver}")
    if request.only:
        words.append("--function-only")
    if request.with_group:
        words.append("--with-group")
    if request.owner is not None:
        words.append(f"--owner {request.owner.name}")
    words += [f"--allow {name}" for name in sorted(request.allow)]
    if request.update_initramfs:
        words.append("--update-initramfs")
    return " ".join(words)
