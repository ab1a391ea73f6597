"""Interrupted runs: their journals, what is undone, and what a later run completes.

The same request completes an interrupted run: it is planned with the checkpoint of that run, which
is then closed. A request of the same kind for the same functions restores its settings too. Any
other run settles the steps whose devices or files it has set itself; `recover` leaves those alone.
A step without an undo, such as loading a module, does not relate two runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.diagnostic import Override, refuse, refuse_if_any
from vfiomgr.engine.journal import DIRECTORY, all_of, read_journal
from vfiomgr.engine.locks import device_lock
from vfiomgr.engine.plan import LAST, Checkpoint, Plan, Request, Step, UndoScope, distinct
from vfiomgr.engine.registry import (
    read_checkpoint,
    read_request,
    read_step,
    undo_effects,
    undo_guards,
)
from vfiomgr.engine.survey import CutOff, settled_in
from vfiomgr.errors import InvalidDocument, UnknownDevice
from vfiomgr.paths import HostPath
from vfiomgr.pci.model import DeviceIdentity, PciDevice, pci_device
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree
    from vfiomgr.snapshot.model import HostSnapshot


class UndoPlan(Value):
    """The numbers of the steps to undo, and why others are not undone."""

    steps: tuple[int, ...]
    notes: tuple[str, ...]


def plan_undo(  # noqa: PLR0913 - two of them are told apart by name
    host: HostSnapshot,
    steps: Sequence[Step],
    begun: Iterable[int],
    allow: frozenset[Override],
    *,
    is_of_this_boot: bool,
    can_add_steps: bool = False,
) -> UndoPlan:
    """Which of the begun steps to undo on the host as it is.

    A function that is gone or was replaced is left alone, except for a virtual function that
    undoing recreates. After a reboot, only steps whose effect outlasts it are undone, and bindings
    to a VFIO driver by a rule of the run.

    Raises:
        Refusal: the kernel has not returned yet, or a device to be moved is in use.
    """
    kept: list[int] = []
    notes: list[str] = []
    effects = {number: undo_effects(host, steps[number]) for number in begun}
    recreated = {one.recreated_below for one in effects.values() if is_of_this_boot} - {None}
    for number, one in effects.items():
        step = steps[number]
        identity = step.tied_to
        if identity is None:
            kept += [number] if is_of_this_boot or step.outlasts_reboot else []
            continue
        device = _present(host, identity)
        if device is None and identity.bridge_path in recreated:
            kept.append(number)
        elif device is None or isinstance(device, str):
            notes.append(device or f"{identity} is gone and is skipped")
        elif step.is_record or is_of_this_boot or one.outlasts_reboot:
            kept.append(number)
    inverses = (steps[number].inverse() for number in reversed(kept))
    scope = UndoScope(
        distinct(holder for number in kept for holder in effects[number].leaving),
        distinct(holder for number in kept for holder in effects[number].removed),
        distinct(holder for number in kept for holder in effects[number].reduced),
        tuple(step for step in inverses if step is not None),
        can_add_steps,
    )
    for guard in undo_guards():
        refuse_if_any(guard(host, scope), allow)
    return UndoPlan(tuple(kept), distinct(notes))


def refuse_other_devices(host: HostSnapshot, steps: Iterable[Step]) -> None:
    """Require that the functions of a run are still the devices that it was planned for.

    Raises:
        Refusal: another device is at an address; both are named.
    """
    for device, found in other_devices(host, steps):
        remedy = "to close the run without touching it: vfiomgr recover --undo"
        refuse("another-device", device, found, remedy)


def other_devices(
    host: HostSnapshot, steps: Iterable[Step]
) -> Iterator[tuple[DeviceIdentity, str]]:
    """The replaced functions of a run, each with a text that names both devices."""
    for expected in (step.tied_to for step in steps):
        found = None if expected is None else _present(host, expected)
        if expected is not None and isinstance(found, str):
            yield expected, found


def refuse_other_steps(steps: Sequence[Step], reviewed: Sequence[Step]) -> None:
    """Require that a plan is the one that a person has reviewed.

    Raises:
        Refusal: the host has changed in something that it concerns.
    """
    now = [step for step in steps if not step.is_harmless]
    then = [step for step in reviewed if not step.is_harmless]
    if now == then:
        return
    changed = [step for step in now if step not in then]
    changed += [step for step in then if step not in now]
    names = dict.fromkeys(step.subject or step.describe() for step in changed)
    message = f"the host has changed since the plan was made: {', '.join(names) or 'the order'}"
    refuse(
        "plan-outdated",
        ", ".join(names),
        message,
        "make and review a new plan: vfiomgr plan FILE --output PLAN",
    )


def _present(host: HostSnapshot, expected: DeviceIdentity) -> PciDevice | str | None:
    """The device that is expected; None if it is gone, a text if it was replaced."""
    try:
        device = host.device(expected.address)
    except UnknownDevice:
        return None
    if not device.identity.is_same_as(expected):
        return f"{expected} is now {device.identity} and is left alone"
    return device


class Unfinished(Value):
    """The content of an interrupted run's journal."""

    request: Request
    checkpoint: Checkpoint | None
    """Facts from before the run; None if the request needs none."""
    steps: tuple[Step, ...]
    begun: tuple[int, ...]
    """The steps that had begun and are not undone."""
    settled: frozenset[int] = frozenset()
    """The steps whose effect a later run has confirmed or replaced."""
    due: frozenset[int] = frozenset()
    """The steps, begun or not, that may be missing without a trace on the host."""

    @property
    def left(self) -> tuple[int, ...]:
        """The steps to undo."""
        return tuple(step for step in self.begun if step not in self.settled)

    @property
    def resumed(self) -> Checkpoint | None:
        """The checkpoint for a run that finishes this one."""
        begun = filter(None, (self.steps[number].subject for number in self.begun))
        return None if self.checkpoint is None else self.checkpoint.resumed(begun)


