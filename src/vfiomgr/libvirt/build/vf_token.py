"""VF tokens of a domain: libvirt has no element for them, so they are a `<qemu:override>`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count
from typing import TYPE_CHECKING

from vfiomgr.guests import vf_token
from vfiomgr.libvirt.model import OWN_ALIAS, Domain, DomainHostdev

if TYPE_CHECKING:
    from vfiomgr.guests.model import GuestDevice
    from vfiomgr.snapshot.model import HostSnapshot

HOW = (
    "write the token into the domain: vfiomgr libvirt domain ... --device {device} (in existing "
    "XML: a property of <qemu:override>)"
)
"""How a domain gets a token; a running guest gets none."""


def notes(host: HostSnapshot, units: Iterable[GuestDevice]) -> Iterator[str]:
    """What to do for functions that need a token, which `<hostdev>` cannot contain."""
    for diagnostic in vf_token.diagnostics(host, units, HOW):
        yield f"{diagnostic.summary}; {diagnostic.remedy}"


def is_in(domain: Domain, hostdev: DomainHostdev | None = None) -> bool:
    """Whether a domain sets the token of its hostdev; None for a hostdev that is to be added.

    An override applies to the alias that it names. The alias of a hostdev that is to be added is
    unknown, so it can be any that no other hostdev has.
    """
    aliases = dict(_aliases(domain))
    for argument in domain.qemu_arguments:
        place, found, _ = argument.partition(f"{vf_token.PROPERTY}=")
        if not found:
            continue
        owner = aliases.get(place.removeprefix("device.").removesuffix("."))
        if owner == hostdev or not place.startswith("device."):
            return True
    return False


def _aliases(domain: Domain) -> Iterator[tuple[str, DomainHostdev]]:
    """The aliases of the hostdevs; libvirt counts those without, interfaces first.

    That is what qemuAssignDeviceHostdevAlias does (src/qemu/qemu_alias.c).
    """
    number = count()
    hostdevs = (hostdev for hostdev in domain.hostdevs if hostdev.element != "disk")
    for hostdev in sorted(hostdevs, key=lambda found: found.element != "interface"):
        alias = hostdev.alias
        if alias is None or not OWN_ALIAS.fullmatch(alias):
            usual = f"hostdev{next(number)}"
            alias = alias or usual
        yield alias, hostdev
