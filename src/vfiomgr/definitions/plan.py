"""Plans to define and undefine vGPUs, and what starts them at boot.

That is mdevctl's udev rule, or systemd units and a rule of vfiomgr. The service starts all vGPUs
once per boot. Its instance starts those of one parent when it registers with the kernel
(mdev_register_parent sends a `change` event with MDEV_STATE), so that vGPUs stopped on other
parents stay stopped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NoReturn

from msgspec.structs import replace

from vfiomgr.definitions.model import (
    FILES,
    INSTANCE,
    RULE,
    SERVICE,
    VERSION,
    WANTED,
    FunctionDefinition,
    GpuDefinition,
    VgpuDefinition,
    canonical,
    check_attribute,
    definition_file,
    gpu_file,
    is_name,
    render_definition,
    render_gpu_definition,
)
from vfiomgr.definitions.requests import DefineVgpu, UndefineVgpu
from vfiomgr.diagnostic import refuse
from vfiomgr.documents.text import sealed
from vfiomgr.engine.plan import Plan, Step
from vfiomgr.engine.registry import plans
from vfiomgr.errors import UnknownDevice, UsageError
from vfiomgr.paths import HostPath
from vfiomgr.pci.model import PciAddress, PciDevice, is_address
from vfiomgr.persistence.installed_layout import BOOT
from vfiomgr.persistence.model import SANDBOX, require_plain
from vfiomgr.persistence.steps import Part, ReplaceFile
from vfiomgr.vgpu.capacity import Gpu, by_number, gpus
from vfiomgr.vgpu.model import PARAMETERS, Vgpu, VgpuParent, VgpuType, types_called
from vfiomgr.vgpu.placement import guess

if TYPE_CHECKING:
    from vfiomgr.definitions.model import Attributes, Definition, DefinitionFacts
    from vfiomgr.snapshot.model import HostSnapshot

_HEAD = "# vfiomgr: removed with the last autostart vGPU.\n"
_AFTER = "systemd-modules-load.service nvidia-vgpud.service nvidia-vgpu-mgr.service"
_BEFORE = (
    "libvirtd.service virtqemud.service virtnodedevd.service "
    "kubelet.service containerd.service crio.service"
)


def render_service(program: str) -> str:
    """Render the unit for the boot, which runs before services that assign vGPUs to guests."""
    return sealed(f"""\
{_HEAD}[Unit]
Description=Start all autostart vGPUs
After={_AFTER}
Before={_BEFORE}

[Service]
Type=oneshot
ExecStart={require_plain(program)} vgpu restore --boot
{SANDBOX}""")


def render_instance(program: str) -> str:
    """Render the unit for one parent, named by the instance."""
    return sealed(f"""\
{_HEAD}[Unit]
Description=Start all autostart vGPUs of %i
After={_AFTER}

[Service]
Type=oneshot
ExecStart={require_plain(program)} vgpu restore --boot --parent %i
{SANDBOX}""")


def render_wanted() -> str:
    """Render the drop-in that starts the service at boot."""
    return sealed(f"{_HEAD}[Unit]\nWants={SERVICE.name}\n")


def render_registration_rule() -> str:
    """Render the rule that starts an instance for each parent with definitions.

    SYSTEMD_WANTS is not used: it applies when a device appears, not when it registers again.
    """
    unit = INSTANCE.name.replace("@", "@$kernel")
    return sealed(f"""\
{_HEAD}ACTION=="change", ENV{{MDEV_STATE}}=="registered", TEST=="/etc/mdevctl.d/$kernel", \\
  RUN+="/bin/systemctl --no-block start {unit}"