def read_unfinished(tree: HostTree, name: str) -> Unfinished:
    """Read an interrupted run, so that it can be undone or finished.

    Raises:
        InvalidDocument: another version of vfiomgr wrote it, or it is damaged.
    """
    records = read_journal(tree, name)
    try:
        request = read_request(records[0]["request"])
        checkpoint = read_checkpoint(records[0]["checkpoint"], request)
        steps = tuple(map(read_step, all_of(records, "steps")))
    except (KeyError, TypeError, ValueError) as error:
        message = f"cannot read {DIRECTORY / name}: {error}"
        raise InvalidDocument(
            " ".join(message.split())[:300],
            (
                "recover it with the version of vfiomgr that wrote it, or check the devices and "
                "remove the file"
            ),
        ) from None
    begun = [record["step"] for record in records if record["event"] == "begin"]
    undone = {record["step"] for record in records if record["event"] == "undo-done"}
    left = tuple(step for step in begun if step not in undone)
    settled = settled_in(tree, records) or frozenset()
    over = settled.union(record["step"] for record in records if record["event"] == "done")
    due = frozenset(n for n, step in enumerate(steps) if step.leaves_no_trace and n not in over)
    return Unfinished(request, checkpoint, steps, left, settled, due)


class Interrupted(Value):
    """An interrupted run, compared with a later request."""

    run: CutOff
    content: Unfinished
    is_continued: bool
    """Whether the request changes the same functions, and restores the settings of the run."""
    is_repeated: bool
    """Whether the run had the same request."""
    is_same_kind: bool
    """Whether the run had a request of the same kind."""

    def settled_by(self, done: Plan, host: HostSnapshot, tree: HostTree) -> frozenset[int] | None:
        """The steps that a completed plan of the request settles; None if the plan is unrelated."""
        begun, steps = frozenset(self.content.left), self.content.steps
        if self.is_repeated:
            return begun
        owed = {n for n in begun & self.content.due if steps[n] not in done.steps}
        begun -= owed
        undone = {number for number in begun if steps[number].inverse() is not None}
        if self._is_covered(done, undone, tree):
            return begun if begun or not owed else None
        topics = {step.topic for step in done.steps}
        found = {number for number in begun if self._is_settled(number, done, topics, host)}
        if found and all(self._is_gone(number, host, tree) for number in undone - found):
            return begun
        return frozenset(found) or None

    def dropped_by(self, done: Plan, settled: frozenset[int]) -> Iterator[Step]:
        """The steps that never began and that no run does any more, once a plan has settled it."""
        if not self.is_repeated and settled.issuperset(self.content.left):
            never = (self.content.steps[n] for n in sorted(self.content.due - {*self.content.left}))
            yield from (step for step in never if step not in done.steps)

    def _is_gone(self, number: int, host: HostSnapshot, tree: HostTree) -> bool:
        """Whether a step concerns a function that no longer exists.

        Devices that a snapshot does not cover do not count as absent.
        """
        step = self.content.steps[number]
        if step.tied_to is None or not host.devices:
            return False
        address = step.tied_to.address
        return host.device_named(str(address)) is None and not tree.exists(pci_device(address))

    def _is_covered(self, done: Plan, undone: set[int], tree: HostTree) -> bool:
        """Whether a plan sets everything that the run was setting and recovery would undo."""
        run = self.run
        if not run.subjects <= set(done.resolves):
            return False
        has_locks = run.locks <= set(done.locks)
        if not undone:
            return has_locks or bool(run.subjects)
        if not run.subjects:
            return self.is_same_kind and run.locks == set(done.locks) and self._is_whole(done, tree)
        return has_locks and (self.is_continued or not run.has_settings)

    def _is_whole(self, done: Plan, tree: HostTree) -> bool:
        """Whether a plan changed no other files than the run, whose files are now all replaced."""
        last = {step.topic: step for step in self.content.steps if step.inverse() is not None}
        files = [step.replaces for step in last.values()]
        return last.keys() >= {step.topic for step in done.steps} and all(
            file is not None and tree.read_text(HostPath(file[0])) == file[1] for file in files
        )

    def _is_settled(
        self, number: int, done: Plan, topics: set[tuple[object, ...]], host: HostSnapshot
    ) -> bool:
        if number in self.run.settings and not self.is_continued:
            return False
        step = self.content.steps[number]
        if step.subject in done.resolves:
            return True
        removed = undo_effects(host, step).removed
        locks = {device_lock(holder) for holder in removed if isinstance(holder, PciDevice)}
        is_set = step.inverse() is not None and step.topic in topics
        return is_set or not locks.isdisjoint(done.locks)


