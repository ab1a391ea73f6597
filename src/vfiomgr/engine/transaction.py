"""A change from its request to its end: scans the host, plans, takes the locks, runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, TypedDict

from msgspec.structs import replace

from vfiomgr.engine.journal import Journal, runs_so_far
from vfiomgr.engine.locks import hold, require_file_rights, require_rights
from vfiomgr.engine.plan import DEADLINE, Checkpoint, Plan, Request, Step
from vfiomgr.engine.registry import after_changes, plan, refuse_obsolete, resolve
from vfiomgr.engine.run import Outcome
from vfiomgr.engine.run import run as run_plan
from vfiomgr.engine.survey import Survey, refuse_lost_state, settle, supersede, survey, unusable
from vfiomgr.engine.unfinished import completed, inherited, interrupted, refuse_other_steps
from vfiomgr.errors import HostError, Refusal, StuckInKernel
from vfiomgr.host.tree import HostTree
from vfiomgr.paths import PCI_DEVICES
from vfiomgr.pci.model import UNKNOWN_CALL, PciAddress, is_address
from vfiomgr.snapshot.scan import read_only_files, scan, with_files
from vfiomgr.users.uses import with_present_uses
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.engine.unfinished import Interrupted
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.users.model import DeviceUser


def scan_for(
    request: Request | None,
    tree: HostTree,
    machine: HostTree | None,
    others: Iterable[Request] = (),
    *,
    with_claims: bool = True,
) -> HostSnapshot:
    """The host with its users and all other facts that a request, and `others`, need.

    Without a request, nothing is taken from the host, so no disk is opened to check its use.
    """
    requests = [one for one in (request, *others) if one is not None]
    paths = [one.only_paths for one in requests]
    if paths and all(only is not None for only in paths):
        named = dict.fromkeys(path for only in paths for path in only or ())
        return read_only_files(tree, named)
    host = scan(
        tree,
        machine or tree,
        with_users=True,
        with_claims=with_claims and bool(requests),
        with_resets=any(one.needs_resets for one in requests),
        with_desktop=any(one.needs_desktop for one in requests),
        with_gpu_modes=any(one.needs_gpu_modes for one in requests),
        only_types=_named_types(requests),
        about=_named_functions(requests),
        serials_of=frozenset(slot for one in requests for slot in slots_with_serials(tree, one)),
    )
    return with_further_files(host, requests, tree)


def with_further_files(
    host: HostSnapshot, requests: Iterable[Request], tree: HostTree
) -> HostSnapshot:
    """Add the files that only these requests change."""
    paths = dict.fromkeys(path for one in requests for path in one.further_paths)
    return with_files(tree, host, paths) if paths else host


def _named_types(requests: Iterable[Request]) -> frozenset[str] | None:
    """The vGPU types that several requests name; None if one of them needs all."""
    named = [one.named_types for one in requests]
    if not named or any(types is None for types in named):
        return None
    return frozenset(name for types in named for name in types or ())


def _named_functions(requests: Iterable[Request]) -> frozenset[PciAddress] | None:
    """The functions that several requests are about; None if one needs all."""
    named = [one.only_functions for one in requests]
    if not named or any(functions is None for functions in named):
        return None
    return frozenset(address for functions in named for address in functions or ())


def slots_with_serials(tree: HostTree, request: Request) -> frozenset[tuple[int, int, int]]:
    """The slots whose serial numbers a request needs: the named ones, or all."""
    if request.needs_serials:
        names = filter(is_address, tree.children(PCI_DEVICES))
        return frozenset(PciAddress.parse(name).slot for name in names)
    return frozenset(address.slot for address in request.named_functions)


_PATIENCE = 10
"""Seconds to wait for another program's operation on a device."""
_MOST_PLANS = 8
"""Maximum number of consecutive plans of one run, against endless loops."""
_NO_REPORT: Callable[[object], None] = lambda _: None  # noqa: E731 - a default for reports


class Options(TypedDict, total=False):
    """How a change is made, and its callbacks; all optional."""

    machine: HostTree | None
    """Where hardware names are looked up if the changed tree has none."""
    on_note: Callable[[str], None]
    """Called when another process is waited for, and for interrupted operations."""
    on_step: Callable[[Step], None]
    """Called with each step as it begins."""
    on_plan: Callable[[Plan], None]
    """Called with each plan that is carried out."""
    deadline: float | None
    """Time limit for each step in seconds; None for the default."""


