"""A host that requests are planned for and applied to: what all commands and the library use."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Protocol, Self, TypedDict, Unpack

from msgspec.structs import replace

from vfiomgr import engine
from vfiomgr.diagnostic import REVERSIBLE, Override
from vfiomgr.engine.plan import Plan, Request, Step
from vfiomgr.engine.registry import plan
from vfiomgr.engine.survey import CutOff, Survey, survey, unusable
from vfiomgr.engine.unfinished import completed, inherited, interrupted
from vfiomgr.errors import NeedsRoot, chosen, require_known
from vfiomgr.host.tree import HostTree
from vfiomgr.paths import BOOT_ID, MACHINE
from vfiomgr.snapshot.scan import read_only_files
from vfiomgr.snapshot.source import HostSource

if TYPE_CHECKING:
    from vfiomgr.engine.run import Outcome
    from vfiomgr.snapshot.model import HostSnapshot


class NamedRequest(Protocol):
    """A request with devices, sizes and files written as on the command line."""

    def request(self, host: HostSource) -> Request:
        """The request for a host, which resolves short addresses and accounts."""


class Reports(TypedDict, total=False):
    """Callbacks for reading and changing a host; each is optional."""

    on_note: Callable[[str], None] | None
    """Called with notes for the reader: assumptions, omissions, waiting."""
    on_step: Callable[[Step], None] | None
    """Called with each step as it begins."""
    on_plan: Callable[[Plan], None] | None
    """Called with each plan that is run; a plan can lead to another one."""


class ManagedHost(HostSource):
    """A host: this machine, another root than /, or (`from_snapshot`) a recorded one.

    Each question reads the host again; `scan` returns a consistent state.

    `on_note`, `on_step` and `on_plan` are described in `Reports`.
    `deadline` is the time limit for one step in seconds; None for the default (60; for an
    initramfs 900).
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | HostTree = MACHINE,
        *,
        deadline: float | None = None,
        **reports: Unpack[Reports],
    ) -> None:
        if isinstance(root, HostTree):
            self.tree = self.files = root
            self.root = root.root
        else:
            self.root = os.fspath(root)
        require_known(reports, Reports)
        if deadline is not None and deadline <= 0:
            message = f"deadline must be above 0 seconds, not {deadline}"
            raise ValueError(message)
        self._deadline = deadline
        self._reports = reports

    @classmethod
    def from_snapshot(cls, snapshot: str | os.PathLike[str], **reports: Unpack[Reports]) -> Self:
        """The host that a file written by `vfiomgr snapshot` describes; read-only.

        Raises:
            UsageError: the file cannot be read.
            InvalidDocument: it is not a snapshot.
        """
        host = cls(**reports)
        host.snapshot = os.fspath(snapshot)
        host.scan()
        return host

    def on_note(self, text: str) -> None:
        """Pass a note to `on_note`."""
        report = self._reports.get("on_note")
        if report is not None:
            report(text)

    def plan(self, request: Request | NamedRequest, *, only_files: bool = False) -> Plan:
        """The steps that fulfil a request on the host as it is; nothing is changed.

        With `only_files` no devices are involved, so an image is sufficient.

        Raises:
            Refusal: a safety check forbids it.
            UsageError: the request contradicts itself, or names what the host does not have.
        """
        wanted = self.request(request)
        runs = tell_of_cut_off_runs(self)
        host = self.scan_or_image() if only_files else self.facts_for(wanted)
        earlier = tuple(interrupted(wanted, runs, host, self.files))
        made = completed(plan(host, wanted, inherited(earlier)), earlier)
        if only_files:
            return made
        return replace(made, not_checked=not_checked(host, wanted, made))

    def apply(
        self,
        request: Request | NamedRequest,
        *,
        reviewed: tuple[Step, ...] | None = None,
        only_files: bool = False,
    ) -> Outcome:
        """Plan a request on the host as it is, and run the plan: all of it, or nothing.

        With `reviewed`, the plan must have exactly these steps: `host.plan(request).steps`. With
        `only_files` no devices are involved, so an image is sufficient.

        Raises:
            Refusal: a safety check forbids it; nothing was changed.
            UsageError: as in `plan`, or the host is a recorded one; nothing was changed.
            NeedsRoot: the process may not change the host; nothing was changed.
            RolledBack: a step failed; everything is as it was before.
            RollbackIncomplete: a step and its rollback failed; the message says what is left.
            StuckInKernel: the kernel did not return from a step within the deadline.
        """
        self.require_live("a snapshot cannot be changed", "pass --dry-run to see the plan")
        wanted = self.request(request)
        tree = self.files if only_files else self.tree
        work = engine.ApplyContext(tree, reviewed=reviewed, **self.options)
        return engine.carry_out(wanted, work)

    def recover(
        self, *, finish: bool = False, allow: Iterable[Override] = (), undo: bool = False
    ) -> tuple[CutOff, ...]:
        """Roll back interrupted operations, newest first, or `finish` them; returns them.

        The return of a display to the desktop is finished, unless all are to be undone (`undo`).

        Raises:
            Refusal: the kernel has not returned yet, or a safety check forbids it.
            InvalidDocument: a journal cannot be read.
            VfiomgrError: as `apply`.
        """
        self.require_live("a snapshot has no journal", "run vfiomgr recover on the host itself")
        overridden = chosen("--allow", allow, REVERSIBLE)
        try:
            with self.changing(only_files=not self.files.is_live) as work:
                return engine.recover(work, overridden, finish=finish, undo=undo)
        except NeedsRoot:
            message = "recovering interrupted operations"
            raise NeedsRoot(message, has_plan=False) from None

    def interrupted(self) -> Survey:
        """The interrupted operations that `recover` handles; unreadable journals are noted too.

        Raises:
            UsageError: the host is a recorded one.
            NeedsRoot: this user may not read the journals.
        """
        self.require_live("a snapshot has no journal", "run vfiomgr recover on the host itself")
        try:
            left = survey(self.files, self.files.read(BOOT_ID))
        except PermissionError:
            message = "reading the journal of interrupted operations"
            raise NeedsRoot(message, has_plan=False) from None
        for text in unusable(left):
            self.on_note(text)
        return left

    @contextmanager
    def changing(self, *, only_files: bool = False) -> Iterator[engine.ApplyContext]:
        """Context for several changes that belong together; `apply` makes a single one.

        Raises:
            NeedsRoot: the process may not change the host.
        """
        work = engine.ApplyContext(self.files if only_files else self.tree, **self.options)
        with engine.prepared(work, only_files=only_files):
            yield work

    @property
    def options(self) -> engine.Options:
        """How changes are made, and the callbacks for them."""
        options: engine.Options = {
            "machine": self.machine,
            "on_note": self.on_note,
            "deadline": self._deadline,
        }
        if (on_step := self._reports.get("on_step")) is not None:
            options["on_step"] = on_step
        if (on_plan := self._reports.get("on_plan")) is not None:
            options["on_plan"] = on_plan
        return options

    def request(self, request: Request | NamedRequest) -> Request:
        """The request with its names resolved on this host: addresses, accounts, files.

        Raises:
            UsageError: a name cannot be read, or options contradict each other.
            TypeError: it is not a request, e.g. an address.
        """
        if isinstance(request, Request):
            return request
        if not hasattr(request, "request"):
            message = f"expected a request such as vfiomgr.Bind('04:00.0'), not {request!r:.60}"
            raise TypeError(message)
        return request.request(self)

    def facts_for(self, request: Request) -> HostSnapshot:
        """The facts needed to plan a request."""
        if self.snapshot is None and request.only_paths is not None:
            return read_only_files(self.files, request.only_paths)
        slots: frozenset[tuple[int, int, int]] = frozenset()
        if self.snapshot is None and request.needs_serials:
            slots = engine.slots_with_serials(self.tree, request)
        host = self.scan(
            with_users=True,
            with_resets=request.needs_resets,
            with_desktop=request.needs_desktop,
            with_gpu_modes=request.needs_gpu_modes,
            with_readiness=request.needs_readiness,
            only_types=request.named_types,
            about=request.only_functions,
            purpose=request.purpose,
            serials_of=slots,
        )
        if self.snapshot is not None or not request.further_paths:
            return host
        return engine.with_further_files(host, (request,), self.files)


