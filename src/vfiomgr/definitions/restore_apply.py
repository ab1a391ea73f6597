"""Brings about the vGPUs that start by themselves: all of a GPU at once, or else one by one."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Literal

from msgspec.structs import replace

from vfiomgr.definitions.restore import RestorableVgpu, candidates
from vfiomgr.engine.transaction import apply, once
from vfiomgr.errors import RollbackIncomplete, VfiomgrError
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vfiomgr.definitions.requests import RestoreVgpus
    from vfiomgr.engine.run import Outcome
    from vfiomgr.engine.step import Step
    from vfiomgr.engine.transaction import ApplyContext
    from vfiomgr.snapshot.model import HostSnapshot

State = Literal["restored", "already", "waiting", "failed"]


class Restored(Value):
    """What came of a vGPU that is defined to start by itself."""

    name: str
    parent: str
    type: str
    state: State
    reason: str | None = None
    """Why it failed, or what it waits for."""


def restore(request: RestoreVgpus, work: ApplyContext) -> tuple[Restored, ...]:
    """Bring them about, each note told once; one that fails keeps no other from it."""
    work = replace(work, on_note=once(work.on_note))
    return Restoration(request, lambda: work.scan(request), lambda part: apply(part, work)).run()


class Restoration:
    """One run over all of them."""

    def __init__(
        self,
        request: RestoreVgpus,
        scan: Callable[[], HostSnapshot],
        apply: Callable[[RestoreVgpus], Outcome],
    ) -> None:
        self._request = request
        self._scan = scan
        self._apply = apply
        self._found: tuple[RestorableVgpu, ...] = ()
        self._tried: set[tuple[str, tuple[Step, ...]]] = set()
        """Names with what was to be done; a GPU may need something else once that is done."""
        self._restored: set[str] = set()
        self._failures: dict[str, str] = {}

    def run(self) -> tuple[Restored, ...]:
        """Go on until nothing more can be done: a GPU that is prepared has vGPUs to be made."""
        while left := self._left():
            for _, batch in groupby(left, lambda candidate: candidate.gpu):
                self._bring_about(list(batch))
        awaited = {candidate.after for candidate in self._found}
        return tuple(self._told(c) for c in self._found if c.name not in awaited)

    def _left(self) -> list[RestorableVgpu]:
        self._found = candidates(self._scan(), self._request)
        return sorted(
            (
                c
                for c in self._found
                if c.plan and not c.plan.is_empty and (c.name, c.plan.steps) not in self._tried
            ),
            key=lambda candidate: candidate.gpu,
        )

    def _bring_about(self, batch: Sequence[RestorableVgpu]) -> None:
        """All at once; where that fails, each by itself, so that the others are there."""
        names = tuple(candidate.name for candidate in batch)
        self._tried.update((c.name, c.plan.steps) for c in batch if c.plan is not None)
        try:
            outcome = self._apply(replace(self._request, only=names))
        except RollbackIncomplete as error:  # the kernel may hold the GPU: leave it alone
            self._fail(names, error)
        except VfiomgrError as error:
            if isinstance(error.__cause__, KeyboardInterrupt):
                raise
            if len(batch) > 1:
                for candidate in batch:
                    self._bring_about([candidate])
            else:
                self._fail(names, error)
        else:
            self._restored.update(names if outcome.is_changed else ())

    def _fail(self, names: Sequence[str], error: VfiomgrError) -> None:
        reason = f"{error.message}; {error.hint}" if error.hint else error.message
        self._failures.update(dict.fromkeys(names, reason))

    def _told(self, candidate: RestorableVgpu) -> Restored:
        told = Restored(candidate.name, candidate.parent, candidate.type, "already")
        failure = self._failures.get(candidate.name) or self._failures.get(candidate.after or "")
        if failure is not None:
            return replace(told, state="failed", reason=failure)
        if candidate.why_not is not None:
            state: State = "waiting" if candidate.is_waiting else "failed"
            return replace(told, state=state, reason=candidate.why_not)
        if candidate.name in self._restored:
            return replace(told, state="restored")
        notes = candidate.plan.notes if candidate.plan else ()
        return replace(told, reason="; ".join(notes) or None)
