"""The runs that applied layouts, as recorded in the journals."""

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
"""An interrupted run counts if a later run finished it."""


class _Run(Value):
    """A completed run."""

    name: str
    request: dict[str, Any]
    boot_id: str | None
    locks: frozenset[str]

    @property
    def layout(self) -> tuple[object, object]:
        """The layout that it applied."""
        return self.request["name"], self.request["layout"]


def reversion(tree: HostTree, boot_id: str | None, allow: frozenset[Override]) -> RevertLayout:
    """The request that undoes the last applied layout, with all its later corrections.

    Raises:
        Refusal: no layout was applied since boot, or it is already reverted.

    """
    runs = _last_application(tree, boot_id)
    if not runs:
        message = "no layout was applied since this host booted, or it is already reverted"
        remedy = "undo other changes with vfiomgr unbind, sriov set and vgpu remove"
        raise refusal([blocker("no-layout-applied", "layout", message, remedy)])
    steps = of_several(_taken(tree, run) for run in runs)
    name = str(runs[0].request["name"])
    locks = sorted({lock for run in runs for lock in run.locks})
    return RevertLayout(name, steps, tuple(run.name for run in runs), allow, tuple(locks))


@checks(RevertLayout)
def refuse_other_reversion(request: RevertLayout, tree: HostTree) -> None:
    """Require that the layout to be reverted still is the last applied one.

    Raises:
        Refusal: another process applied or reverted a layout in the meantime.

    """
    if not request.is_same_as(reversion(tree, tree.read(BOOT_ID), request.allow)):
        message = "another vfiomgr applied or reverted a layout in the meantime"
        raise refusal(
            [
                blocker(
                    "layout-changed-meanwhile",
                    request.name,
                    message,
                    "check vfiomgr layout revert --dry-run, then run the command again",
                )
            ]
        )


def _taken(tree: HostTree, run: _Run) -> Iterator[Step]:
    """The steps that a run took; only some of them if another run finished it."""
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
    """All completed runs about layouts, the newest first."""
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
