"""Carry out a plan: journal, act, verify; on a failure undo in reverse."""

from __future__ import annotations

import signal
import threading
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vfiomgr.errors import RollbackIncomplete, RolledBack, VfiomgrError
from vfiomgr.executor.actions import perform, require_life
from vfiomgr.model.plan import Plan
from vfiomgr.model.step import ForgetOrigin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from vfiomgr.executor.journal import Journal
    from vfiomgr.host.tree import HostTree
    from vfiomgr.model.step import Step


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run did."""

    plan: Plan
    is_changed: bool
    """False where the host was as wanted already."""


def run(
    plan: Plan,
    *,
    tree: HostTree,
    journal: Journal,
    on_step: Callable[[Step], None] = lambda _step: None,
) -> Outcome:
    """Carry out the steps of a plan in order; all, or none.

    Raises:
        RolledBack: a step failed; what had been done is undone.
        RollbackIncomplete: a step failed, and so did part of undoing; the message says which.

    """
    begun: list[Step] = []
    try:
        for number, step in enumerate(plan.steps):
            journal.record("begin", step=number)
            begun.append(step)
            on_step(step)
            perform(step, tree)
            require_life(step, tree)
            journal.record("done", step=number)
    except (Exception, KeyboardInterrupt) as cause:  # noqa: BLE001 - a defect too is undone
        with _undisturbed():
            _note(journal, "failed", step=len(begun) - 1, error=str(cause) or type(cause).__name__)
            _undo(begun, cause, tree, journal)
    _note(journal, "end", outcome="done")
    return Outcome(plan, is_changed=bool(plan.steps))


def _note(journal: Journal, event: str, **details: object) -> None:
    """Record where that is possible: a full disk must not keep a device from being restored."""
    try:
        journal.record(event, **details)
    except OSError as error:
        warnings.warn(f"the journal cannot be written: {error}", stacklevel=2)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Keep a second Ctrl-C, a lost terminal or a service manager from ending a roll-back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, signal.SIG_IGN) for number in signals]
    try:
        yield
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)


def _undo(begun: Sequence[Step], cause: BaseException, tree: HostTree, journal: Journal) -> None:
    """Undo the begun steps in reverse, the failed one too: it may have got half-way."""
    left: list[str] = []
    for number in reversed(range(len(begun))):
        inverse = begun[number].inverse()
        if inverse is None or (left and isinstance(inverse, ForgetOrigin)):
            continue  # a function that is not back yet still needs its record
        _note(journal, "undo-begin", step=number)
        try:
            perform(inverse, tree)
        except Exception as error:  # noqa: BLE001 - whatever it is, the other steps are undone
            _note(journal, "undo-failed", step=number, error=str(error))
            left.append(f"{inverse.describe()} ({error})")
        else:
            _note(journal, "undo-done", step=number)
    what = "interrupted" if isinstance(cause, KeyboardInterrupt) else str(cause)
    hint = cause.hint if isinstance(cause, VfiomgrError) else ""
    if left:
        _note(journal, "end", outcome="incomplete")
        message = f"{what}; and undoing it failed: {'; '.join(left)}"
        raise RollbackIncomplete(message, f"{hint or 'see dmesg'}; then do by hand what is left")
    _note(journal, "end", outcome="rolled-back")
    message = f"{what}; everything is as it was before"
    raise RolledBack(message, hint) from cause
