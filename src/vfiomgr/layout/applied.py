"""The runs that brought a host to a layout, as the journals tell of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vfiomgr.diagnostic import blocker, refusal
from vfiomgr.engine.journal import read_journal
from vfiomgr.engine.journal_files import names
from vfiomgr.engine.registry import checks
from vfiomgr.engine.unfinished import read_unfinished
from vfiomgr.layout.requests import ApplyLayout, RevertLayout
from vfiomgr.layout.revert import of_several
from vfiomgr.paths import BOOT_ID
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.diagnostic import Override
    from vfiomgr.engine.step import Step
    from vfiomgr.host.tree import HostTree

_DONE = frozenset({"done", "superseded"})
"""What was cut off counts where a later run finished it."""


class _Run(Value):
    """A run that came to its end."""

    name: str
    request: dict[str, Any]
    boot_id: str | None
    locks: frozenset[str]

    @property
    def layout(self) -> tuple[object, object]:
        """What it brought the host to."""
        return self.request["name"], self.request["layout"]


def reversion(tree: HostTree, boot_id: str | None, allow: frozenset[Override]) -> RevertLayout:
    """What takes back the layout that was applied last, with all later corrections of it.

    Raises:
        Refusal: none was applied since the host was started, or it is taken back already.

    """
    runs = _last_application(tree, boot_id)
    if not runs:
        message = "no layout was applied since this host was started, or it is reverted already"
        remedy = "vfiomgr unbind, sriov set and vgpu remove take back what else was done"
        raise refusal([blocker("no-layout-applied", "layout", message, remedy)])
    steps = of_several(_taken(tree, run) for run in runs)
    name = str(runs[0].request["name"])
    locks = sorted({lock for run in runs for lock in run.locks})
    return RevertLayout(name, steps, tuple(run.name for run in runs), allow, tuple(locks))


@checks(RevertLayout)
def refuse_other_reversion(request: RevertLayout, tree: HostTree) -> None:
    """Make sure that what is to be reverted is still what was applied last.

    Raises:
        Refusal: another process applied, or reverted, a layout meanwhile.

    """
    if not request.is_same_as(reversion(tree, tree.read(BOOT_ID), request.allow)):
        message = "another vfiomgr applied or reverted a layout meanwhile"
        raise refusal(
            [
                blocker(
                    "layout-changed-meanwhile",
                    request.name,
                    message,
                    "look at vfiomgr layout revert --dry-run, and run the command again",
                )
            ]
        )


def _taken(tree: HostTree, run: _Run) -> Iterator[Step]:
    """The steps that a run took, which are not all where another one finished it."""
    told = read_unfinished(tree, run.name)
    return (told.steps[number] for number in told.begun)


def _last_application(tree: HostTree, boot_id: str | None) -> list[_Run]:
    """The newest runs of one layout that are not reverted, the oldest first."""
    reverted: set[str] = set()
    found: list[_Run] = []
    for run in _ended(tree):
        if run.request["kind"] == RevertLayout.kind:
            reverted.update(run.request["runs"])
        elif run.boot_id != boot_id or (found and run.layout != found[0].layout):
            break
        elif run.name not in reverted:
            found.append(run)
    return found[::-1]


def _ended(tree: HostTree) -> Iterator[_Run]:
    """All runs about layouts that did what they were to do, the newest first."""
    for name in reversed(names(tree)):
        records = read_journal(tree, name)
        if not records:
            continue
        request = records[0]["request"]
        last = records[-1]
        is_done = last.get("event") == "end" and last.get("outcome") in _DONE
        if request.get("kind") in {ApplyLayout.kind, RevertLayout.kind} and is_done:
            locks = frozenset(lock for record in records for lock in record.get("locks", ()))
            yield _Run(name, request, records[0]["boot_id"], locks)
