"""Changes of entries of container runtimes that are ready: carried out, and read by the runtime."""

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
"""Held from the first look at files until they are written, around the locks of the plan."""


class Prepared(Value):
    """A change that is ready to be carried out, and what a person should read before it."""

    place: RuntimeLocation
    request: ChangeFiles
    unchecked: tuple[str, ...]
    """What nobody could look at, and why."""
    backups: tuple[str, ...] = ()
    foreseen: dict[str, Any] | None = None
    """What the runtime will read; None where it could not be asked."""
    directories: tuple[HostPath, ...] = ()
    """Those that were made for files that go, and go with them where nothing else is in them."""


def change(make: Callable[[], Prepared], work: ApplyContext) -> tuple[Prepared, Outcome]:
    """Make a change ready and carry it out, while no other vfiomgr does so.

    Raises:
        VfiomgrError: as what makes it ready, and `apply_prepared`.

    """
    with ExitStack() as stack:
        with prepared(work, only_files=True):
            stack.enter_context(hold(work.tree, (_READING,), work.on_note))
        ready = make()
        return ready, apply_prepared(ready, work)


def apply_prepared(prepared: Prepared, work: ApplyContext) -> Outcome:
    """Carry a change out, and have the runtime read what came of it.

    Raises:
        RolledBack: it does not read what was foreseen; all is as it was.
        RollbackIncomplete: and it could not be put back.

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
        message = f"{why}; and it could not be taken back: {error.message}"
        raise RollbackIncomplete(message, error.hint) from error
    message = f"{why}; all files are as they were"
    hint = "does it import what vfiomgr did not find, or did somebody change a file meanwhile?"
    raise RolledBack(message, f"{hint} look at its imports, then run it again")


def _surprise(tree: HostTree, prepared: Prepared) -> str | None:
    """Why what a runtime reads now is not what it was going to read."""
    place = prepared.place
    try:
        now = dump(tree, place, read_facts(tree, place, {}, was_ours=True), {})
    except VfiomgrError as error:
        return error.message
    if now is None or _comparable(now.data) == _comparable(prepared.foreseen or {}):
        return None
    return f"{place} reads something else than it was going to"


def _comparable(data: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in data.items() if name != "imports"}
