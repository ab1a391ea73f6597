"""What vGPUs are to be: kept, changed and forgotten; of mediated devices in mdevctl's files."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from vfiomgr.errors import Refusal, UnknownDevice, UsageError
from vfiomgr.model.definition import (
    PARAMETERS,
    VgpuDefinition,
    check_attribute,
    definition_file,
    is_name,
    render_definition,
)
from vfiomgr.model.host_step import ReplaceFile
from vfiomgr.model.path import HostPath
from vfiomgr.model.pci import PciAddress, is_address
from vfiomgr.model.plan import Plan
from vfiomgr.model.vgpu import types_called
from vfiomgr.planner import function_definitions
from vfiomgr.planner.vgpu_boot import exchange
from vfiomgr.planner.vgpu_choice import guess
from vfiomgr.planner.vgpu_room import by_number

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from vfiomgr.model.definition import Attributes
    from vfiomgr.model.gpu_definition import GpuDefinition
    from vfiomgr.model.intent import DefineVgpu, UndefineVgpu
    from vfiomgr.model.snapshot import HostSnapshot
    from vfiomgr.model.vgpu import Vgpu, VgpuParent, VgpuType

LOCK = "vgpu-definitions"


def plan_define(host: HostSnapshot, intent: DefineVgpu) -> Plan:
    """Keep what a vGPU is to be, and make sure that something starts it.

    Raises:
        UsageError: a part is missing, or is none of a vGPU.
        UnknownDevice: the parent has no such type.
        Refusal: the present file could not be kept.

    """
    _check_attributes(intent.attributes or ())
    if is_address(intent.name):
        return _plan_function(host, intent)
    old = _defined_before(host, intent)
    definition = _wanted(host, intent, old)
    text = render_definition(definition)
    before = host.defined.file(definition.path)
    others = [d for d in host.vgpu_definitions if d.path != definition.path]
    part = exchange(host, [*others, definition], host.defined.gpus, intent.program)
    return Plan(
        summary=f"define {definition}",
        steps=(*([ReplaceFile(definition.path, before, text)] * (before != text)), *part.steps),
        locks=(LOCK, f"vgpu-{intent.name}"),
        notes=(*_notes(host, definition), *(part.notes if definition.autostart else ())),
        already=(f"{definition} is defined so already",) * (before == text),
    )


def plan_undefine(host: HostSnapshot, intent: UndefineVgpu) -> Plan:
    """Forget definitions, those that cannot be read too."""
    parent = None if intent.parent is None else canonical(intent.parent)
    gone = {name: list(_files_of(host, name, parent)) for name in intent.names}
    files = dict.fromkeys(file for found in gone.values() for file in found)
    gpus, changed, known = _gpus_without(host, intent.names)
    mdevs = [d for d in host.vgpu_definitions if d.path not in files]
    part = exchange(host, mdevs, gpus, None)
    absent = [name for name in intent.names if not gone[name] and name not in known]
    removals = (ReplaceFile(path, host.defined.file(path), None) for path in files)
    return Plan(
        summary=f"undefine vGPU {', '.join(intent.names)}",
        steps=(*removals, *changed, *part.steps),
        locks=(LOCK, *sorted(f"vgpu-{name}" for name in intent.names)),
        notes=tuple(
            f"{vgpu} stays active: vfiomgr vgpu remove {name}"
            for name in intent.names
            if name not in absent and (vgpu := host.vgpu(name)) is not None
        ),
        already=tuple(f"there is no definition of vGPU {name}" for name in absent),
    )


def canonical(text: str) -> str:
    """The name of a parent as sysfs writes it, where it is a PCI address."""
    try:
        return str(PciAddress.parse(text))
    except UsageError:
        return text


def _plan_function(host: HostSnapshot, intent: DefineVgpu) -> Plan:
    """The document of a GPU with one virtual function as it is to be."""
    old, new = function_definitions.defined(host, intent)
    step = function_definitions.replacement(host, old, new)
    gpus = [gpu for gpu in host.defined.gpus if gpu.gpu.address != new.gpu.address]
    part = exchange(host, host.vgpu_definitions, [*gpus, new], intent.program)
    function = new.function(PciAddress.parse(intent.name))
    starts = function is not None and function.autostart
    return Plan(
        summary=f"define {function}",
        steps=(*([step] if step else []), *part.steps),
        locks=(LOCK, f"vgpu-{intent.name}"),
        notes=part.notes if starts else (),
        already=() if step else (f"{function} is defined so already",),
    )


def _defined_before(host: HostSnapshot, intent: DefineVgpu) -> VgpuDefinition | None:
    """The definition that is changed, where there is one."""
    found = [d for d in host.vgpu_definitions if d.uuid == intent.name]
    if intent.parent is not None:
        found = [d for d in found if d.parent == canonical(intent.parent)]
    if len(found) > 1:
        raise ambiguous(found)
    return found[0] if found else None


def ambiguous(found: Sequence[VgpuDefinition]) -> Refusal:
    """One UUID that is defined for several parents."""
    parents = ", ".join(d.parent for d in found)
    message = f"vGPU {found[0].uuid} is defined on several parents: {parents}"
    return Refusal(message, "name the one with --parent")


def _wanted(host: HostSnapshot, intent: DefineVgpu, old: VgpuDefinition | None) -> VgpuDefinition:
    active = host.vgpu(intent.name)
    parent = _parent(host, intent, old, active)
    type_id = _type(host, parent, intent, old, active)
    base = old or VgpuDefinition(parent, intent.name, type_id, attributes=_read(host, active))
    if old is None:
        _refuse_unreadable(host, base)
    return replace(
        base,
        type_id=type_id,
        autostart=base.autostart if intent.autostart is None else intent.autostart,
        attributes=base.attributes if intent.attributes is None else intent.attributes,
    )


def _parent(
    host: HostSnapshot, intent: DefineVgpu, old: VgpuDefinition | None, active: Vgpu | None
) -> str:
    known = old or active
    if intent.parent is None and known is None:
        message = f"there is no vGPU {intent.name} that could be defined as it is"
        raise UsageError(message, "name --parent and --type; vfiomgr vgpu types shows them")
    name = canonical(intent.parent) if intent.parent is not None else known.parent if known else ""
    functions = [parent.name for parent in host.vgpu_parents if parent.gpu == name != parent.name]
    if functions:
        message = f"vGPUs of {name} are made on its virtual functions"
        raise UsageError(message, f"name one of them with --parent, e.g. {functions[0]}")
    if not is_name(name):
        message = f"{name!r} is no name of a device"
        raise UsageError(message, "vfiomgr vgpu types shows those that make vGPUs")
    return name


def _type(
    host: HostSnapshot,
    parent: str,
    intent: DefineVgpu,
    old: VgpuDefinition | None,
    active: Vgpu | None,
) -> str:
    if intent.type is None:
        if old is not None:
            return old.type_id
        if active is not None and active.parent == parent:
            return active.type
        message = f"of which type shall vGPU {intent.name} be?"
        raise UsageError(message, "name it with --type; vfiomgr vgpu types shows them")
    there = parent_named(host, parent)
    if there is None and is_name(intent.type):
        return intent.type
    return find_type(types_of(host, there) if there else [], intent.type, parent).id


def parent_named(host: HostSnapshot, name: str) -> VgpuParent | None:
    """The parent of a name, while its driver offers it."""
    return next((parent for parent in host.vgpu_parents if parent.name == name), None)


def types_of(host: HostSnapshot, parent: VgpuParent) -> list[VgpuType]:
    """What a parent can make, as it says itself or another one of its GPU does."""
    alike = [known for known in host.vgpu_parents if known.gpu == parent.gpu]
    return list({kind.id: kind for known in alike for kind in known.types}.values())


def find_type(kinds: Sequence[VgpuType], wanted: str, where: str) -> VgpuType:
    """The type of an identifier, a number or a name.

    Raises:
        UnknownDevice: there is none.

    """
    for kind in types_called(kinds, wanted):
        return kind
    names = [str(kind) for kind in sorted(kinds, key=by_number)]
    message = f"{where} has no vGPU type {wanted}; it has {', '.join(names) or 'none now'}"
    raise UnknownDevice(message, guess(kinds, wanted))


def _read(host: HostSnapshot, active: Vgpu | None) -> Attributes:
    """The settings that NVIDIA's driver tells of an active vGPU."""
    found = host.defined.attributes_of(active.name) if active else ()
    return tuple((name, text) for name, text in found if name == PARAMETERS and text.strip())


