"""Remove missing devices from vfiomgr's own CDI specifications after each change of a host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.containers.cdi.facts import read_cdi_files
from vfiomgr.containers.cdi.requests import GOES, RemoveCdi
from vfiomgr.engine.registry import after_change
from vfiomgr.engine.transaction import apply
from vfiomgr.errors import VfiomgrError

if TYPE_CHECKING:
    from vfiomgr.engine.transaction import ApplyContext


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
