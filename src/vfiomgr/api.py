"""Changes of the host below a tree; what programs use is `vfiomgr.library`, which is made of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

from msgspec.structs import replace

import vfiomgr.capabilities  # noqa: F401 - makes them known to the engine
from vfiomgr.engine import transaction
from vfiomgr.engine.privileges import require_rights
from vfiomgr.engine.recovery import recover as end_runs
from vfiomgr.engine.registry import plan
from vfiomgr.engine.run import Outcome
from vfiomgr.engine.transaction import ApplyContext, Options, scan_for
from vfiomgr.host.tree import HostTree
from vfiomgr.layout.applied import reversion
from vfiomgr.layout.named import layout_intent
from vfiomgr.paths import BOOT_ID, HostPath
from vfiomgr.snapshot.scan import scan as _scan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from vfiomgr.check.model import Report
    from vfiomgr.containers.runtimes.apply import Prepared
    from vfiomgr.containers.runtimes.location import RuntimeLocation
    from vfiomgr.containers.runtimes.model import ProgramName, RuntimeRequest
    from vfiomgr.definitions.requests import RestoreVgpus
    from vfiomgr.definitions.restore_apply import Restored
    from vfiomgr.diagnostic import Override
    from vfiomgr.engine.journal import CutOff
    from vfiomgr.engine.plan import Plan
    from vfiomgr.engine.request import Request
    from vfiomgr.engine.step import Step
    from vfiomgr.errors import VfiomgrError
    from vfiomgr.layout.compare import Comparison
    from vfiomgr.layout.requests import ApplyLayout
    from vfiomgr.layout.watch import Changes, WatchEvent, Wish
    from vfiomgr.libvirt.model import Domain
    from vfiomgr.pci.model import PciAddress
    from vfiomgr.persistence.requests import ChangeFiles
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.version import Version

_UNITS = ("/etc/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system")

__all__ = [
    "HostTree",
    "Options",
    "Outcome",
    "apply",
    "apply_each",
    "apply_prepared",
    "change_runtime",
    "check",
    "has_unit",
    "layout_intent",
    "locate_entries",
    "locate_runtime",
    "plan",
    "plan_files",
    "prepare_entry",
    "prepare_guest",
    "prepare_removal",
    "present_runtimes",
    "recover",
    "release_guest",
    "restore",
    "revert",
    "scan",
    "watch",
    "watch_layout",
]


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
    from vfiomgr.check.plan import check as judge  # noqa: PLC0415 - few callers need it

    return judge(host)


def apply(
    intent: Request,
    *,
    tree: HostTree,
    reviewed: tuple[Step, ...] | None = None,
    **options: Unpack[Options],
) -> Outcome:
    """Plan an intent on the host as it is, and carry the plan out under its locks.

    With `reviewed`, the first plan must have these very steps.

    Raises:
        Refusal: a guard forbids it; nothing was changed.
        NeedsRoot: the right to change the host is missing; nothing was changed.
        RolledBack, RollbackIncomplete, StuckInKernel: as `vfiomgr.engine.run.run`.

    """
    return transaction.carry_out(intent, ApplyContext(tree, reviewed=reviewed, **options))


def apply_each(
    intent: ApplyLayout, *, tree: HostTree, **options: Unpack[Options]
) -> tuple[tuple[str, Outcome | VfiomgrError], ...]:
    """Bring what can be of a host to a layout: one part that fails keeps no other from it.

    Each device that differs, with what came of it; one that is missing has no name. What a guest
    can have only together, an IOMMU group of several rules, is changed together or not at all.

    Raises:
        NeedsRoot: the right to change the host is missing; nothing was changed.

    """
    from vfiomgr.layout.apply import apply_parts  # noqa: PLC0415 - few have a layout

    work = ApplyContext(tree, **options)
    with transaction.prepared(work):
        return apply_parts(intent, work)


def revert(
    *, tree: HostTree, allow: frozenset[Override] = frozenset(), **options: Unpack[Options]
) -> Outcome:
    """Take back the layout that was applied last, with later corrections of it.

    Raises:
        Refusal: there is none, or somebody holds what would be moved.

    """
    return apply(reversion(tree, tree.read(BOOT_ID), allow), tree=tree, **options)


def recover(
    *,
    tree: HostTree,
    finish: bool = False,
    allow: frozenset[Override] = frozenset(),
    **options: Unpack[Options],
) -> tuple[CutOff, ...]:
    """End the runs that were left half done: undo them, the latest first, or `finish` them.

    Raises:
        Refusal: the kernel has still not returned, or a guard speaks against it.
        InvalidDocument: a journal cannot be read.
        RollbackIncomplete, RolledBack, StuckInKernel: ending one failed as well.

    """
    work = ApplyContext(tree, **options)
    with transaction.prepared(work, only_files=not tree.is_live):
        return end_runs(work, allow, finish=finish)


def restore(
    intent: RestoreVgpus, *, tree: HostTree, **options: Unpack[Options]
) -> tuple[Restored, ...]:
    """Bring about the vGPUs that start by themselves; one that fails keeps no other from it.

    Raises:
        NeedsRoot: the right to change the host is missing; nothing was changed.

    """
    from vfiomgr.definitions.restore_apply import restore as restore_vgpus  # noqa: PLC0415 - few need it

    work = ApplyContext(tree, **options)
    with transaction.prepared(work):
        return restore_vgpus(intent, work)


def prepare_guest(domain: Domain, *, tree: HostTree, **options: Unpack[Options]) -> tuple[str, ...]:
    """Take from the host what a guest of libvirt that starts needs; what was taken.

    Raises:
        Refusal: one of its devices cannot go to it; none was taken.
        NeedsRoot: the right to change the host is missing; nothing was changed.

    """
    from vfiomgr.libvirt.hook.apply import GuestHook  # noqa: PLC0415 - one command's own

    work = ApplyContext(tree, **options)
    with transaction.prepared(work):
        return GuestHook(domain, work).prepare()


def release_guest(domain: Domain, *, tree: HostTree, **options: Unpack[Options]) -> tuple[str, ...]:
    """Give back what `prepare_guest` took for a guest that has ended; what it was.

    Raises:
        Refusal: another guest has it; it stays on record.
        NeedsRoot: the right to change the host is missing; nothing was changed.

    """
    from vfiomgr.libvirt.hook.apply import GuestHook  # noqa: PLC0415 - as `prepare_guest`

    work = ApplyContext(tree, **options)
    with transaction.prepared(work):
        return GuestHook(domain, work).release()


def watch(tree: HostTree, *, on_note: Callable[[str], None]) -> None:
    """Keep persisted functions on their drivers as they are hot-plugged, until the process ends.

    Raises:
        NeedsRoot: the right to change the host is missing.

    """
    from vfiomgr.passthrough.watch import watch as watch_arrivals  # noqa: PLC0415 - one command's own

    require_rights(tree)
    watch_arrivals(tree, on_note)


def watch_layout(
    wish: Wish,
    changes: Changes,
    *,
    tree: HostTree,
    tell: Callable[[WatchEvent], None],
    enforce: bool = False,
    **options: Unpack[Options],
) -> None:
    """Tell what differs from a layout as it comes and goes, until the process is interrupted.

    With `enforce`, put it right, by the rules of `apply_each`. (`watch` is about functions that
    `bind --persist` keeps, and about nothing but their arrival.)

    Raises:
        NeedsRoot: with `enforce`, the right to change the host is missing.
        RolledBack, RollbackIncomplete: a correction was interrupted.

    """
    from vfiomgr.layout.compare import compare  # noqa: PLC0415 - few callers have a layout
    from vfiomgr.layout.watch import LayoutWatch, follow  # noqa: PLC0415 - its own

    def compared(intent: ApplyLayout) -> Comparison:
        # Looked at after every event: no disk is opened for it, which could disturb a mount.
        found = scan_for(intent, tree, options.get("machine"), with_claims=False)
        return compare(found, intent)

    def correct(intent: ApplyLayout, name: str) -> Outcome | VfiomgrError | None:
        results = apply_each(replace(intent, only=(name,)), tree=tree, **options)
        return dict(results).get(name)

    if enforce:
        require_rights(tree)
    follow(LayoutWatch(wish, compared, tell, correct if enforce else None), changes)


def present_runtimes(tree: HostTree) -> tuple[ProgramName, ...]:
    """The container runtimes that are installed, or configured, on a host."""
    from vfiomgr.containers.runtimes.facts import present  # noqa: PLC0415 - few callers need it

    return present(tree)


def has_unit(tree: HostTree, name: str) -> bool:
    """Whether systemd of a host has a service."""
    return any(tree.exists(HostPath(f"{place}/{name}.service")) for place in _UNITS)


def locate_runtime(
    tree: HostTree, program: ProgramName, main: str | None = None, version: Version | None = None
) -> RuntimeLocation:
    """A container runtime, and where it reads its configuration.

    Raises:
        InvalidDocument: that cannot be read.

    """
    from vfiomgr.containers.runtimes import location  # noqa: PLC0415 - few callers need it

    return location.locate(tree, program, main, version)


def locate_entries(
    tree: HostTree,
    name: str,
    program: ProgramName | None = None,
    main: str | None = None,
    version: Version | None = None,
) -> tuple[RuntimeLocation, ...]:
    """The container runtimes to which vfiomgr added an entry of a name, by its record.

    Raises:
        NeedsRoot: only root may read the record.
        InvalidDocument: it, or a file of a runtime, cannot be read.

    """
    from vfiomgr.containers.runtimes import prepare  # noqa: PLC0415 - few callers need it

    return prepare.places_of(tree, name, program, main, version)


def prepare_entry(
    tree: HostTree, place: RuntimeLocation, wish: RuntimeRequest, command: str
) -> Prepared:
    """Make an entry of a container runtime ready; `command` is what takes it back.

    Raises:
        InvalidDocument: a file cannot be read.
        Refusal: the runtime would not have it, or would lose something else by it.

    """
    from vfiomgr.containers.runtimes import prepare  # noqa: PLC0415 - few callers need it

    return prepare.prepare_entry(tree, place, wish, command)


def prepare_removal(tree: HostTree, place: RuntimeLocation, name: str, command: str) -> Prepared:
    """Make the removal of an entry ready; `command` is what is to be run again if it is refused.

    Raises:
        InvalidDocument: a file cannot be read.
        Refusal: what was written was changed since.

    """
    from vfiomgr.containers.runtimes import prepare  # noqa: PLC0415 - few callers need it

    return prepare.prepare_removal(tree, place, name, command)


def plan_files(intent: ChangeFiles, *, tree: HostTree) -> Plan:
    """The steps of a change of files, on a host as it is."""
    return plan(scan_for(intent, tree, None), intent)


def apply_prepared(prepared: Prepared, *, tree: HostTree, **options: Unpack[Options]) -> Outcome:
    """Carry out what was made ready, and have the container runtime read what came of it.

    Raises:
        RolledBack: it does not read what was foreseen; all is as it was.
        RollbackIncomplete: and it could not be put back.

    """
    from vfiomgr.containers.runtimes import apply as runtimes_apply  # noqa: PLC0415 - few callers need it

    return runtimes_apply.apply_prepared(prepared, ApplyContext(tree, **options))


def change_runtime(
    make: Callable[[], Prepared], *, tree: HostTree, **options: Unpack[Options]
) -> tuple[Prepared, Outcome]:
    """Make a change of a container runtime ready and carry it out; no other vfiomgr comes between.

    Raises:
        VfiomgrError: as `make`, and `apply_prepared`.

    """
    from vfiomgr.containers.runtimes import apply as runtimes_apply  # noqa: PLC0415 - few callers need it

    return runtimes_apply.change(make, ApplyContext(tree, **options))