class ApplyContext(Value):
    """A tree and the options of a change to it."""

    tree: HostTree
    machine: HostTree | None = None
    on_note: Callable[[str], None] = _NO_REPORT
    on_step: Callable[[Step], None] = _NO_REPORT
    on_plan: Callable[[Plan], None] = _NO_REPORT
    deadline: float | None = None
    reviewed: tuple[Step, ...] | None = None
    """The steps that the plan must begin with, if a person has reviewed it."""

    @property
    def limit(self) -> float:
        """Time limit for each step in seconds."""
        return self.deadline or DEADLINE

    def needs_kernel(self, request: Request) -> bool:
        """Whether a request requires a running host; images and recordings only have files."""
        return self.tree.is_live or not request.is_about_files

    def scan(self, request: Request | None = None, *others: Request) -> HostSnapshot:
        """The host with all facts that a change needs, or several that are undone together.

        Raises:
            UnknownDevice: a request names a function that does not exist, whoever uses the others.
            HostError: the processes that use devices are not visible.
        """
        host = scan_for(request, self.tree, self.machine, others)
        if host.users.processes is None and (
            request is None or any(map(self.needs_kernel, (request, *others)))
        ):
            for one in filter(None, (request, *others)):
                for address in () if one.is_about_files else one.named_functions:
                    host.device(address)
            message = "cannot see which processes use devices: /proc hides files of some processes"
            raise HostError(message, "run as root of the host, with CAP_SYS_PTRACE in a container")
        return host


def once(report: Callable[[str], None]) -> Callable[[str], None]:
    """A reporter that reports each text only once."""
    told: set[str] = set()

    def report_once(text: str) -> None:
        if text not in told:
            told.add(text)
            report(text)

    return report_once


def carry_out(request: Request, work: ApplyContext) -> Outcome:
    """Plan a request on the host as it is, and carry out the plan under its locks."""
    only_files = request.only_paths is not None or not work.needs_kernel(request)
    with prepared(work, only_files=only_files):
        return apply(request, work)


@contextmanager
def prepared(work: ApplyContext, *, only_files: bool = False) -> Iterator[None]:
    """Require that changes can be made and recorded.

    After the change, the files for container runtimes follow the devices. If no devices are
    involved, the tree does not have to be a running host.
    """
    (require_file_rights if only_files else require_rights)(work.tree)
    try:
        yield
        if not only_files:
            for follow in after_changes():
                follow(work)
    except OSError as error:
        message = f"cannot write vfiomgr's records: {error}"
        raise HostError(
            message, "check free space and permissions of /var/lib/vfiomgr and /run/vfiomgr"
        ) from error


def _with_holders(stuck: StuckInKernel, before: HostSnapshot, work: ApplyContext) -> StuckInKernel:
    """The error, extended by the processes that keep the kernel waiting.

    The kernel may have removed the names of a device's nodes by then, so they are also taken from
    the host as it was `before` the change.
    """
    now = work.scan()
    held: list[DeviceUser] = []
    for host in (before, now):
        devices = [device for device in host.devices if str(device.address) in stuck.devices]
        vgpus = [vgpu for vgpu in host.vgpus.active if vgpu.name in stuck.devices]
        held += [user for device in devices for user in now.holders(device)]
        held += [user for vgpu in vgpus for user in now.holders(vgpu)]
    names = [str(user) for user in held]
    by = f", in use by {', '.join(dict.fromkeys(names))}" if names else ", with no visible user"
    return StuckInKernel(
        stuck.message + by,
        stuck.devices,
        pid=stuck.pid,
        locks=stuck.locks,
        hint=f"{'end the process that uses it' if names else 'see dmesg'}; once the kernel has "
        "returned, roll back: vfiomgr recover; or complete: vfiomgr recover --finish",
    )


def apply(request: Request, work: ApplyContext, checkpoint: Checkpoint | None = None) -> Outcome:
    """Like `carry_out`, for one of several changes that were `prepared` together.

    `checkpoint` belongs to an interrupted run that this one finishes; without it, that of an
    interrupted run of the same request is used.
    """
    seen = runs_so_far(work.tree)
    host = work.scan(request)
    earlier = _Earlier(request, host, work)
    earlier.report()
    host, first = _plan_patiently(request, host, work, checkpoint or earlier.checkpoint)
    first = earlier.completed(first)
    refuse_lost_state(first, earlier.left, work.tree)
    if first.is_empty and not earlier.settled_by(first):
        return Outcome(first, is_changed=False)
    try:
        with hold(work.tree, first.locks, work.on_note):
            if runs_so_far(work.tree) != seen:
                host = work.scan(request)  # another vfiomgr may have changed the host
                earlier = _Earlier(request, host, work)
                refuse_obsolete(request, work.tree)
            elif not request.only_paths is not None:
                # A mount may have been added.
                users = with_present_uses(host.users, work.tree, host.devices)
                host = replace(host, users=users)
            checkpoint = checkpoint or earlier.checkpoint
            return _apply_locked(request, host, first, work, checkpoint, earlier)
    except StuckInKernel as stuck:
        raise _with_holders(stuck, host, work) from stuck


