"""A change as values: its request, its steps, and the plan, which orders them.

A capability derives its requests from `Request` and says in its module `plan` how they are planned
(`vfiomgr.engine.registry`); the engine itself knows no kind of request.

A capability derives its steps from `Step` and says in its module `apply` how they are performed
(`vfiomgr.engine.registry`); the engine itself knows no kind of step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

from msgspec.structs import replace

from vfiomgr.diagnostic import Option, Remedy, in_words
from vfiomgr.documents.jsonable import API_VERSION, to_jsonable
from vfiomgr.documents.text import printable
from vfiomgr.pci.model import DeviceIdentity, PciAddress
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.pci.function import Purpose
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.snapshot.values import Holder  # noqa: TC004


class Checkpoint(Value):
    """Facts from before a run that are needed to finish it.

    A capability derives its own checkpoint next to the request that needs one, and finds it in a
    function with `resolves` (`vfiomgr.engine.registry`). The journal stores it with the plan.
    """

    def resumed(self, _begun: Iterable[str]) -> Self:
        """The checkpoint for an interrupted run that had begun to change the devices `begun`."""
        return self

    def completed(self, found: Self) -> Self:
        """The checkpoint, with its unknown values (None) filled from the present host."""
        unknown = (name for name in self.__struct_fields__ if getattr(self, name) is None)
        return replace(self, **{name: getattr(found, name) for name in unknown})


class Request:
    """The desired state of the host, and which facts that decision needs.

    Requests are values (`vfiomgr.value`) of a `kind`, which identifies them in journals. They
    contain only what a user asks for.
    """

    __slots__ = ()
    kind: ClassVar[str]
    checkpoint: ClassVar[type[Checkpoint] | None] = None
    """The class of its checkpoint, if finishing an interrupted request needs one."""

    is_about_files: ClassVar[bool] = False
    """Whether it only changes files, so that a root without a kernel is sufficient."""
    needs_gpu_modes: ClassVar[bool] = False
    """Whether nvidia-smi is asked how GPUs divide their memory."""
    has_long_journal: ClassVar[bool] = False
    """Whether journals of its runs are kept longer, because other requests read them."""
    deferred_types: ClassVar[dict[str, str]] = {}
    """Types of its fields that its module does not import, with their modules."""

    def __init_subclass__(cls) -> None:
        """Register the kind, by which journals are read."""
        if "kind" in cls.__dict__:
            REQUEST_KINDS[cls.kind] = cls

    from_document: ClassVar[Any]
    """Reads a request of any kind; set by the registry."""

    @property
    def named_functions(self) -> tuple[PciAddress, ...]:
        """The PCI functions that it names."""
        return ()

    @property
    def only_functions(self) -> frozenset[PciAddress] | None:
        """The functions that it is about, if what it cannot touch does not matter; else None."""
        return None

    @property
    def needs_resets(self) -> bool:
        """Whether the reset capabilities of functions are read."""
        return False

    @property
    def needs_readiness(self) -> bool:
        """Whether notes of a plan that is only shown depend on what a check of the host reads.

        A change does not read it: each fact more is one more read that can hang.
        """
        return False

    @property
    def needs_desktop(self) -> bool:
        """Whether the console, the sessions and the programs of the desktop are read."""
        return False

    @property
    def needs_serials(self) -> bool:
        """Whether the serial numbers of all functions are read, not only of the named ones."""
        return False

    @property
    def named_types(self) -> frozenset[str] | None:
        """The vGPU types that it names, if no others matter; None if all do."""
        return None

    @property
    def purpose(self) -> Purpose | None:
        """Which attributes of functions are sufficient for its plans; None means all."""
        return None

    @property
    def further_paths(self) -> tuple[str, ...]:
        """Files that only this request reads and changes."""
        return ()

    def not_checked(self, _host: HostSnapshot) -> Iterable[str]:
        """What a plan of it for this host could not check, besides uses of devices."""
        return ()

    @property
    def only_paths(self) -> tuple[str, ...] | None:
        """The files that it concerns, if it needs no other fact of the host; otherwise None."""
        return None


class FunctionRequest(Request, Value):
    """A request about one PCI function."""

    address: PciAddress

    @property
    def named_functions(self) -> tuple[PciAddress, ...]:
        """The function that it names."""
        return (self.address,)


REQUEST_KINDS: dict[str, type[Request]] = {}
"""Classes of the imported modules by kind; for all: `vfiomgr.engine.registry`."""


Topic = tuple[object, ...]
DEADLINE = 60.0
"""Seconds for one step; a GPU's driver may need many to release a device or to start."""
UDEV_DEADLINE = 300.0
"""Seconds for a step that waits for udevd, which may need 180 for one rule."""


