"""Takes devices from the host for a guest that starts, and gives them back when it has ended.

What is going to be taken is written down before it is: cut off in between, the guest's release,
which libvirt asks for where the start fails too, gives back what had been taken by then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.definitions.requests import StartVgpu
from vfiomgr.engine.transaction import apply
from vfiomgr.errors import UsageError
from vfiomgr.libvirt.hook.model import GUESTS, GuestRecord, parse_record
from vfiomgr.libvirt.hook.plan import needs_of, returns_of, taken_by

if TYPE_CHECKING:
    from vfiomgr.engine.plan import Plan
    from vfiomgr.engine.request import Request
    from vfiomgr.engine.transaction import ApplyContext
    from vfiomgr.libvirt.model import Domain


class GuestHook:
    """What is done for one guest."""

    def __init__(self, domain: Domain, work: ApplyContext) -> None:
        """Of a domain as libvirt tells its hook of it.

        Raises:
            UsageError: it has no UUID, by which its record is found again.

        """
        if domain.uuid is None:
            message = f"the domain {domain.name} has no <uuid>, by which the hook knows guests"
            raise UsageError(message, "libvirt gives one to its hook: virsh dumpxml prints it")
        self._uuid = domain.uuid
        self._domain = domain
        self._work = work
        self._tree = work.tree

    def prepare(self) -> tuple[str, ...]:
        """Make the guest's devices ready for it; what was taken from the host.

        Raises:
            Refusal: one cannot be; none was taken.

        """
        before = self._record()
        try:
            for request in needs_of(self._work.scan(), self._domain, before).intents():
                self._take(request)
        except BaseException:
            self._give_back(before)
            raise
        after = self._record()
        return tuple(n for n in _names(after) if n not in _names(before))

    def release(self) -> tuple[str, ...]:
        """Give back what was taken for the guest; what it was."""
        return self._give_back(GuestRecord(self._uuid, self._domain.name))

    def _take(self, request: Request) -> None:
        def note(plan: Plan) -> None:
            vgpus = request.names if isinstance(request, StartVgpu) else ()
            self._keep(self._record().with_taken(taken_by(plan), vgpus))

        apply(request, replace(self._work, on_plan=note))

    def _give_back(self, remaining: GuestRecord) -> tuple[str, ...]:
        """All that is recorded but for what remains; the record goes once the host has it."""
        record = self._record()
        going = GuestRecord(
            record.uuid,
            record.name,
            tuple(name for name in record.functions if name not in remaining.functions),
            tuple(name for name in record.vgpus if name not in remaining.vgpus),
        )
        for request in returns_of(self._work.scan(), going):
            apply(request, self._work)
        self._keep(remaining)
        return _names(going)

    def _record(self) -> GuestRecord:
        empty = GuestRecord(self._uuid, self._domain.name)
        text = self._tree.read_text(empty.path)
        return empty if text is None else parse_record(self._uuid, text)

    def _keep(self, record: GuestRecord) -> None:
        if record.is_empty:
            self._tree.remove(record.path)
            return
        self._tree.make_directory(GUESTS)
        self._tree.replace(record.path, record.render().encode(), durable=False)


def _names(record: GuestRecord) -> tuple[str, ...]:
    return (*record.functions, *record.vgpus)