class _Earlier:
    """The interrupted runs that a request finds, and the steps of them that it completes."""

    def __init__(self, request: Request, host: HostSnapshot, work: ApplyContext) -> None:
        self._host, self._work = host, work
        self.left = survey(work.tree, host.kernel.boot_id)
        _close(work, self.left)
        self._runs = tuple(interrupted(request, self.left.cut_off, host, work.tree))
        self.checkpoint = inherited(self._runs)

    def report(self) -> None:
        """Note interrupted operations and unreadable journals."""
        repeated = [run.run for run in self._runs if run.is_repeated]
        for run in self.left.cut_off:
            remedy = (
                "this operation completes it"
                if run in repeated
                else "roll it back: vfiomgr recover; complete it: vfiomgr recover --finish"
            )
            text = f"an earlier operation was interrupted: {run.summary}, in step: {run.step}"
            self._work.on_note(f"{text}; {remedy}")
        for text in unusable(self.left):
            self._work.on_note(text)

    def completed(self, first: Plan) -> Plan:
        """A plan of the request, with the remaining steps of its interrupted runs."""
        return completed(first, self._runs)

    def settled_by(self, done: Plan) -> list[tuple[Interrupted, frozenset[int]]]:
        """The interrupted runs that a completed plan settles, with the settled steps."""
        tree = self._work.tree
        found = ((run, run.settled_by(done, self._host, tree)) for run in self._runs)
        return [(run, steps) for run, steps in found if steps is not None]

    def settle(self, done: Plan, by: str | None) -> None:
        """Record which steps a completed plan settles; `by` is its run, if it had steps."""
        for run, steps in self.settled_by(done):
            settle(self._work.tree, run.run, steps, by, self._work.on_note)
            for step in run.dropped_by(done, steps):
                what = f"a step of the interrupted operation is not done: {step.describe()}"
                self._work.on_note(f"{what}; to do it, run: {' && '.join(step.commands())}")

    def close(self) -> None:
        """Close the journals without open steps."""
        if self._runs:
            _close(self._work, survey(self._work.tree, self._host.kernel.boot_id))


def _close(work: ApplyContext, left: Survey) -> None:
    for run in left.settled:
        supersede(work.tree, run, work.on_note)


def _plan_patiently(
    request: Request, host: HostSnapshot, work: ApplyContext, checkpoint: Checkpoint | None
) -> tuple[HostSnapshot, Plan]:
    """Plan; wait a while for a device that another program is changing, possibly with `bind`."""
    for _ in range(_PATIENCE):
        try:
            return host, plan(host, request, checkpoint)
        except Refusal:
            if all(device.stuck != UNKNOWN_CALL for device in host.devices):
                raise
        time.sleep(1)
        host = work.scan(request)
    return host, plan(host, request, checkpoint)


def _apply_locked(  # noqa: PLR0913, PLR0917 - these are the results of `apply`
    request: Request,
    host: HostSnapshot,
    first: Plan,
    work: ApplyContext,
    checkpoint: Checkpoint | None,
    earlier: _Earlier,
) -> Outcome:
    """Plan on the host as it is under the locks, and run the plan."""
    current = earlier.completed(plan(host, request, checkpoint))
    if current.is_empty:
        earlier.settle(current, None)
        earlier.close()
        return Outcome(current, is_changed=False)
    if not set(current.locks) <= set(first.locks):
        message = "the host's IOMMU groups changed while waiting for another vfiomgr"
        raise HostError(message, "run the command again")
    if work.reviewed is not None:
        refuse_other_steps(current.steps, work.reviewed)
    checkpoint = resolve(host, request, checkpoint)
    work.on_plan(current)
    with (
        ExitStack() as further_locks,
        Journal.create(work.tree, current, request, host.kernel.boot_id, checkpoint) as journal,
    ):
        outcome = run_plan(
            current,
            tree=work.tree,
            journal=journal,
            on_step=work.on_step,
            deadline=work.limit,
            go_on=_Replanner(
                lambda: plan(work.scan(request), request, checkpoint),
                current,
                work,
                journal,
                further_locks,
            ),
            on_done=lambda done: earlier.settle(done, journal.name),
        )
    earlier.close()
    return outcome


class _Replanner:
    """Plans what could not be planned before: functions that the run itself creates."""

    def __init__(
        self,
        plan_again: Callable[[], Plan],
        first: Plan,
        work: ApplyContext,
        journal: Journal,
        locks: ExitStack,
    ) -> None:
        self._plan_again = plan_again
        self._last = first
        self._work = work
        self._journal = journal
        self._locks = locks
        self._held = set(first.locks)
        self._left = _MOST_PLANS

    def __call__(self) -> Plan | None:
        """The next plan, recorded and with its locks held; None when everything is done.

        Raises:
            Refusal: the rest cannot be done.
            HostError: another process is changing it.
        """
        if not self._last.deferred:
            return None
        self._left -= 1
        seen = runs_so_far(self._work.tree)
        following = self._plan_again()
        if following.is_empty:
            return None  # nothing is left to do
        if not self._left:
            message = f"cannot complete the plan: {'; '.join(self._last.deferred)}"
            raise HostError(message, "show what is left: vfiomgr plan; see dmesg")
        new = set(following.locks) - self._held
        self._locks.enter_context(hold(self._work.tree, new, self._work.on_note, wait=False))
        self._held |= new
        if runs_so_far(self._work.tree) != seen:
            following = self._plan_again()
        if not set(following.locks) <= self._held:
            message = "another vfiomgr changed devices that this run was about to change"
            raise HostError(message, "run the command again")
        self._journal.extend(following)
        self._work.on_plan(following)
        self._last = following
        return following
