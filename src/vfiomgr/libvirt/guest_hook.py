"""The work of libvirt's hook: take devices for a guest that starts, and return them when it ends.

A device is recorded before it is taken. If the run is interrupted, the release of the guest, which
libvirt requests even if the start fails, returns what was taken until then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.definitions.requests import StartVgpu
from vfiomgr.diagnostic import refuse_if_any
from vfiomgr.engine.transaction import apply
from vfiomgr.errors import UsageError
from vfiomgr.libvirt.checks import check_domains
from vfiomgr.libvirt.hook import GUESTS, GuestRecord, needs_of, parse_record, returns_of, taken_by
from vfiomgr.tuning.model import TUNED, parse_tuned
from vfiomgr.tuning.steps import RestoreHost

if TYPE_CHECKING:
    from vfiomgr.engine.host import ManagedHost
    from vfiomgr.engine.plan import Plan, Request
    from vfiomgr.engine.transaction import ApplyContext
    from vfiomgr.libvirt.model import Domain


class GuestHook:
    """The hook's work for one guest."""

    def __init__(self, domain: Domain, work: ApplyContext) -> None:
        """Read the domain that libvirt passes to its hook.

        Raises:
            UsageError: it has no UUID, which identifies its record.

        """
        if domain.uuid is None:
            message = f"domain {domain.name} has no <uuid>, which identifies guests for the hook"
            raise UsageError(message, "pass the XML that virsh dumpxml prints")
        self._uuid = domain.uuid
        self._domain = domain
        self._work = work
        self._tree = work.tree

    def prepare(self) -> tuple[str, ...]:
        """Make the guest's devices available to it; return what was taken from the host.

        Raises:
            Refusal: a device cannot be made available; nothing was taken.

        """
        before, was_tuned = self._record(), self._is_tuned()
        try:
            for request in needs_of(self._work.scan(), self._domain, before).intents():
                self._take(request)
        except BaseException:
            try:
                self._give_back(before)
            finally:
                if not was_tuned:
                    self._restore_host()
            raise
        after = self._record()
        return tuple(n for n in _names(after) if n not in _names(before))

    def release(self) -> tuple[str, ...]:
        """Return what was taken for the guest to the host."""
        try:
            return self._give_back(GuestRecord(self._uuid, self._domain.name))
        finally:
            self._restore_host()

    def _take(self, request: Request) -> None:
        def note(plan: Plan) -> None:
            vgpus = request.names if isinstance(request, StartVgpu) else ()
            self._keep(self._record().with_taken(taken_by(plan), vgpus))

        apply(request, replace(self._work, on_plan=note))

    def _give_back(self, remaining: GuestRecord) -> tuple[str, ...]:
        """Return all recorded devices except the remaining ones; then delete the record."""
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

    def _is_tuned(self) -> bool:
        """Whether the host was changed for the guest, besides its devices."""
        found = parse_tuned(self._tree.read_text(TUNED))
        return any(guest.uuid == self._uuid for guest in found)

    def _restore_host(self) -> None:
        if self._is_tuned():
            apply(RestoreHost(self._uuid, self._domain.name), self._work)

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


def prepare_guest(host: ManagedHost, domain: Domain) -> tuple[str, ...]:
    """Take what a starting guest needs from the host; return what was taken.

    Raises:
        Refusal: a device cannot be made available; nothing was taken.
        NeedsRoot: changes to the host require root; nothing was changed.

    """
    if domain.hook is not None and domain.hook.release:
        _refuse_failing_start(host, domain)
    with host.changing() as work:
        return GuestHook(domain, work).prepare()


_OF_HOOK = frozenset({"hook-not-installed", "hook-label", "hook-boolean"})
"""Rules about whether the hook runs."""


def _refuse_failing_start(host: ManagedHost, domain: Domain) -> None:
    """Refuse a guest that could not start before the desktop releases anything for it.

    Raises:
        Refusal: `check domain` finds a blocker, other than those of the hook itself, which runs.

    """
    (report,) = check_domains(host, [domain], None)
    blockers = (found for found in report.findings if found.severity == "blocker")
    refuse_if_any(found for found in blockers if found.rule not in _OF_HOOK)


def release_guest(host: ManagedHost, domain: Domain) -> tuple[str, ...]:
    """Return what `prepare_guest` took for a guest that has ended.

    Raises:
        Refusal: another guest uses it; it stays recorded.
        NeedsRoot: changes to the host require root; nothing was changed.

    """
    with host.changing() as work:
        return GuestHook(domain, work).release()