def _check_attributes(attributes: Attributes) -> None:
    for name, _ in attributes:
        why = check_attribute(name)
        if why is not None:
            message = f"--attribute {name}: {why}"
            raise UsageError(message, "name it as below /sys/bus/mdev/devices/UUID")
    if [name for name, _ in attributes].count(PARAMETERS) > 1:
        message = f"{PARAMETERS} is given twice, and each write replaces all that it held"
        raise UsageError(message, f"give all in one: --attribute {PARAMETERS}=a=1,b=2")


def _refuse_unreadable(host: HostSnapshot, definition: VgpuDefinition) -> None:
    """A file that says nothing now may be meant to say something."""
    for problem in host.vgpu_definition_problems:
        if problem.path == definition.path:
            message = f"{problem.path} is there, and defines nothing: {problem.reason}"
            raise Refusal(message, f"mend it, or vfiomgr vgpu undefine {definition.uuid} first")


def _notes(host: HostSnapshot, definition: VgpuDefinition) -> Iterator[str]:
    active = host.vgpu(definition.uuid)
    if active is not None and (active.parent, active.type) != (
        definition.parent,
        definition.type_id,
    ):
        yield f"it is active as {active.type} on {active.parent} until vfiomgr vgpu stop"
    if parent_named(host, definition.parent) is None:
        yield f"no device {definition.parent} makes vGPUs now: it waits until one does"
    if host.defined.callouts:
        yield f"vfiomgr does not run what mdevctl would: {', '.join(host.defined.callouts)}"


def _files_of(host: HostSnapshot, name: str, parent: str | None) -> Iterator[str]:
    """The files of mdevctl that have a name, whatever they say."""
    for file in host.defined.files:
        path = HostPath(file.path)
        is_meant = not is_address(name) and parent in (None, path.parent.name)
        if is_meant and path == definition_file(path.parent.name, name):
            yield path


def _gpus_without(
    host: HostSnapshot, names: Iterable[str]
) -> tuple[list[GpuDefinition], list[ReplaceFile], set[str]]:
    """What is left of the GPUs' documents, the steps to it, and the functions that they had."""
    addresses = {PciAddress.parse(name) for name in names if is_address(name)}
    left: list[GpuDefinition] = []
    steps: list[ReplaceFile] = []
    known: set[str] = set()
    for old in host.defined.gpus:
        new: GpuDefinition | None = old
        for function in old.vgpus:
            if function.address in addresses and new is not None:
                new = new.without(function.address)
                known.add(str(function.address))
        step = function_definitions.replacement(host, old, new)
        steps += [step] if step else []
        left += [new] if new else []
    return left, steps, known