""")


_BY_HAND = "run `vfiomgr vgpu restore --boot` at boot, after the drivers are loaded"


def exchange(
    host: HostSnapshot,
    mdevs: Sequence[VgpuDefinition],
    gpus: Sequence[GpuDefinition],
    program: str | None,
) -> Part:
    """Return the steps to the files that these definitions need, and notes.

    Without a program (vfiomgr runs as a Python module) nothing new is written.
    """
    needs_rule = not host.defined.is_started_by_mdevctl and any(d.autostart for d in mdevs)
    if not needs_rule and not any(gpu.autostarting for gpu in gpus):
        return Part(tuple(_replaced(host.defined, dict.fromkeys(FILES))))
    notes = tuple(_rule_notes(host.defined)) if needs_rule else ()
    if not host.files.has_systemd:
        return Part(notes=(*notes, f"systemd not found: {_BY_HAND}"))
    if program is None:
        is_there = host.defined.file(RULE if needs_rule else SERVICE) is not None
        why = "vfiomgr is not installed as a command, so no service can run it"
        return Part(notes=notes if is_there else (*notes, f"{why}: {_BY_HAND}"))
    wanted: dict[str, str | None] = {SERVICE: render_service(program), WANTED: render_wanted()}
    wanted[INSTANCE] = render_instance(program) if needs_rule else None
    wanted[RULE] = render_registration_rule() if needs_rule else None
    return Part(tuple(_replaced(host.defined, wanted)), notes)


def _replaced(facts: DefinitionFacts, wanted: dict[str, str | None]) -> Iterator[Step]:
    """The steps to the wanted files, services before what starts them."""
    for path, after in sorted(wanted.items(), key=lambda item: FILES.index(item[0])):
        before = facts.file(path)
        if before != after:
            yield ReplaceFile(path, before, after)


def _rule_notes(facts: DefinitionFacts) -> Iterator[str]:
    rule = facts.mdevctl
    if rule is not None and not rule.has_program:
        yield f"vfiomgr starts it, because {rule.path} runs {rule.program}, which does not exist"


def defined(host: HostSnapshot, request: DefineVgpu) -> tuple[GpuDefinition | None, GpuDefinition]:
    """Return the old and the new definition of a GPU, for a definition of a virtual function.

    Raises:
        UsageError: a value is missing or not supported for virtual functions.
        UnknownDevice: the type is not found on the GPU.
        Refusal: the existing document is of another device, or unusable.
    """
    address = PciAddress.parse(request.name)
    gpu = _gpu_of(host, address)
    device = _physical(host, gpu)
    old = _document(host, device)
    function = old.function(address) if old else None
    present = _present(gpu, device, old)
    return old, present.with_function(_wanted_function(host, request, gpu, function))


def replacement(
    host: HostSnapshot, old: GpuDefinition | None, new: GpuDefinition | None
) -> ReplaceFile | None:
    """The step from one document to another; None if they are equal."""
    if old == new:
        return None
    path = old.path if old else new.path if new else ""
    after = render_gpu_definition(new) if new else None
    return ReplaceFile(path, host.defined.file(path), after)


def _gpu_of(host: HostSnapshot, address: PciAddress) -> Gpu:
    for gpu in gpus(host):
        if gpu.family == "vendor-vfio" and str(address) in {p.name for p in gpu.parents}:
            return gpu
    message = f"{address} is not a virtual function for vGPUs of the vendor's driver"
    raise UnknownDevice(message, "list GPUs that support vGPUs with: vfiomgr vgpu list --types")


def _physical(host: HostSnapshot, gpu: Gpu) -> PciDevice:
    if gpu.mode is not None and gpu.mode.mig and gpu.partition is None:
        message = f"{gpu} is in MIG mode, but nvidia-smi does not report its GPU instances"
        refuse(
            "nvidia-smi-silent",
            gpu,
            message,
            f"find the cause with: nvidia-smi mig -lgip -i {gpu.name}",
        )
    return host.device(PciAddress.parse(gpu.name))


def _document(host: HostSnapshot, device: PciDevice) -> GpuDefinition | None:
    path = gpu_file(device.address)
    for problem in host.defined.problems:
        if problem.path == path:
            message = f"cannot use {path}: {problem.reason}"
            refuse("definition-unusable", path, message, "correct the file, or remove it")
    known = next((g for g in host.defined.gpus if g.gpu.address == device.address), None)
    if known is not None and not known.gpu.is_same_as(device.identity):
        message = f"{path} is for another device: {known.gpu}, not {device.identity}"
        command = f"vfiomgr vgpu undefine {' '.join(one.name for one in known.vgpus)}"
        remedy = f"remove it, or undefine its vGPUs first: {command}"
        refuse("another-device", device, message, remedy)
    return known


def _present(gpu: Gpu, device: PciDevice, old: GpuDefinition | None) -> GpuDefinition:
    """The current state of a GPU, with the defined vGPUs; what is unknown is as defined."""
    base = old or GpuDefinition(VERSION, device.identity, 0, ())
    mixed, mig = base.heterogeneous, base.mig
    if gpu.mode is not None and gpu.mode.heterogeneous is not None:
        mixed = gpu.mode.heterogeneous
    if gpu.mode is not None and gpu.mode.mig is False:
        mig = None
    elif gpu.mode is not None and gpu.mode.mig and gpu.partition:
        mig = tuple(place.name for place in gpu.partition.places)
    count = device.sriov_numvfs or len(device.virtual_functions)
    return replace(base, virtual_functions=count, heterogeneous=mixed, mig=mig)


def _wanted_function(
    host: HostSnapshot, request: DefineVgpu, gpu: Gpu, old: FunctionDefinition | None
) -> FunctionDefinition:
    address = PciAddress.parse(request.name)
    type_id, type_name = _function_type(host, request, gpu, old)
    read = dict(host.defined.attributes_of(request.name)).get(PARAMETERS, "").strip()
    base = old or FunctionDefinition(address, type_id, parameters=read)
    new = replace(base, type_id=type_id, type_name=type_name)
    if request.autostart is not None:
        new = replace(new, start="auto" if request.autostart else "manual")
    if request.attributes is not None:
        new = replace(new, parameters=_parameters(request))
    return new


def _function_type(
    host: HostSnapshot, request: DefineVgpu, gpu: Gpu, old: FunctionDefinition | None
) -> tuple[str, str | None]:
    """Number and name of the type: as requested, as defined, or of the active vGPU."""
    active = host.vgpus.named(request.name)
    if request.type is None:
        if old is not None:
            return old.type_id, old.type_name
        if active is not None:
            return active.type, active.type_name
        message = f"missing option: --type ({request.name} is not an active vGPU)"
        raise UsageError(message, "list the types with: vfiomgr vgpu list --types")
    for kind in types_called(gpu.types, request.type):
        return kind.id, kind.name
    if active is not None and request.type in (active.type, active.type_name):
        return active.type, active.type_name
    names = ", ".join(map(str, gpu.types))
    message = f"{gpu.name} has no vGPU type {request.type}; available: {names or 'none'}"
    raise UnknownDevice(message, "list the types that still fit with: vfiomgr vgpu list --types")


def _parameters(request: DefineVgpu) -> str:
    for name, _ in request.attributes or ():
        if name != PARAMETERS:
            message = f"invalid --attribute: {name} (virtual functions support only {PARAMETERS})"
            raise UsageError(message, f"example: --attribute {PARAMETERS}=a=1,b=2")
    return "".join(text for _, text in request.attributes or ())


LOCK = "vgpu-definitions"


@plans(DefineVgpu)
def plan_define(host: HostSnapshot, request: DefineVgpu) -> Plan:
    """Define a vGPU, with the files that start it.

    Raises:
        UsageError: a value is missing or invalid.
        UnknownDevice: the type is not found on the parent.
        Refusal: the existing file is unusable.
    """
    _check_attributes(request.attributes or ())
    mdevs, gpus_after = host.defined.vgpus, host.defined.gpus
    definition: Definition | None
    notes: tuple[str, ...] = ()
    if is_address(request.name):
        old, new = defined(host, request)
        change = replacement(host, old, new)
        gpus_after = (*(g for g in gpus_after if g.gpu.address != new.gpu.address), new)
        definition = new.function(PciAddress.parse(request.name))
    else:
        definition = _wanted(host, request, _defined_before(host, request))
        text, before = render_definition(definition), host.defined.file(definition.path)
        change = None if before == text else ReplaceFile(definition.path, before, text)
        mdevs = (*(d for d in mdevs if d.path != definition.path), definition)
        notes = tuple(_notes(host, definition))
    part = exchange(host, mdevs, gpus_after, request.program)
    starts = definition is not None and definition.autostart
    return Plan(
        summary=f"define {definition}",
        steps=(*([change] if change else []), *part.steps),
        locks=(LOCK, f"vgpu-{request.name}"),
        notes=(*notes, *(part.notes if starts else ())),
        already=() if change else (f"{definition} is already defined",),
    )


@plans(UndefineVgpu)
def plan_undefine(host: HostSnapshot, request: UndefineVgpu) -> Plan:
    """Delete definitions, including unusable files."""
    parent = None if request.parent is None else canonical(request.parent)
    gone = {name: list(_files_of(host, name, parent)) for name in request.names}
    files = dict.fromkeys(file for found in gone.values() for file in found)
    gpus, changed, known = _gpus_without(host, request.names)
    mdevs = [d for d in host.defined.vgpus if d.path not in files]
    part = exchange(host, mdevs, gpus, None)
    absent = [name for name in request.names if not gone[name] and name not in known]
    removals = (ReplaceFile(path, host.defined.file(path), None) for path in files)
    return Plan(
        summary=f"undefine vGPU {', '.join(request.names)}",
        steps=(*removals, *changed, *part.steps),
        locks=(LOCK, *sorted(f"vgpu-{name}" for name in request.names)),
        notes=tuple(
            f"{vgpu} stays active; remove it with: vfiomgr vgpu remove {name}"
            for name in request.names
            if name not in absent and (vgpu := host.vgpus.named(name)) is not None
        ),
        already=tuple(f"vGPU definition not found: {name}" for name in absent),
    )


def _defined_before(host: HostSnapshot, request: DefineVgpu) -> VgpuDefinition | None:
    """The existing definition, or None."""
    found = [d for d in host.defined.vgpus if d.uuid == request.name]
    if request.parent is not None:
        found = [d for d in found if d.parent == canonical(request.parent)]
    if len(found) > 1:
        refuse_ambiguous(found)
    return found[0] if found else None


def refuse_ambiguous(found: Sequence[VgpuDefinition]) -> NoReturn:
    """Refuse a UUID that is defined on several parents."""
    parents = ", ".join(d.parent for d in found)
    message = f"vGPU {found[0].uuid} is defined on several parents: {parents}"
    refuse("definition-ambiguous", found[0].uuid, message, "name the parent with --parent")


def _wanted(host: HostSnapshot, request: DefineVgpu, old: VgpuDefinition | None) -> VgpuDefinition:
    active = host.vgpus.named(request.name)
    parent = _parent(host, request, old, active)
    type_id = _type(host, parent, request, old, active)
    base = old or VgpuDefinition(parent, request.name, type_id, attributes=_read(host, active))
    if old is None:
        _refuse_unreadable(host, base)
    return replace(
        base,
        type_id=type_id,
        autostart=base.autostart if request.autostart is None else request.autostart,
        attributes=base.attributes if request.attributes is None else request.attributes,
    )


def _parent(
    host: HostSnapshot, request: DefineVgpu, old: VgpuDefinition | None, active: Vgpu | None
) -> str:
    known = old or active
    if request.parent is None and known is None:
        message = f"missing options: --parent and --type (vGPU {request.name} is not active)"
        raise UsageError(message, "list parents and types with: vfiomgr vgpu list --types")
    name = (
        canonical(request.parent) if request.parent is not None else known.parent if known else ""
    )
    functions = [parent.name for parent in host.vgpus.parents if parent.gpu == name != parent.name]
    if functions:
        message = f"vGPUs of {name} need one of its virtual functions as parent"
        raise UsageError(message, f"name one, e.g. --parent {functions[0]}")
    if not is_name(name):
        message = f"invalid device name: {name!r}"
        raise UsageError(message, "list devices that support vGPUs with: vfiomgr vgpu list --types")
    return name


def _type(
    host: HostSnapshot,
    parent: str,
    request: DefineVgpu,
    old: VgpuDefinition | None,
    active: Vgpu | None,
) -> str:
    if request.type is None:
        if old is not None:
            return old.type_id
        if active is not None and active.parent == parent:
            return active.type
        message = f"missing option: --type (for vGPU {request.name})"
        raise UsageError(message, "list the types with: vfiomgr vgpu list --types")
    there = parent_named(host, parent)
    if there is None and is_name(request.type):
        return request.type
    return find_type(types_of(host, there) if there else [], request.type, parent).id


def parent_named(host: HostSnapshot, name: str) -> VgpuParent | None:
    """The parent with this name; None if no driver offers it."""
    return next((parent for parent in host.vgpus.parents if parent.name == name), None)


def types_of(host: HostSnapshot, parent: VgpuParent) -> list[VgpuType]:
    """The types of a parent, including those that other parents of its GPU list."""
    alike = [known for known in host.vgpus.parents if known.gpu == parent.gpu]
    return list({kind.id: kind for known in alike for kind in known.types}.values())


def find_type(kinds: Sequence[VgpuType], wanted: str, where: str) -> VgpuType:
    """Find a type by ID, number or name.

    Raises:
        UnknownDevice: the type is not found.
    """
    for kind in types_called(kinds, wanted):
        return kind
    names = [str(kind) for kind in sorted(kinds, key=by_number)]
    message = f"{where} has no vGPU type {wanted}; available: {', '.join(names) or 'none'}"
    raise UnknownDevice(message, guess(kinds, wanted))


def _read(host: HostSnapshot, active: Vgpu | None) -> Attributes:
    """The parameters of an active vGPU, as reported by NVIDIA's driver."""
    found = host.defined.attributes_of(active.name) if active else ()
    return tuple((name, text) for name, text in found if name == PARAMETERS and text.strip())


