"""Plans that replace configuration files of the host with prepared texts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.diagnostic import refuse
from vfiomgr.engine.plan import Plan
from vfiomgr.engine.registry import plans
from vfiomgr.persistence.steps import ChangeFiles, ReplaceFile

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.persistence.steps import FileChange
    from vfiomgr.snapshot.model import HostSnapshot


@plans(ChangeFiles)
def plan_change(host: HostSnapshot, request: ChangeFiles) -> Plan:
    """Plan the remaining changes; an interrupted run may have made some of them.

    Raises:
        Refusal: a file has none of the expected texts.

    """
    wanted = set(_wanted(host, request))
    steps = tuple(
        ReplaceFile(change.path, change.before, change.after, change.mode)
        for number, change in enumerate(request.changes)
        if number in wanted
    )
    return Plan(
        request.summary,
        steps,
        locks=request.locks,
        notes=request.notes,
        already=() if steps else request.already,
    )


def _wanted(host: HostSnapshot, request: ChangeFiles) -> Iterator[int]:
    """The indices of the remaining changes."""
    by_path: dict[str, list[tuple[int, FileChange]]] = {}
    for numbered in enumerate(request.changes):
        by_path.setdefault(numbered[1].path, []).append(numbered)
    for path, changes in by_path.items():
        texts = [changes[0][1].before, *(change.after for _, change in changes)]
        current = host.file(path)
        if current not in texts:
            message = f"{path} was changed by another program during this run"
            refuse("file-changed", path, message, "check the file, then run the command again")
        done = len(texts) - 1 - texts[::-1].index(current)
        yield from (number for number, _ in changes[done:])