class Step:
    """A change of the host, as data; repeating it leads to the same state.

    Steps are values (`vfiomgr.value`) of a `kind`, which identifies them in journals. A value is a
    msgspec Struct, whose metaclass excludes that of abc.ABC: therefore the methods that every step
    must have raise NotImplementedError here.
    """

    __slots__ = ()
    kind: ClassVar[str]

    deadline: ClassVar[float | None] = None
    """Time limit in seconds if it waits for programs; None for the default deadline."""
    outlasts_reboot: ClassVar[bool] = False
    """Whether its effect outlasts a reboot."""
    is_record: ClassVar[bool] = False
    """Whether it only changes files of vfiomgr, so that no child process is needed."""
    is_setting: ClassVar[bool] = False
    """Whether it changes what a later step of the same plan restores."""
    is_program: ClassVar[bool] = False
    """Whether a program that exceeds the deadline is left running."""
    is_lasting: ClassVar[bool] = False
    """Whether a rollback cannot undo it."""
    is_harmless: ClassVar[bool] = False
    """Whether it may differ from a reviewed plan."""
    needs_all_undone: ClassVar[bool] = False
    """Whether it is skipped during a rollback if a step undone before it failed."""
    leaves_no_trace: ClassVar[bool] = False
    """Whether the host does not show that it was done, so `recover` repeats it at the end."""
    needs_udev: ClassVar[bool] = False
    """Whether udev rules decide when it is done."""
    affects: ClassVar[str] = ""
    """What it changes, if steps of several kinds change the same; otherwise its kind."""

    from_document: ClassVar[Any]
    """Reads a step of any kind; set by the registry."""

    def __init_subclass__(cls) -> None:
        """Register the kind, by which journals are read."""
        if "kind" in cls.__dict__:
            STEP_KINDS[cls.kind] = cls

    @property
    def subject(self) -> str | None:
        """The function or vGPU that it concerns; None for neither."""
        device: DeviceIdentity | None = getattr(self, "device", None)
        return None if device is None else str(device.address)

    @property
    def topic(self) -> Topic:
        """What it changes: two steps with the same topic set states of the same thing."""
        return (self.affects or self.kind, self.subject)

    @property
    def is_return(self) -> bool:
        """Whether it returns what the host needs: `recover` then finishes its interrupted run."""
        return False

    @property
    def replaces(self) -> tuple[str, str | None] | None:
        """The file that it replaces, and its text afterwards (None: removed); None for no file."""
        return None

    def describe(self) -> str:
        """One line for people."""
        raise NotImplementedError

    def report(self) -> str:
        """One line for people, after the step was performed."""
        return self.describe()

    def commands(self) -> tuple[str, ...]:
        """The equivalent shell commands; empty for records of vfiomgr itself."""
        raise NotImplementedError

    def inverse(self) -> Step | None:
        """The step back to the previous state; None if nothing needs to be undone."""
        raise NotImplementedError

    @classmethod
    def is_restored_later(
        cls, _own: Mapping[str, Any], _later: Sequence[Mapping[str, Any]]
    ) -> bool:
        """Whether one of the `later` steps of a journal restores what this one changed."""
        return cls.is_setting

    @property
    def tied_to(self) -> DeviceIdentity | None:
        """The device that must still be the same one, or the step cannot be undone."""
        return None


class UndoEffects(Value):
    """What undoing a step does to devices; capabilities report it for their steps."""

    leaving: tuple[Holder, ...] = ()
    """What leaves its driver."""
    removed: tuple[Holder, ...] = ()
    """What no longer exists afterwards."""
    reduced: tuple[Holder, ...] = ()
    """What loses memory."""
    recreated_below: str | None = None
    """The path of a bridge below which functions that are gone are created again."""
    outlasts_reboot: bool = False
    """Whether there is something to undo on this host even after a reboot."""


class UndoScope(Value):
    """What undoing affects (as in `UndoEffects`), for the checks that capabilities register."""

    leaving: tuple[Holder, ...]
    removed: tuple[Holder, ...]
    reduced: tuple[Holder, ...]
    inverses: tuple[Step, ...]
    """The inverse steps in order."""
    can_add_steps: bool
    """Whether the caller can take other steps besides these inverses."""


class Exchange(Step):
    """A step from the state `before` to the state `after`; undone by exchanging the two."""

    __slots__ = ()
    before: Any
    after: Any

    def inverse(self) -> Self:
        """The same step with its states exchanged."""
        return replace(self, before=self.after, after=self.before)  # type: ignore[type-var]


STEP_KINDS: dict[str, type[Step]] = {}
"""Classes of the imported modules by kind; for all: `vfiomgr.engine.registry`."""


FIRST = 0
"""The group whose steps come before all others."""
LAST = -1
"""The group whose steps come after all others."""


