"""The Python interface: scan a host, check it, plan a change, apply it.

tree = HostTree("/")
host = api.scan(tree)
intent = Bind((host.parse_address("04:00.0"),))
print(api.plan(host, intent).steps)
api.apply(intent, tree=tree)
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vfiomgr.errors import HostError, NeedsRoot, Refusal, StuckInKernel, UsageError, VfiomgrError
from vfiomgr.executor.applied import reversion
from vfiomgr.executor.journal import (
    CutOff,
    Journal,
    Unfinished,
    cut_off_runs,
    read_unfinished,
    runs_so_far,
    supersede,
)
from vfiomgr.executor.lock import hold
from vfiomgr.executor.run import DEADLINE, Outcome
from vfiomgr.executor.run import run as run_plan
from vfiomgr.executor.run import undo as undo_steps
from vfiomgr.host.accounts import find_owner
from vfiomgr.host.scan import scan as _scan
from vfiomgr.host.tree import HostTree
from vfiomgr.model.intent import (
    ApplyLayout,
    Bind,
    RevertLayout,
    named_functions,
    wants_gpu_modes,
    wants_resets,
    wished_layout,
)
from vfiomgr.model.path import BOOT_ID, MACHINE_ID, PCI_DEVICES, PCI_DRIVERS_PROBE
from vfiomgr.model.pci import UNKNOWN_CALL, PciAddress, is_address
from vfiomgr.model.plan import Plan
from vfiomgr.model.step import Step, subject
from vfiomgr.planner import plan, settled
from vfiomgr.planner.recovery import (
    Undoing,
    plan_undo,
    refuse_other_devices,
    refuse_other_steps,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from vfiomgr.executor.layout_watch import Changes, WatchEvent, Wish
    from vfiomgr.executor.restoration import Restored
    from vfiomgr.model.domain import Domain, Hypervisor
    from vfiomgr.model.intent import Allowance, Intent, RestoreVgpus
    from vfiomgr.model.layout import Layout
    from vfiomgr.model.persistence import PersistedBinding
    from vfiomgr.model.readiness import Report
    from vfiomgr.model.snapshot import HostSnapshot
    from vfiomgr.planner.layout import Comparison

__all__ = [
    "HostTree",
    "Outcome",
    "apply",
    "apply_each",
    "check",
    "layout_intent",
    "plan",
    "preflight",
    "recover",
    "restore",
    "revert",
    "scan",
    "watch",
    "watch_layout",
]

_PATIENCE = 10
"""Seconds to wait for a call of another program on a device."""
_MOST_PLANS = 8
"""Plans that one run carries out in turn; more would go round in circles."""
_NO_REPORT: Callable[[object], None] = lambda _: None  # noqa: E731 - a default for reports


def scan(  # noqa: PLR0913 - each is a question of its own, with a default
    tree: HostTree,
    machine: HostTree | None = None,
    *,
    with_users: bool = False,
    with_readiness: bool = False,
    with_resets: bool = False,
    with_gpu_modes: bool = False,
    serials_of: Iterable[PciAddress] = (),
) -> HostSnapshot:
    """The facts of a host; names of hardware come from `machine` where `tree` has none.

    `with_users` adds who holds devices, `with_readiness` what `check` judges, `with_resets` what
    configuration spaces say of resets, `with_gpu_modes` what nvidia-smi tells of vGPUs; serial
    numbers are read in the slots of `serials_of`.
    """
    return _scan(
        tree,
        machine or tree,
        with_users=with_users,
        with_readiness=with_readiness,
        with_resets=with_resets,
        with_gpu_modes=with_gpu_modes,
        serials_of=frozenset(address.slot for address in serials_of),
    )


def check(host: HostSnapshot) -> Report:
    """Whether the host of a scan `with_readiness` can give devices to guests."""
    from vfiomgr.planner.readiness import check as judge  # noqa: PLC0415 - few callers need it

    return judge(host)


def preflight(
    host: HostSnapshot,
    domains: Iterable[Domain],
    hypervisor: Hypervisor | None = None,
    files: Mapping[str, bool] | None = None,
) -> tuple[Report, ...]:
    """What would break the next start of each domain of libvirt on a host.

    The scan should be one `with_users` and `with_readiness`; what is missing of it, or of what
    libvirt tells, is not checked. `files` says which of the ROMs that domains name are there.
    """
    from vfiomgr.planner.preflight import preflight as judge  # noqa: PLC0415 - as `check`

    return judge(host, domains, hypervisor, files)


def apply(  # noqa: PLR0913 - all but the intent have defaults
    intent: Intent,
    *,
    tree: HostTree,
    machine: HostTree | None = None,
    on_note: Callable[[str], None] = _NO_REPORT,
    on_step: Callable[[Step], None] = _NO_REPORT,
    deadline: float | None = None,
    on_plan: Callable[[Plan], None] = _NO_REPORT,
    reviewed: tuple[Step, ...] | None = None,
) -> Outcome:
    """Plan an intent on the host as it is, and carry the plan out under its locks.

    `on_note` is told of waiting for another process, and of earlier runs that were cut off,
    `on_plan` of each plan that is carried out; `deadline` is how many seconds each step may take;
    with `reviewed`, the first plan must have these very steps.

    Raises:
        Refusal: a guard forbids it; nothing was changed.
        NeedsRoot: the right to change the host is missing; nothing was changed.
        RolledBack, RollbackIncomplete, StuckInKernel: as `vfiomgr.executor.run.run`.

    """
    work = _Work(tree, machine, on_note, on_step, deadline or DEADLINE, on_plan, reviewed)
    with _prepared(work):
        return _apply(intent, work)


def layout_intent(
    tree: HostTree | None,
    name: str,
    layout: Layout,
    *,
    allow: frozenset[Allowance] = frozenset(),
) -> ApplyLayout:
    """The wish for a layout, with what of the host it takes: accounts, and what names come from.

    Raises:
        UsageError: the host has no such account; without a tree, one is not a number.

    """
    from hashlib import sha256  # noqa: PLC0415 - slow to import

    owners = tuple(find_owner(tree, owner) for owner in layout.owners)
    machine = None if tree is None else tree.read(MACHINE_ID)
    # The identifier itself is confidential (machine-id(5)).
    seed = sha256(f"vfiomgr {machine}".encode()).hexdigest() if machine else ""
    return ApplyLayout(name, layout, owners, seed, allow)


def apply_each(  # noqa: PLR0913 - as `apply`
    intent: ApplyLayout,
    *,
    tree: HostTree,
    machine: HostTree | None = None,
    on_note: Callable[[str], None] = _NO_REPORT,
    on_step: Callable[[Step], None] = _NO_REPORT,
    deadline: float | None = None,
    on_plan: Callable[[Plan], None] = _NO_REPORT,
) -> tuple[tuple[str, Outcome | VfiomgrError], ...]:
    """Bring what can be of a host to a layout: one part that fails keeps no other from it.

    Each device that differs, with what came of it; one that is missing has no name.

    Raises:
        NeedsRoot: the right to change the host is missing; nothing was changed.

    """
    from vfiomgr.planner.layout import compare  # noqa: PLC0415 - few callers have a layout

    work = _Work(tree, machine, on_note, on_step, deadline or DEADLINE, on_plan)
    results: dict[str, Outcome | VfiomgrError] = {}
    with _prepared(work):
        while True:
            compared = compare(work.scan(intent), intent)
            names = dict.fromkeys(part.name for part in compared.parts if part.differences)
            wanted = (name for name in names if not intent.only or name in intent.only)
            left = [name for name in wanted if name not in results]
            if not left:
                break
            for name in left:  # and functions that one of them makes are there the next time
                results[name] = _result(replace(intent, only=(name,)), work)
    missing = (("", Refusal(o.reason, o.remedy)) for o in compared.objections)
    return (*missing, *results.items())


def _result(intent: ApplyLayout, work: _Work) -> Outcome | VfiomgrError:
    try:
        return _apply(intent, work)
    except VfiomgrError as error:
        if isinstance(error.__cause__, KeyboardInterrupt):
            raise
        return error


def revert(  # noqa: PLR0913 - all have defaults but the tree
    *,
    tree: HostTree,
    machine: HostTree | None = None,
    allow: frozenset[Allowance] = frozenset(),
    on_note: Callable[[str], None] = _NO_REPORT,
    on_step: Callable[[Step], None] = _NO_REPORT,
    deadline: float | None = None,
    on_plan: Callable[[Plan], None] = _NO_REPORT,
) -> Outcome:
    """Take back the layout that was applied last, with later corrections of it.

    Raises:
        Refusal: there is none, or somebody holds what would be moved.

    """
    return apply(
        reversion(tree, tree.read(BOOT_ID), allow),
        tree=tree,
        machine=machine,
        on_note=on_note,
        on_step=on_step,
        deadline=deadline,
        on_plan=on_plan,
    )


def recover(  # noqa: PLR0913 - all have defaults but the tree
    *,
    tree: HostTree,
    machine: HostTree | None = None,
    finish: bool = False,
    allow: frozenset[Allowance] = frozenset(),
    on_note: Callable[[str], None] = _NO_REPORT,
    on_step: Callable[[Step], None] = _NO_REPORT,
    deadline: float | None = None,
) -> tuple[CutOff, ...]:
    """End the runs that were left half done: undo them, the latest first, or `finish` them.

    Raises:
        Refusal: the kernel has still not returned, or a guard speaks against it.
        InvalidDocument: a journal cannot be read.
        RollbackIncomplete, RolledBack, StuckInKernel: ending one failed as well.

    """
    work = _Work(tree, machine, on_note, on_step, deadline or DEADLINE)
    with _prepared(work):
        ended: list[CutOff] = []
        refused: list[Refusal] = []
        runs = cut_off_runs(tree, work.scan().boot_id)
        for run in runs if finish else reversed(runs):
            try:
                if finish:
                    _finish(run, work)
                else:
                    _undo(run, work, allow)
            except Refusal as refusal:
                refused.append(refusal)  # what is stuck keeps no other run from being ended
            else:
                ended.append(run)
        if refused:
            for run in ended:
                on_note(f"{'finished' if finish else 'undone'}: {run.summary}")
            raise refused[0]
        return tuple(ended)


def restore(  # noqa: PLR0913 - all but the tree have defaults
    intent: RestoreVgpus,
    *,
    tree: HostTree,
    machine: HostTree | None = None,
    on_note: Callable[[str], None] = _NO_REPORT,
    on_step: Callable[[Step], None] = _NO_REPORT,
    deadline: float | None = None,
) -> tuple[Restored, ...]:
    """Bring about the vGPUs that start by themselves; one that fails keeps no other from it.

    Raises:
        NeedsRoot: the right to change the host is missing; nothing was changed.

    """
    from vfiomgr.executor.restoration import Restoration  # noqa: PLC0415 - one command's own

    told: set[str] = set()

    def note_once(text: str) -> None:
        if text not in told:
            told.add(text)
            on_note(text)

    work = _Work(tree, machine, note_once, on_step, deadline or DEADLINE)
    with _prepared(work):
        return Restoration(intent, lambda: work.scan(intent), lambda part: _apply(part, work)).run()


def functions_by_serial(tree: HostTree, intent: Intent) -> tuple[PciAddress, ...]:
    """The functions whose serial numbers an intent needs: those it names, or all."""
    wish = wished_layout(intent)
    if wish is not None and wish.layout.selects_by_serial:
        return tuple(map(PciAddress.parse, filter(is_address, tree.children(PCI_DEVICES))))
    return named_functions(intent)


@dataclass(frozen=True)
class _Work:
    """What all parts of a change need."""

    tree: HostTree
    machine: HostTree | None
    on_note: Callable[[str], None]
    on_step: Callable[[Step], None]
    deadline: float
    on_plan: Callable[[Plan], None] = _NO_REPORT
    reviewed: tuple[Step, ...] | None = None
    """What the plan must begin with, where a person has looked at it."""

    def scan(self, intent: Intent | None = None) -> HostSnapshot:
        """The host with all that a change must know."""
        host = scan(
            self.tree,
            self.machine,
            with_users=True,
            with_resets=intent is not None and wants_resets(intent),
            with_gpu_modes=intent is not None and wants_gpu_modes(intent),
            serials_of=() if intent is None else functions_by_serial(self.tree, intent),
        )
        if host.users is None:
            message = "who holds devices cannot be seen: /proc hides the files of some process"
            raise HostError(message, "run as root of the host, with CAP_SYS_PTRACE in a container")
        return host


@contextmanager
def _prepared(work: _Work) -> Iterator[None]:
    """Make sure that changes can be made and recorded, and tell who holds what is stuck."""
    require_rights(work.tree)
    try:
        yield
    except StuckInKernel as stuck:
        raise _with_holders(stuck, work) from stuck
    except OSError as error:
        message = f"vfiomgr cannot keep its records: {error}"
        raise HostError(
            message, "it writes to /var/lib/vfiomgr and /run/vfiomgr: is there room, and the right?"
        ) from error


def _plan_patiently(intent: Intent, host: HostSnapshot, work: _Work) -> tuple[HostSnapshot, Plan]:
    """Plan; wait a while for a device that another program has under way, perhaps a `bind`."""
    for _ in range(_PATIENCE):
        try:
            return host, plan(host, intent)
        except Refusal:
            if all(device.stuck != UNKNOWN_CALL for device in host.devices):
                raise
        time.sleep(1)
        host = work.scan(intent)
    return host, plan(host, intent)


def _apply(intent: Intent, work: _Work) -> Outcome:
    seen = runs_so_far(work.tree)
    host = work.scan(intent)
    lost = cut_off_runs(work.tree, host.boot_id)
    for run in lost:
        work.on_note(
            f"an earlier run was left half done: {run.summary}, in: {run.step}; "
            "vfiomgr recover undoes it, recover --finish completes it"
        )
    host, first = _plan_patiently(intent, host, work)
    outcome = Outcome(first, is_changed=False)
    if not first.is_empty:
        with hold(work.tree, first.locks, work.on_note):
            if runs_so_far(work.tree) != seen:
                host = work.scan(intent)  # another vfiomgr was at work meanwhile
                _refuse_stale(intent, work.tree)
            outcome = _apply_locked(intent, host, first, work)
    for run in lost:
        if run.is_settled_by(outcome.plan):
            supersede(work.tree, run)
    return outcome


def _refuse_stale(intent: Intent, tree: HostTree) -> None:
    """Make sure that what is to be reverted is still what was applied last.

    Raises:
        Refusal: another process applied, or reverted, a layout meanwhile.

    """
    if isinstance(intent, RevertLayout) and not intent.is_same_as(
        reversion(tree, tree.read(BOOT_ID), intent.allow)
    ):
        message = "another vfiomgr applied or reverted a layout meanwhile"
        raise Refusal(message, "look at vfiomgr revert --dry-run, and run the command again")


def _apply_locked(intent: Intent, host: HostSnapshot, first: Plan, work: _Work) -> Outcome:
    """Plan on the host as it is under the locks, and run."""
    current = plan(host, intent)
    if current.is_empty:
        return Outcome(current, is_changed=False)
    if not set(current.locks) <= set(first.locks):
        message = "the host's IOMMU groups changed while waiting for another vfiomgr"
        raise HostError(message, "run the command again")
    if work.reviewed is not None:
        refuse_other_steps(current.steps, work.reviewed)
    intent = settled(host, intent)
    work.on_plan(current)
    with (
        ExitStack() as further_locks,
        Journal.create(work.tree, current, intent, host.boot_id) as journal,
    ):
        return run_plan(
            current,
            tree=work.tree,
            journal=journal,
            on_step=work.on_step,
            deadline=work.deadline,
            go_on=_Following(intent, current, work, journal, further_locks),
        )


class _Following:
    """The plans for what could not be planned before: of functions that the run itself makes."""

    def __init__(
        self, intent: Intent, first: Plan, work: _Work, journal: Journal, locks: ExitStack
    ) -> None:
        self._intent = intent
        self._last = first
        self._work = work
        self._journal = journal
        self._locks = locks
        self._held = set(first.locks)
        self._left = _MOST_PLANS

    def __call__(self) -> Plan | None:
        """The next plan, recorded and with its locks held; None once all is done.

        Raises:
            Refusal: what is left cannot be done.
            HostError: another process changes it.

        """
        if not self._last.later:
            return None
        self._left -= 1
        seen = runs_so_far(self._work.tree)
        following = plan(self._work.scan(self._intent), self._intent)
        if following.is_empty:
            return None  # what was to follow is so already
        if not self._left:
            message = f"this does not come about: {'; '.join(self._last.later)}"
            raise HostError(message, "vfiomgr plan shows what is left; see dmesg")
        new = set(following.locks) - self._held
        self._locks.enter_context(hold(self._work.tree, new, self._work.on_note, wait=False))
        self._held |= new
        if runs_so_far(self._work.tree) != seen:
            following = plan(self._work.scan(self._intent), self._intent)
        if not set(following.locks) <= self._held:
            message = "another vfiomgr changed meanwhile what this run was about to change"
            raise HostError(message, "run the command again")
        self._journal.extend(following)
        self._work.on_plan(following)
        self._last = following
        return following


def _undo(run: CutOff, work: _Work, allow: frozenset[Allowance]) -> None:
    """Undo what a run had begun, as far as its devices are still there.

    It is planned twice: a child that is stuck in the kernel keeps the locks of its run, and
    nobody should wait for those.
    """
    _plan_undo(run, work, allow)
    with hold(work.tree, run.locks, work.on_note):
        if run not in cut_off_runs(work.tree, work.scan().boot_id):
            return  # another process has ended it meanwhile
        left, undoing = _plan_undo(run, work, allow)
        for text in undoing.notes:
            work.on_note(text)
        with Journal.resume(work.tree, run.name) as journal:
            undo_steps(
                left.steps, undoing.steps, tree=work.tree, journal=journal, deadline=work.deadline
            )


def _plan_undo(run: CutOff, work: _Work, allow: frozenset[Allowance]) -> tuple[Unfinished, Undoing]:
    left = read_unfinished(work.tree, run.name)
    host = work.scan(left.intent)
    is_of_this_boot = run.is_of_this_boot
    undoing = plan_undo(host, left.steps, left.begun, allow, is_of_this_boot=is_of_this_boot)
    return left, undoing


def _finish(run: CutOff, work: _Work) -> None:
    """Do what the run was to do, with the devices that it was to do it with."""
    left = read_unfinished(work.tree, run.name)
    refuse_other_devices(work.scan(left.intent), left.steps)
    intent = left.intent
    if isinstance(intent, ApplyLayout):
        begun = map(subject, (left.steps[number] for number in left.begun))
        intent = replace(intent, begun=tuple(dict.fromkeys((*intent.begun, *filter(None, begun)))))
    _apply(intent, work)
    if run in cut_off_runs(work.tree, work.scan().boot_id):
        supersede(work.tree, run)


def _with_holders(stuck: StuckInKernel, work: _Work) -> StuckInKernel:
    """The error with the processes that keep the kernel waiting."""
    host = work.scan()
    devices = [device for device in host.devices if str(device.address) in stuck.devices]
    vgpus = [vgpu for vgpu in host.vgpus if vgpu.name in stuck.devices]
    held = [user for device in devices for user in host.holders(device)]
    held += [user for vgpu in vgpus for user in host.holders(vgpu)]
    names = [str(user) for user in held]
    by = f", held by {', '.join(dict.fromkeys(names))}" if names else ", and no holder is seen"
    return StuckInKernel(
        stuck.message + by,
        stuck.devices,
        pid=stuck.pid,
        locks=stuck.locks,
        hint=f"{'end what holds it' if names else 'see dmesg'}; once the kernel has returned, "
        "vfiomgr recover undoes what was begun, recover --finish completes it",
    )


def watch(tree: HostTree, *, on_note: Callable[[str], None]) -> None:
    """Keep persisted functions on their drivers as they are hot-plugged, until the process ends.

    Raises:
        NeedsRoot: the right to change the host is missing.

    """
    from vfiomgr.executor.watch import watch as watch_arrivals  # noqa: PLC0415 - one command's own

    require_rights(tree)
    watch_arrivals(tree, on_note, lambda lost: put_right(lost, tree=tree, on_note=on_note))


def watch_layout(  # noqa: PLR0913 - all but what is watched have defaults
    wish: Wish,
    changes: Changes,
    *,
    tree: HostTree,
    machine: HostTree | None = None,
    tell: Callable[[WatchEvent], None],
    enforce: bool = False,
    on_note: Callable[[str], None] = _NO_REPORT,
    deadline: float | None = None,
) -> None:
    """Tell what differs from a layout as it comes and goes, until the process is interrupted.

    With `enforce`, put it right, by the rules of `apply_each`. (`watch` is about functions that
    `bind --persist` keeps, and about nothing but their arrival.)

    Raises:
        NeedsRoot: with `enforce`, the right to change the host is missing.
        RolledBack, RollbackIncomplete: a correction was interrupted.

    """
    from vfiomgr.executor.layout_watch import LayoutWatch, follow  # noqa: PLC0415 - its own
    from vfiomgr.planner.layout import compare  # noqa: PLC0415 - few callers have a layout

    def compared(intent: ApplyLayout) -> Comparison:
        host = scan(
            tree,
            machine,
            with_users=True,
            with_resets=True,
            with_gpu_modes=True,
            serials_of=functions_by_serial(tree, intent),
        )
        return compare(host, intent)

    def correct(intent: ApplyLayout, name: str) -> Outcome | VfiomgrError | None:
        results = apply_each(
            replace(intent, only=(name,)),
            tree=tree,
            machine=machine,
            on_note=on_note,
            deadline=deadline,
        )
        return dict(results).get(name)

    if enforce:
        require_rights(tree)
    follow(LayoutWatch(wish, compared, tell, correct if enforce else None), changes)


def put_right(
    bindings: Sequence[PersistedBinding], *, tree: HostTree, on_note: Callable[[str], None]
) -> None:
    """Bind what a host driver took first, with the guards of `bind`, and tell what came of it.

    The console's display is taken: a person allowed it, or there would be no rule.
    """
    allow: frozenset[Allowance] = frozenset({"boot-display"})
    for slot in sorted({binding.address.slot for binding in bindings}):
        here = [binding for binding in bindings if binding.address.slot == slot]
        addresses = tuple(binding.address for binding in here)
        intent = Bind(addresses, driver=here[0].driver, only=True, allow=allow)
        try:
            apply(intent, tree=tree, on_note=on_note)
        except VfiomgrError as error:  # and the others are put right all the same
            if isinstance(error.__cause__, KeyboardInterrupt):
                raise
            on_note(f"{error.message}; {error.hint}")
        else:
            on_note(f"{', '.join(map(str, addresses))} put on {here[0].driver}")


def require_rights(tree: HostTree) -> None:
    """Make sure that this process can change the host at all.

    Raises:
        UsageError: the tree is a recording.
        HostError: sysfs is mounted read-only.
        NeedsRoot: this user has no right to.

    """
    if not tree.is_live:
        message = f"{tree.root} is a recorded host: no kernel acts on what is written there"
        raise UsageError(message, "pass --dry-run to see the plan")
    if os.access(tree.locate(PCI_DRIVERS_PROBE), os.W_OK):
        return
    if os.geteuid() != 0:
        raise NeedsRoot
    message = "the kernel's device files cannot be written: /sys is read-only here"
    raise HostError(message, "run vfiomgr on the host, or in a privileged container")