def _check_attributes(attributes: Attributes) -> None:
    for name, _ in attributes:
        why = check_attribute(name)
        if why is not None:
            message = f"invalid --attribute: {why}"
            raise UsageError(message, "use a path relative to /sys/bus/mdev/devices/UUID")
    if [name for name, _ in attributes].count(PARAMETERS) > 1:
        message = f"{PARAMETERS} is specified twice, but each write replaces the previous one"
        raise UsageError(message, f"combine them: --attribute {PARAMETERS}=a=1,b=2")


def _refuse_unreadable(host: HostSnapshot, definition: VgpuDefinition) -> None:
    """Refuse to overwrite an unusable file."""
    for problem in host.defined.problems:
        if problem.path == definition.path:
            message = f"cannot use {problem.path}: {problem.reason}"
            refuse(
                "definition-unusable",
                problem.path,
                message,
                f"correct the file, or first run: vfiomgr vgpu undefine {definition.uuid}",
            )


def _notes(host: HostSnapshot, definition: VgpuDefinition) -> Iterator[str]:
    active = host.vgpus.named(definition.uuid)
    if active is not None and (active.parent, active.type) != (
        definition.parent,
        definition.type_id,
    ):
        yield (
            f"it stays active as {active.type} on {active.parent} until: "
            f"vfiomgr vgpu stop {active.name}"
        )
    parent = parent_named(host, definition.parent)
    if parent is None:
        yield f"{definition.parent} does not support vGPUs now; the vGPU starts when it does"
    elif definition.autostart and parent.is_virtual_function and host.files.text(BOOT) is None:
        yield (
            f"virtual functions of {parent.gpu} are lost at reboot; to create them at boot: "
            "vfiomgr layout export --addresses > host.yaml; vfiomgr layout install host.yaml"
        )
    if host.defined.callouts:
        yield f"vfiomgr does not run mdevctl's callouts: {', '.join(host.defined.callouts)}"


def _files_of(host: HostSnapshot, name: str, parent: str | None) -> Iterator[str]:
    """The mdevctl files with this name, valid or not."""
    for file in host.defined.files:
        path = HostPath(file.path)
        is_meant = not is_address(name) and parent in (None, path.parent.name)
        if is_meant and path == definition_file(path.parent.name, name):
            yield path


def _gpus_without(
    host: HostSnapshot, names: Iterable[str]
) -> tuple[list[GpuDefinition], list[ReplaceFile], set[str]]:
    """Return the remaining documents of GPUs, the steps to them, and the removed functions."""
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
        step = replacement(host, old, new)
        steps += [step] if step else []
        left += [new] if new else []
    return left, steps, known