def interrupted(
    request: Request, runs: Iterable[CutOff], host: HostSnapshot, tree: HostTree
) -> Iterator[Interrupted]:
    """The readable interrupted runs, oldest first."""
    for run in runs:
        try:
            content = read_unfinished(tree, run.name)
        except InvalidDocument:
            continue  # `recover` reports it
        is_repeated = request == content.request
        is_alike = is_repeated or _is_about_the_same(request, content.request)
        is_alike = is_alike and run.is_of_this_boot and not any(other_devices(host, content.steps))
        is_same_kind = type(request) is type(content.request)
        yield Interrupted(run, content, is_alike, is_repeated, is_same_kind)


def _is_about_the_same(one: Request, other: Request) -> bool:
    functions = one.named_functions
    return type(one) is type(other) and functions != () and functions == other.named_functions


def inherited(runs: Iterable[Interrupted]) -> Checkpoint | None:
    """The checkpoint of the interrupted runs that a request continues: the state before them."""
    found: Checkpoint | None = None
    for run in runs:
        own = run.content.resumed if run.is_continued else None
        if own is not None:
            begun = filter(None, (run.content.steps[n].subject for n in run.content.begun))
            found = own if found is None else found.completed(own).resumed(begun)
    return found


def completed(plan: Plan, runs: Iterable[Interrupted]) -> Plan:
    """A plan, with the remaining steps of interrupted runs of its request."""
    for run in runs:
        due = (run.content.steps[number] for number in sorted(run.content.due))
        missing = [step for step in due if run.is_repeated and step not in plan.steps]
        if missing:
            groups = plan.parallel_groups
            plan = replace(
                plan,
                steps=(*plan.steps, *missing),
                locks=tuple(sorted({*plan.locks, *run.run.locks})),
                parallel_groups=groups and (*groups, *(LAST for _ in missing)),
            )
    return plan
