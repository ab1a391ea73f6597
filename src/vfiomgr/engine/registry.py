"""How the engine finds the functions of capabilities for their requests and steps.

The modules of a capability (`vfiomgr.capability`) register their functions with the decorators
below. The engine imports them when a request is planned, a step is performed or a journal is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from vfiomgr.capability import registered
from vfiomgr.documents.jsonable import from_jsonable
from vfiomgr.engine.plan import (
    REQUEST_KINDS,
    STEP_KINDS,
    Checkpoint,
    Request,
    Step,
    UndoEffects,
)

if TYPE_CHECKING:
    from vfiomgr.diagnostic import Diagnostic
    from vfiomgr.engine.plan import Plan, UndoScope
    from vfiomgr.host.tree import HostTree
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.snapshot.values import Holder

    UndoGuard = Callable[[HostSnapshot, UndoScope], Iterable[Diagnostic]]
    DeviceNotes = Callable[[HostSnapshot, Iterable[Holder]], Iterable[str]]
    AfterChange = Callable[[Any], None]

_T = TypeVar("_T")
_F = TypeVar("_F", bound=Callable[..., Any])
Modules = Literal["values", "plans", "applies", "hooks"]


_IMPORTED: set[tuple[str, Modules]] = set()
_PLANNERS: dict[type[Request], Callable[..., Plan]] = {}
_RESOLVERS: dict[type[Request], Callable[..., Checkpoint]] = {}
_CHECKS: dict[type[Request], Callable[..., None]] = {}
_PERFORMERS: dict[type[Step], Callable[..., None]] = {}
_VERIFIERS: dict[type[Step], Callable[..., None]] = {}
_UNDO_REPORTS: dict[type[Step], Callable[..., UndoEffects]] = {}
_UNDO_GUARDS: list[UndoGuard] = []
_DEVICE_NOTES: list[DeviceNotes] = []
_AFTER_CHANGES: list[AfterChange] = []


def plans(kind: type[Request]) -> Callable[[_F], _F]:
    """Register the function that plans requests of a class.

    Its parameters are the host and the request; for a class with a checkpoint, also the checkpoint
    of an interrupted run, with default None.
    """
    return _for(_PLANNERS, kind)


def resolves(kind: type[Request]) -> Callable[[_F], _F]:
    """Register the function that finds the checkpoint of a request, for the journal.

    It has the parameters of the planning function: a resumed run passes its own checkpoint.
    """
    return _for(_RESOLVERS, kind)


def checks(kind: type[Request]) -> Callable[[_F], _F]:
    """Register a function that refuses a request made obsolete by another process."""
    return _for(_CHECKS, kind)


def performs(*kinds: type[Step]) -> Callable[[_F], _F]:
    """Register the function that performs steps of some classes and verifies their effect."""
    return _for(_PERFORMERS, *kinds)


def verifies(kind: type[Step]) -> Callable[[_F], _F]:
    """Register a function that checks the device after a step, but not after undoing one."""
    return _for(_VERIFIERS, kind)


def reports_undo(kind: type[Step]) -> Callable[[_F], _F]:
    """Register the function that reports what undoing steps of a class does to devices.

    Its parameters are the host and the step, it returns `UndoEffects`; classes derived from that
    one have the same function. It belongs in the module of the class.
    """
    return _for(_UNDO_REPORTS, kind)


def guards_undo(function: UndoGuard) -> UndoGuard:
    """Register reasons against undoing an interrupted operation."""
    return _added(_UNDO_GUARDS, function)


def notes_devices(function: DeviceNotes) -> DeviceNotes:
    """Register notes for plans about devices that are about to change."""
    return _added(_DEVICE_NOTES, function)


def after_change(function: AfterChange) -> AfterChange:
    """Register a function that is called after every change of devices, with its context."""
    return _added(_AFTER_CHANGES, function)


def _for(functions: dict[Any, Any], *kinds: type[Any]) -> Callable[[_F], _F]:
    def note(function: _F) -> _F:
        functions.update(dict.fromkeys(kinds, function))
        return function

    return note


def _added(functions: list[_F], function: _F) -> _F:
    if function not in functions:
        functions.append(function)
    return function


def _load(modules: Modules, owner: str | None = None) -> None:
    """Import the modules of all capabilities, or of the one that contains the module `owner`."""
    for capability in registered():
        if owner is not None and not owner.startswith(capability.package + "."):
            continue
        if (capability.package, modules) not in _IMPORTED:
            for name in getattr(capability, modules):
                import_module(f"{capability.package}.{name}")
            _IMPORTED.add((capability.package, modules))


def _found(functions: dict[type[Any], _F], kind: type[Any], modules: Modules) -> _F | None:
    """The function registered for a class; its own capability takes precedence."""
    for owner in (kind.__module__, None):
        if kind in functions:
            break
        _load(modules, owner)
    return functions.get(kind)


def _required(functions: dict[type[Any], _F], kind: type[Any], modules: Modules) -> _F:
    found = _found(functions, kind, modules)
    if found is None:
        verb = {"plans": "plans", "applies": "performs"}[modules]
        message = f"no registered capability {verb} {kind.__name__}"
        raise LookupError(message)
    return found


def plan(host: HostSnapshot, request: Request, checkpoint: Checkpoint | None = None) -> Plan:
    """The steps that fulfil a request on the host as it is.

    `checkpoint` belongs to an interrupted run of the request, which this one finishes.

    Raises:
        Refusal: a safety check forbids it.
        UsageError: the request names what the host does not have.
    """
    planner = _required(_PLANNERS, type(request), "plans")
    return planner(host, request) if checkpoint is None else planner(host, request, checkpoint)


def resolve(
    host: HostSnapshot, request: Request, checkpoint: Checkpoint | None = None
) -> Checkpoint | None:
    """The checkpoint of a request: facts that only exist before the run; None if it needs none.

    `checkpoint` belongs to an interrupted run that is being finished; its contents are kept.
    """
    kind = type(request)
    _required(_PLANNERS, kind, "plans")
    resolver = _RESOLVERS.get(kind)
    return None if resolver is None else resolver(host, request, checkpoint)


def refuse_obsolete(request: Request, tree: HostTree) -> None:
    """Refuse a request if another process changed what it was made from.

    Raises:
        Refusal: another process did.
    """
    _load("hooks")
    check = _CHECKS.get(type(request))
    if check is not None:
        check(request, tree)


def perform(step: Step, tree: HostTree) -> None:
    """Carry out one step and verify its effect.

    Raises:
        HostError: the host did not reach the state that the step names.
    """
    _required(_PERFORMERS, type(step), "applies")(tree, step)


def verify(step: Step, tree: HostTree) -> None:
    """Verify that a device survived a step.

    Raises:
        HostError: it did not.
    """
    verifier = _VERIFIERS.get(type(step))
    if verifier is not None:
        verifier(tree, step)


def undo_effects(host: HostSnapshot, step: Step) -> UndoEffects:
    """What undoing a step would do to the devices of the host."""
    kinds = (kind for kind in type(step).__mro__ if kind in _UNDO_REPORTS)
    kind = next(kinds, None)
    return UndoEffects() if kind is None else _UNDO_REPORTS[kind](host, step)


def undo_guards() -> tuple[UndoGuard, ...]:
    """Reasons against undoing, in the order of the checks."""
    _load("hooks")
    return tuple(_UNDO_GUARDS)


def device_notes(host: HostSnapshot, devices: Iterable[Holder]) -> Iterator[str]:
    """Notes for plans about devices that are about to change."""
    _load("hooks")
    devices = tuple(devices)
    for notes in _DEVICE_NOTES:
        yield from notes(host, devices)


def after_changes() -> tuple[AfterChange, ...]:
    """What is called after every change of devices, with an `ApplyContext`."""
    _load("hooks")
    return tuple(_AFTER_CHANGES)


def step_kinds() -> Mapping[str, type[Step]]:
    """The classes of all steps, by kind."""
    _load("values")
    return dict(STEP_KINDS)


def request_kinds() -> Mapping[str, type[Request]]:
    """The classes of all requests, by kind."""
    _load("values")
    return dict(REQUEST_KINDS)


def read_step(data: Any) -> Step:  # noqa: ANN401 - a journal holds any JSON
    """A step from the JSON of a journal.

    Raises:
        ValueError: its fields do not match its kind, or the kind is unknown.
    """
    kind, fields = _split(data, step_kinds(), "step")
    return from_jsonable(kind, fields)


def read_request(data: Any) -> Request:  # noqa: ANN401 - as above
    """A request from the JSON of a journal.

    Raises:
        ValueError: its fields do not match its kind, or the kind is unknown.
    """
    kind, fields = _split(data, request_kinds(), "request")
    return from_jsonable(kind, fields)


def read_checkpoint(data: Any, request: Request) -> Checkpoint | None:  # noqa: ANN401 - as above
    """The checkpoint of a request from the JSON of a journal; None where there is none.

    Raises:
        ValueError: its fields do not match the checkpoints of such requests.
    """
    if data is None:
        return None
    if request.checkpoint is None:
        message = f"requests of the kind {request.kind} have no checkpoint"
        raise ValueError(message)
    return from_jsonable(request.checkpoint, data)


def _split(
    data: Any,  # noqa: ANN401 - as above
    kinds: Mapping[str, type[_T]],
    noun: str,
) -> tuple[type[_T], dict[str, Any]]:
    """The class that a document names, and its fields.

    Nested values of the same sort (a request in a request, steps in a step) have a declared class:
    a field for steps of any kind belongs in a request, not in a step.
    """
    if not (isinstance(data, dict) and data.get("kind") in kinds):
        message = f"this version of vfiomgr has no such {noun}"
        raise ValueError(message)

    def bare(part: Any) -> Any:  # noqa: ANN401 - as above
        if isinstance(part, list):
            return [bare(item) for item in part]
        if not (isinstance(part, dict) and part.get("kind") in kinds):
            return part
        return {name: bare(value) for name, value in part.items() if name != "kind"}

    return kinds[data["kind"]], bare(data)


Step.from_document = read_step
Request.from_document = read_request