def tell_of_cut_off_runs(host: HostSource) -> tuple[CutOff, ...]:
    """Note interrupted operations, and return them, if this user may read the journal."""
    if host.snapshot is not None:
        return ()
    boot_id = host.files.read(BOOT_ID)
    with suppress(PermissionError):
        left = survey(host.files, boot_id)
        for run in left.cut_off:
            host.on_note(
                f"interrupted operation: {run.summary}, in step: {run.step}; to roll it back: "
                "vfiomgr recover"
            )
        for text in unusable(left):
            host.on_note(text)
        return left.cut_off
    return ()


def not_checked(host: HostSnapshot, request: Request, plan: Plan) -> tuple[str, ...]:
    """What a plan for this host could not check, and what is missing for it."""
    if plan.steps and all(step.replaces is not None for step in plan.steps):
        return ()  # uses of devices do not matter for files
    return tuple(_not_checked(host, request))


def _not_checked(host: HostSnapshot, request: Request) -> Iterator[str]:
    if host.users.processes is None:
        yield "processes that use the devices: requires root on a running host"
        if host.users.host_uses is not None:
            yield "mounts in other namespaces and disks in exclusive use: requires root"
    if host.users.host_uses is None:
        yield "mounted file systems and the default route: no /proc on this host"
    yield from request.not_checked(host)
