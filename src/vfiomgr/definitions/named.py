"""Names of vGPU definitions, and the restore of autostart vGPUs."""

from __future__ import annotations

import uuid as uuids
from itertools import groupby
from typing import TYPE_CHECKING, Literal

from msgspec.structs import replace

from vfiomgr.definitions.plan import canonical, find_type, types_of
from vfiomgr.definitions.requests import RestoreVgpus
from vfiomgr.definitions.restore import RestorableVgpu, candidates
from vfiomgr.engine.transaction import apply, once
from vfiomgr.errors import RollbackIncomplete, VfiomgrError
from vfiomgr.value import Value
from vfiomgr.vgpu.named import uuid_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vfiomgr.engine.plan import Step
    from vfiomgr.engine.run import Outcome
    from vfiomgr.engine.transaction import ApplyContext
    from vfiomgr.library import Host
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.snapshot.source import HostSource
    from vfiomgr.vgpu.model import VgpuParent, VgpuType


State = Literal["restored", "already", "waiting", "failed"]


class Restored(Value):
    """The result for an autostart vGPU."""

    name: str
    parent: str
    type: str
    state: State
    reason: str | None = None
    """Why it failed, or what it waits for."""


def restore_vgpus(request: RestoreVgpus, work: ApplyContext) -> tuple[Restored, ...]:
    """Start all autostart vGPUs; a failure does not stop the others."""
    work = replace(work, on_note=once(work.on_note))
    return Restoration(request, lambda: work.scan(request), lambda part: apply(part, work)).run()


class Restoration:
    """One run over all autostart vGPUs."""

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
        """Names and steps that were tried; a GPU may need further steps afterwards."""
        self._restored: set[str] = set()
        self._failures: dict[str, str] = {}

    def run(self) -> tuple[Restored, ...]:
        """Repeat until nothing is left, because vGPUs follow after their GPU is prepared."""
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
        """Start all at once; if that fails, start each one separately."""
        names = tuple(candidate.name for candidate in batch)
        self._tried.update((c.name, c.plan.steps) for c in batch if c.plan is not None)
        try:
            outcome = self._apply(replace(self._request, only=names))
        except RollbackIncomplete as error:  # the GPU may be stuck in the kernel
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


def restore(host: Host, parent: str | None = None, *, boot: bool = False) -> tuple[Restored, ...]:
    """Start all autostart vGPUs (of `parent`); a failure does not stop the others.

    With `boot`, vGPUs that mdevctl starts at boot are left to it.

    Raises:
        NeedsRoot: changing the host requires root; nothing was changed.

    """
    with host.changing() as work:
        return restore_vgpus(RestoreVgpus(parent, boot=boot), work)


def name_to_define(host: HostSource, parent: str | None, uuid: str | None) -> str:
    """The given UUID, the address of a virtual function, or a random UUID.

    Raises:
        UsageError: `uuid` is invalid.

    """
    if uuid is not None:
        return uuid_of(uuid)
    place = canonical(parent or "")
    parents = host.scan_devices().vgpu_parents
    if any(known.name == place and known.family == "vendor-vfio" for known in parents):
        return place
    return str(uuids.uuid4())


def type_of(host: HostSnapshot, parent: VgpuParent, wanted: str, where: str) -> VgpuType:
    """Find a type by name on a parent or on others of its GPU; `where` names it in errors.

    Raises:
        UnknownDevice: the type is not found.

    """
    return find_type(types_of(host, parent), wanted, where)
