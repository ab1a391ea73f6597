"""Requests to write CDI specifications and to remove devices, also after each change of a host."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, ClassVar

from vfiomgr.containers.cdi.facts import read_cdi_files
from vfiomgr.containers.cdi.model import Lifetime, OfferRequest
from vfiomgr.engine.plan import Request
from vfiomgr.engine.registry import after_change, notes_devices
from vfiomgr.engine.transaction import ApplyContext, apply
from vfiomgr.errors import VfiomgrError
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.vgpu.model import Vgpu


class WriteCdi(Request, Value):
    """Write a CDI specification of the available devices; others are removed from it."""

    offer: OfferRequest
    lifetime: Lifetime = "static"
    kind: ClassVar[str] = "write-cdi"

    is_about_files: ClassVar[bool] = True


class RemoveCdi(Request, Value):
    """Remove devices from the CDI specifications that vfiomgr wrote."""

    names: tuple[str, ...] = ()
    """By name, with or without the kind."""
    of_kind: str | None = None
    """Only of this kind."""
    every: bool = False
    stale: bool = False
    """All that are no longer available."""
    kind: ClassVar[str] = "remove-cdi"

    is_about_files: ClassVar[bool] = True


GOES = " is removed"
"""The end of a note about a removed device."""


@notes_devices
def following_notes(host: HostSnapshot, going: Iterable[PciDevice | Vgpu]) -> Iterator[str]:
    """Notes about vfiomgr's own files with functions or vGPUs that are going to be removed."""
    nodes = {node for holder in going for node in host.guest_nodes(holder)}
    for file in host.cdi_files:
        if file.is_own and any(f'"{node}"' in (file.text or "") for node in nodes):
            yield f"{file.path} contains it, and is updated afterwards"


@after_change
def follow_devices(work: ApplyContext) -> None:
    """Remove unavailable devices; an error here never undoes the change itself."""
    if not any(file.is_own for file in read_cdi_files(work.tree)):
        return
    try:
        outcome = apply(RemoveCdi(stale=True), work)
    except (VfiomgrError, OSError) as error:
        work.on_note(
            f"CDI specifications still contain removed devices ({error}); run: vfiomgr cdi "
            "remove --stale"
        )
        return
    for note in outcome.plan.notes:
        work.on_note(f"{note} from its CDI specification" if note.endswith(GOES) else note)
