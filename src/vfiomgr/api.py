"""The Python interface: scan a host, plan a change, apply it.

tree = HostTree("/")
host = api.scan(tree)
intent = Bind((host.parse_address("04:00.0"),))
print(api.plan(host, intent).steps)
api.apply(intent, tree=tree)
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from vfiomgr.errors import HostError, NeedsRoot, UsageError
from vfiomgr.executor.journal import Journal, cut_off_runs, supersede
from vfiomgr.executor.lock import hold
from vfiomgr.executor.run import Outcome
from vfiomgr.executor.run import run as run_plan
from vfiomgr.host.scan import scan as _scan
from vfiomgr.host.tree import HostTree
from vfiomgr.model.path import PCI_DRIVERS_PROBE
from vfiomgr.planner import plan

if TYPE_CHECKING:
    from collections.abc import Callable

    from vfiomgr.model.intent import Intent
    from vfiomgr.model.plan import Plan
    from vfiomgr.model.snapshot import HostSnapshot
    from vfiomgr.model.step import Step

__all__ = ["HostTree", "Outcome", "apply", "plan", "scan"]


def scan(
    tree: HostTree, machine: HostTree | None = None, *, with_users: bool = False
) -> HostSnapshot:
    """The facts of a host; names of hardware come from `machine` where `tree` has none."""
    return _scan(tree, machine or tree, with_users=with_users)


def apply(
    intent: Intent,
    *,
    tree: HostTree,
    machine: HostTree | None = None,
    on_note: Callable[[str], None] = lambda _message: None,
    on_step: Callable[[Step], None] = lambda _step: None,
) -> Outcome:
    """Plan an intent on the host as it is, and carry the plan out under its locks.

    `on_note` is told of waiting for another process, and of earlier runs that were cut off.

    Raises:
        Refusal: a guard forbids it; nothing was changed.
        NeedsRoot: the right to change the host is missing; nothing was changed.
        RolledBack, RollbackIncomplete: as `vfiomgr.executor.run.run`.

    """
    require_rights(tree)
    try:
        return _apply(intent, tree, machine, on_note, on_step)
    except OSError as error:
        message = f"vfiomgr cannot keep its records: {error}"
        raise HostError(
            message, "it writes to /var/lib/vfiomgr and /run/vfiomgr: is there room, and the right?"
        ) from error


def _apply(
    intent: Intent,
    tree: HostTree,
    machine: HostTree | None,
    on_note: Callable[[str], None],
    on_step: Callable[[Step], None],
) -> Outcome:
    host = scan(tree, machine, with_users=True)
    if host.users is None:
        message = "who holds devices cannot be seen: /proc hides the files of some process"
        raise HostError(message, "run as root of the host, with CAP_SYS_PTRACE in a container")
    lost = cut_off_runs(tree, host.boot_id)
    for run in lost:
        on_note(
            f"an earlier run was left half done: {run.summary}, in: {run.step}; "
            "the same command finishes it, the opposite one undoes it"
        )
    first = plan(host, intent)
    outcome = Outcome(first, is_changed=False)
    if not first.is_empty:
        with hold(tree, first.locks, on_note):
            outcome = _apply_locked(intent, first, tree, machine, on_step)
    for run in lost:
        if run.locks <= set(outcome.plan.locks):
            supersede(tree, run)
    return outcome


def _apply_locked(
    intent: Intent,
    first: Plan,
    tree: HostTree,
    machine: HostTree | None,
    on_step: Callable[[Step], None],
) -> Outcome:
    """Plan again, since the host may have changed while waiting for the locks, and run."""
    host = scan(tree, machine, with_users=True)
    current = plan(host, intent)
    if current.is_empty:
        return Outcome(current, is_changed=False)
    if not set(current.locks) <= set(first.locks):
        message = "the host's IOMMU groups changed while waiting for another vfiomgr"
        raise HostError(message, "run the command again")
    with Journal(tree, current, host.boot_id) as journal:
        return run_plan(current, tree=tree, journal=journal, on_step=on_step)


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
