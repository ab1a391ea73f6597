"""Unreadable records of vfiomgr: reported, and refused if a plan may need them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.diagnostic import blocker, refusal
from vfiomgr.engine.journal_files import DIRECTORY
from vfiomgr.pci import original_state

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.engine.journal import Damaged, Survey
    from vfiomgr.engine.plan import Plan
    from vfiomgr.errors import Refusal
    from vfiomgr.host.tree import HostTree


def unusable(left: Survey) -> Iterator[str]:
    """The ignored and damaged files in the journal's directory."""
    for name in left.foreign:
        yield f"ignoring {DIRECTORY / name}: not a journal of vfiomgr"
    for journal in left.damaged:
        about = f" (about {', '.join(sorted(journal.subjects))})" if journal.subjects else ""
        yield f"cannot read {DIRECTORY / journal.name}{about}: {journal.why}"


def refuse_lost_state(plan: Plan, left: Survey, tree: HostTree) -> None:
    """Refuse to change devices whose original state may be in an unreadable record.

    Raises:
        Refusal: a device may be concerned; the record is named.

    """
    if plan.is_empty:
        return
    touched = {*plan.resolves, *filter(None, (step.subject for step in plan.steps))}
    for journal in left.damaged:
        if _may_be_about(journal, touched, set(plan.locks)):
            raise _refusal(sorted(journal.subjects or ()), DIRECTORY / journal.name, journal.why)
    for address, why in original_state.unreadable_origins(tree).items():
        if address in touched:
            raise _refusal([address], original_state.origin_file(address), why)


def _may_be_about(journal: Damaged, touched: set[str], locks: set[str]) -> bool:
    if journal.subjects is None or journal.locks is None:
        return True
    return not (journal.subjects.isdisjoint(touched) and journal.locks.isdisjoint(locks))


def _refusal(devices: list[str], file: str, why: str) -> Refusal:
    of = ", ".join(devices) or "devices (which ones is not known)"
    return refusal(
        [
            blocker(
                "journal-unreadable",
                file,
                f"{file} cannot be read and may contain the original state of {of}: {why}",
                f"check the devices, then move the file away: mv {file} /root/",
            )
        ]
    )
