"""A virtual function whose physical function is on a VFIO driver, in a domain without VF token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.diagnostic import finding
from vfiomgr.guests.vf_token import PROPERTY, owner_of
from vfiomgr.libvirt.build import vf_token

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.diagnostic import Diagnostic
    from vfiomgr.libvirt.preflight.context import PreflightContext


def missing(context: PreflightContext) -> Iterator[Diagnostic]:
    """QEMU cannot open such a function (EACCES)."""
    for taken in context.functions:
        owner = owner_of(context.host, taken.device)
        if owner is None or not taken.hostdev.is_seen:
            continue
        if vf_token.is_in(context.domain, taken.hostdev):
            continue
        name = taken.hostdev.name
        yield finding(
            "vf-token-missing",
            "blocker",
            f"{name} cannot be opened without a VF token",
            (context.cite(taken.hostdev), f"its physical function {owner} is on {owner.driver}"),
            "the user of the physical function sets the token, and the kernel asks for it",
            f"write it with <qemu:override>: property {PROPERTY} of type string for the "
            f"alias of the device; or return {owner.address} to its host driver: "
            f"vfiomgr unbind {owner.address}",
            subject=name,
        )