class Plan(Value):
    """The steps of a request: printed by `--dry-run`, executed by a run."""

    summary: str
    steps: tuple[Step, ...]
    locks: tuple[str, ...] = ()
    """What no other process may change during the run, e.g. `group-38`."""
    notes: tuple[str, ...] = ()
    """Notes for the reader: companion functions, functions that are left alone."""
    alternatives: tuple[Remedy, ...] = ()
    """Other choices, and the option for each."""
    already: tuple[str, ...] = ()
    """What already is in the desired state and is not touched."""
    resolves: tuple[str, ...] = ()
    """The functions and vGPUs that will be in the desired state, changed or not."""
    deferred: tuple[str, ...] = ()
    """What can only be planned after this plan: it concerns functions that do not exist yet."""
    parallel_groups: tuple[int, ...] = ()
    """Each step's group; groups run in parallel, after FIRST and before LAST. Empty: in order."""
    not_checked: tuple[str, ...] = ()
    """What could not be checked for the plan, and what is missing for that."""

    @property
    def is_empty(self) -> bool:
        """Whether the host already is in the desired state."""
        return not self.steps

    @property
    def remarks(self) -> tuple[str, ...]:
        """The notes, and the alternatives in words."""
        return (*self.notes, *map(str, self.alternatives))

    def in_words(self, words: Callable[[Option], str | None]) -> Plan:
        """The plan with other words for options; alternatives without such words are removed."""
        return replace(self, alternatives=in_words(self.alternatives, words))

    def lines(self) -> Iterator[str]:
        """The output of `--dry-run`: each step with its number and its shell commands."""
        yield f"plan: {self.summary}"
        yield from (f"  {text}" for text in (*self.remarks, *self.already))
        if self.is_empty:
            yield "nothing to do"
        for number, step in enumerate(self.steps, start=1):
            yield f"{number:3}. {step.describe()}"
            yield from (f"       {command}" for command in step.commands())
        yield from (f"then: {text}" for text in self.deferred)

    def __str__(self) -> str:
        """The lines, escaped for a terminal, and what was not checked."""
        unseen = (f"not checked: {text}" for text in self.not_checked)
        return "\n".join(map(printable, (*self.lines(), *unseen)))

    def to_document(self) -> dict[str, Any]:
        """The plan for documents: the fields and shell commands of each step."""
        return {
            "summary": self.summary,
            "notes": self.remarks,
            "already": self.already,
            "locks": self.locks,
            "steps": [
                {
                    "description": step.describe(),
                    "commands": step.commands(),
                    **to_jsonable(step),
                }
                for step in self.steps
            ],
        }

    def to_json(self) -> str:
        """The output of `--dry-run --format json`: a `Plan` document of version vfiomgr/v1."""
        import json  # noqa: PLC0415 - few plans become documents

        body = to_jsonable({**self.to_document(), "not_checked": self.not_checked})
        document = {"api_version": API_VERSION, "kind": "Plan", **body}
        return json.dumps(document, indent=2) + "\n"


def joined(summary: str, plans: Sequence[Plan]) -> Plan:
    """Several plans as one, with their steps in order and without groups."""
    return Plan(
        summary,
        tuple(step for plan in plans for step in plan.steps),
        locks=tuple(sorted({lock for plan in plans for lock in plan.locks})),
        notes=distinct(note for plan in plans for note in plan.notes),
        alternatives=distinct(one for plan in plans for one in plan.alternatives),
        already=distinct(text for plan in plans for text in plan.already),
        resolves=distinct(name for plan in plans for name in plan.resolves),
        deferred=distinct(text for plan in plans for text in plan.deferred),
    )


_Found = TypeVar("_Found")


def distinct(found: Iterable[_Found]) -> tuple[_Found, ...]:
    """The values in their order, without duplicates."""
    return tuple(dict.fromkeys(found))


class Schedule:
    """The remaining steps, by group."""

    def __init__(self, plan: Plan, first: int = 0) -> None:
        """`first` is the number of the plan's first step, if other plans came before."""
        self._group_of = dict(
            enumerate(plan.parallel_groups or (0,) * len(plan.steps), start=first)
        )
        self._left: dict[int, deque[int]] = {}
        for step, group in self._group_of.items():
            self._left.setdefault(group, deque()).append(step)
        self._busy: set[int] = set()

    @property
    def width(self) -> int:
        """The maximum number of steps that run in parallel."""
        return max(1, len(self._left.keys() - {FIRST, LAST}))

    def ready(self) -> list[int]:
        """The steps that may begin now."""
        if FIRST in self._busy:
            return []
        if FIRST in self._left:
            return [self._left[FIRST][0]]
        left = [group for group in self._left if group != LAST]
        if not left and LAST in self._left and not self._busy:
            left = [LAST]
        return [self._left[group][0] for group in left if group not in self._busy]

    def begin(self, step: int) -> None:
        """Mark a step as running."""
        group = self._group_of[step]
        steps = self._left[group]
        steps.popleft()
        if not steps:
            del self._left[group]
        self._busy.add(group)

    def finish(self, step: int) -> None:
        """Mark a step as finished; the next one of its group may begin."""
        self._busy.discard(self._group_of[step])
