"""Apply prepared changes of container runtime entries, and check them with the runtime."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from vfiomgr.containers.runtimes.location import RuntimeLocation, read_facts
from vfiomgr.containers.runtimes.verify import dump
from vfiomgr.engine.locks import hold
from vfiomgr.engine.transaction import ApplyContext, carry_out, prepared
from vfiomgr.errors import RollbackIncomplete, RolledBack, VfiomgrError
from vfiomgr.paths import HostPath
from vfiomgr.persistence.requests import ChangeFiles
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Callable

    from vfiomgr.engine.run import Outcome
    from vfiomgr.host.tree import HostTree

_READING = "runtimes-read"
"""Held from the first read of files until they are written, around the locks of the plan."""


class Prepared(Value):
    """A prepared change, and notes to print before it is applied."""

    place: RuntimeLocation
    request: ChangeFiles
    unchecked: tuple[str, ...]
    """What was not checked, and why."""
    backups: tuple[str, ...] = ()
    foreseen: dict[str, Any] | None = None
    """What the runtime will read; None if it cannot be queried."""
    directories: tuple[HostPath, ...] = ()
    """Directories created for files that are removed; removed if they are empty."""


def change(make: Callable[[], Prepared], work: ApplyContext) -> tuple[Prepared, Outcome]:
    """Prepare a change and apply it, without other vfiomgr processes in between.

    Raises:
        VfiomgrError: as the preparation, and `apply_prepared`.

    """
    with ExitStack() as stack:
        with prepared(work, only_files=True):
            stack.enter_context(hold(work.tree, (_READING,), work.on_note))
        ready = make()
        return ready, apply_prepared(ready, work)


def apply_prepared(prepared: Prepared, work: ApplyContext) -> Outcome:
    """Apply a change, and let the runtime read the result.

    Raises:
        RolledBack: it does not read the expected settings; all files were restored.
        RollbackIncomplete: the files could not be restored.

    """
    outcome = carry_out(prepared.request, work)
    has_answer = outcome.is_changed and prepared.foreseen is not None
    why = _surprise(work.tree, prepared) if has_answer else None
    if why is None:
        for directory in prepared.directories:
            work.tree.remove_empty_directory(directory)
        return outcome
    try:
        carry_out(prepared.request.inverse(), work)
    except VfiomgrError as error:
        message = f"{why}; cannot restore the files: {error.message}"
        raise RollbackIncomplete(message, error.hint) from error
    message = f"{why}; all files were restored"
    hint = "check whether it imports unknown files, or whether a file was changed meanwhile;"
    raise RolledBack(message, f"{hint} then run the command again")


def _surprise(tree: HostTree, prepared: Prepared) -> str | None:
    """Why the runtime reads other settings than expected."""
    place = prepared.place
    try:
        now = dump(tree, place, read_facts(tree, place, {}, was_ours=True), {})
    except VfiomgrError as error:
        return error.message
    if now is None or _comparable(now.data) == _comparable(prepared.foreseen or {}):
        return None
    return f"{place} does not read the expected settings"


def _comparable(data: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in data.items() if name != "imports"}
