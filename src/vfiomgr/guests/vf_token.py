"""VF tokens: what a guest needs for a virtual function whose physical function is on vfio-pci.

The user of the physical function sets a UUID, and each user of a virtual function must know it:
without it the kernel does not open the function (EACCES); where none is needed, a token is an error
(EINVAL; vfio_pci_validate_vf_token in drivers/vfio/pci/vfio_pci_core.c). QEMU has the property
`vf-token`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from vfiomgr.diagnostic import Diagnostic, blocker
from vfiomgr.errors import UsageError
from vfiomgr.units import is_uuid

if TYPE_CHECKING:
    from vfiomgr.guests.model import GuestDevice
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot

PROPERTY = "vf-token"
"""The property of QEMU's vfio-pci."""


def owner_of(host: HostSnapshot, function: PciDevice) -> PciDevice | None:
    """The physical function on a VFIO driver, whose user knows the token of a virtual function."""
    if function.physical_function is None:
        return None
    owner = host.device_named(str(function.physical_function))
    return owner if owner is not None and owner.is_on_vfio else None


def diagnostics(
    host: HostSnapshot, units: Iterable[GuestDevice], how: str | None
) -> Iterator[Diagnostic]:
    """Refuse virtual functions without the token that they need.

    `how` is the other remedy, with {device} for the device and its token; None if there is none.

    Raises:
        UsageError: a token is given for another device, or is not a UUID.
    """
    for unit in units:
        token = unit.options.vf_token
        owners = [owner for f in unit.functions if (owner := owner_of(host, f)) is not None]
        if token is not None:
            _check(unit, token, is_needed=bool(owners) or _is_owner(unit))
        elif owners and unit.is_seen:
            yield _missing(unit.name, owners[0], how)


def _missing(name: str, owner: PciDevice, how: str | None) -> Diagnostic:
    """The refusal of a virtual function without token."""
    remedy = f"return {owner.address} to its host driver: vfiomgr unbind {owner.address}"
    if how is not None:
        remedy += f"; or {how.format(device=f'{name},{PROPERTY}=UUID')}"
    return blocker(
        "vf-token-missing",
        name,
        f"{name} cannot be opened: its physical function {owner.address} is on {owner.driver}, so "
        "the kernel requires a VF token",
        remedy,
    )


def _is_owner(unit: GuestDevice) -> bool:
    """Whether it is a physical function, whose user sets the token."""
    return any(function.sriov_totalvfs for function in unit.functions)


def _check(unit: GuestDevice, token: str, *, is_needed: bool) -> None:
    if not is_uuid(token):
        message = f"invalid VF token of {unit.name}: {token}"
        raise UsageError(message, "write a UUID, e.g. one of uuidgen")
    if not is_needed:
        message = f"cannot set a VF token for {unit.name}: the kernel accepts none"
        hint = "omit it: only physical functions, and virtual ones whose PF is on VFIO, have one"
        raise UsageError(message, hint)
