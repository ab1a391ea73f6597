"""libvirt's hook: its script, what it changes on the host for a guest, and how it is installed.

Since 6.5 libvirt runs the files in `qemu.d` in name order, besides the script `qemu`, and waits for
them: a script that called libvirt would wait for itself (https://libvirt.org/hooks.html).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, ClassVar

from vfiomgr.definitions.requests import StartVgpu, StopVgpu
from vfiomgr.desktop.plan import record_of
from vfiomgr.desktop.steps import RecordRelease
from vfiomgr.diagnostic import Diagnostic, blocker, refuse, refuse_if_any
from vfiomgr.documents.jsonable import from_jsonable
from vfiomgr.documents.text import parse_json, sealed
from vfiomgr.engine.plan import Plan, Request
from vfiomgr.engine.registry import plans
from vfiomgr.errors import InvalidDocument
from vfiomgr.libvirt.model import HookSettings
from vfiomgr.passthrough.steps import Bind, ChangeDriver, Unbind
from vfiomgr.paths import RUNTIME, SCRIPT, HostPath
from vfiomgr.pci.iommu import blockers
from vfiomgr.pci.model import PciAddress, is_vfio_driver
from vfiomgr.persistence.model import require_plain
from vfiomgr.persistence.steps import ReplaceFile
from vfiomgr.tuning.model import PlacedInterrupts
from vfiomgr.tuning.steps import HugepageNeeds, MemoryPart, TuneHost
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from vfiomgr.libvirt.model import Domain
    from vfiomgr.snapshot.model import HostSnapshot


MODE = 0o755
PREFIX = "vfiomgr"
OPT_IN = "<devices bind='yes'/>"
"""The element that enables the hook for a domain; `render_settings` adds its settings."""
GUESTS = RUNTIME / "guests"
"""What the hook took from the host for running guests."""
PREPARE, RELEASE = "prepare", "release"


def render_script(program: str) -> str:
    """The script; it lets guests start if vfiomgr is removed, and acts only on two operations.

    Raises:
        Refusal: a path would need quotes.

    """
    words = require_plain(program)
    plain = words.partition(" ")[0]
    return sealed(f"""\
#!/bin/sh
# vfiomgr: removed by `vfiomgr libvirt hook uninstall`. It acts only for guests for which
# `vfiomgr libvirt hook install DOMAIN` was run.
case "$2" in
    {PREPARE} | {RELEASE}) ;;
    *) exit 0 ;;
esac
if [ ! -x {plain} ]; then
    echo "vfiomgr: {plain} is gone, so devices of guests are not bound" >&2
    exit 0
fi
xml=$(cat)
printf '%s' "$xml" | {words} libvirt hook run -- "$@"
status=$?
# Killed: end what it left half done, so that devices and the screen return to the host.
[ "$status" -lt 128 ] || {words} --yes recover </dev/null >&2
# libvirt itself was killed meanwhile: it will neither start the guest nor release its devices.
if [ "$2" = {PREPARE} ] && [ ! -e "/proc/$PPID" ]; then
    printf '%s' "$xml" | {words} libvirt hook run -- "$1" {RELEASE} end - 2>/dev/null
fi
exit "$status"
""")


class GuestRecord(Value):
    """What the hook took from the host for one guest; a reboot removes the record."""

    uuid: str
    name: str
    functions: tuple[str, ...] = ()
    vgpus: tuple[str, ...] = ()

    @property
    def path(self) -> HostPath:
        """The path of the record."""
        return GUESTS / f"{self.uuid}.json"

    @property
    def is_empty(self) -> bool:
        """Whether nothing was taken."""
        return not self.functions and not self.vgpus

    def with_taken(self, functions: Iterable[str], vgpus: Iterable[str]) -> GuestRecord:
        """The record with more devices."""
        return GuestRecord(
            self.uuid,
            self.name,
            tuple(dict.fromkeys((*self.functions, *functions))),
            tuple(dict.fromkeys((*self.vgpus, *vgpus))),
        )

    def render(self) -> str:
        """The text of the record's file."""
        document = {"name": self.name, "functions": self.functions, "vgpus": self.vgpus}
        return f"{json.dumps(document)}\n"


class _Written(Value):
    """The file of a record."""

    name: str
    functions: tuple[str, ...]
    vgpus: tuple[str, ...]


def parse_record(uuid: str, text: str) -> GuestRecord:
    """Read the file of a record.

    Raises:
        InvalidDocument: it is not a record.

    """
    try:
        written = from_jsonable(_Written, parse_json(text))
    except ValueError as error:
        message = f"{GUESTS / uuid}.json is not a valid record of vfiomgr: {error}"
        hint = (
            "remove it; vfiomgr list shows what is bound, and vfiomgr unbind returns it to the host"
        )
        raise InvalidDocument(message, hint) from None
    return GuestRecord(uuid, written.name, written.functions, written.vgpus)


class InstallHook(Request, Value):
    """Install the hook in libvirt; it acts only for guests for which it is enabled."""

    program: str | None = None
    """The path of vfiomgr itself, for the script."""
    kind: ClassVar[str] = "install-hook"


class UninstallHook(Request, Value):
    """Remove the installed hook."""

    kind: ClassVar[str] = "uninstall-hook"


LOCK = "libvirt-hook"


def render_settings(settings: HookSettings) -> str:
    """The element for the metadata of a domain."""
    names = (n for n in settings.__struct_fields__ if getattr(settings, n))
    return OPT_IN.replace("/>", "".join(f" {n.replace('_', '-')}='yes'" for n in names) + "/>")


class GuestNeeds(Value):
    """The devices of a guest that are not available to it yet."""

    functions: tuple[PciAddress, ...] = ()
    """Functions on host drivers, or in a group with others on host drivers."""
    vgpus: tuple[str, ...] = ()
    """vGPUs that are defined but not active."""
    settings: HookSettings = HookSettings()
    tuning: TuneHost | None = None
    """What is changed on the host while the guest runs."""

    @property
    def bind(self) -> Bind:
        """The request that binds the functions."""
        how = self.settings
        return Bind(self.functions, release=how.release, end_sessions=how.end_sessions)

    def intents(self) -> Iterator[Request]:
        """The requests that make them available; first what fails more often, and harms least."""
        if self.tuning is not None:
            yield self.tuning
        if self.vgpus:
            yield StartVgpu(self.vgpus)
        if self.functions:
            yield self.bind


def needs_of(host: HostSnapshot, domain: Domain, record: GuestRecord) -> GuestNeeds:
    """What vfiomgr must bind or start for a guest: nothing that libvirt manages.

    A recorded device that is not bound comes from an interrupted run.

    Raises:
        Refusal: a vGPU is neither active nor defined.

    """
    functions: list[PciAddress] = []
    vgpus: list[str] = []
    diagnostics: list[Diagnostic] = []
    defined = {definition.uuid for definition in host.defined.vgpus}
    defined |= {str(f.address) for gpu in host.defined.gpus for f in gpu.vgpus}
    for hostdev in domain.hostdevs:
        device = host.device_named(hostdev.name)
        is_vgpu = hostdev.kind == "mdev" or (
            device is not None and host.vgpus.is_vendor_function(device)
        )
        if is_vgpu and host.vgpus.named(hostdev.name) is None:
            name = hostdev.name
            if name in defined:
                vgpus.append(name)
            else:
                how = f"vfiomgr vgpu define {name} --type …, or vfiomgr vgpu create"
                diagnostics.append(blocker("vgpu-missing", name, f"no such vGPU: {name}", how))
        elif is_vgpu or device is None or hostdev.managed or hostdev.kind != "pci":
            continue  # libvirt reports an absent function
        elif not device.is_on_vfio or blockers(host.group_members(device.iommu_group)):
            functions.append(device.address)
    refuse_if_any(diagnostics, frozenset())
    begun = (host.device_named(name) for name in record.functions)
    functions += [d.address for d in begun if d is not None and not d.is_on_vfio]
    settings = domain.hook or HookSettings()
    tuning = tuning_of(host, domain)
    return GuestNeeds(tuple(dict.fromkeys(functions)), tuple(vgpus), settings, tuning)


def tuning_of(host: HostSnapshot, domain: Domain) -> TuneHost:
    """What the settings of a domain change on the host while it runs."""
    settings, cpu = domain.hook or HookSettings(), domain.cpu
    pinned = tuple(sorted(frozenset[int]().union(*(cpus for _, cpus in cpu.pins))))
    known = (host.device_named(h.name) for h in domain.hostdevs if h.kind == "pci")
    functions = tuple(device.address for device in known if device is not None)
    names = ", ".join(map(str, functions))
    return TuneHost(
        domain.uuid or "",
        domain.name,
        pinned if settings.isolate_cpus else None,
        _hugepages(domain) if settings.hugepages else None,
        f"guest {domain.name} has {names}" if names else "",
        PlacedInterrupts(functions, pinned) if settings.interrupts and functions else None,
    )


def _hugepages(domain: Domain) -> HugepageNeeds:
    """The huge pages of a domain: of its cells that are bound to nodes, and of the rest."""
    memory = domain.memory
    if not memory.has_hugepages:
        return HugepageNeeds((), ())
    bound = dict(memory.cell_nodes)
    cells = [cell for cell in domain.cpu.cells if cell.number in bound]
    parts = [MemoryPart(tuple(sorted(bound[c.number])), c.memory_bytes) for c in cells]
    rest = memory.total_bytes - sum(part.size_bytes for part in parts)
    if rest > 0:
        parts.append(MemoryPart(tuple(sorted(memory.host_nodes)), rest))
    return HugepageNeeds(memory.hugepage_bytes, tuple(parts))


def taken_by(plan: Plan) -> tuple[str, ...]:
    """The functions that a plan takes from host drivers, and displays that it has released."""
    return tuple(
        str(step.device.address)
        for step in plan.steps
        if isinstance(step, RecordRelease)
        or (
            isinstance(step, ChangeDriver)
            and is_vfio_driver(step.after.driver)
            and not is_vfio_driver(step.before.driver)
        )
    )


def returns_of(host: HostSnapshot, record: GuestRecord) -> Iterator[Request]:
    """The requests that return what was taken for a guest and has not been returned yet.

    Displays that the desktop has released come first, by themselves: what cannot be returned after
    them leaves them on the host.
    """
    functions = tuple(
        device.address
        for device in map(host.device_named, record.functions)
        if device is not None
        and (device.is_on_vfio or host.origin(device) or record_of(host, device.address))
    )
    displays = tuple(one for one in functions if record_of(host, one))
    yield from (Unbind((one,), only=True) for one in displays)
    others = tuple(one for one in functions if one not in displays)
    if others:
        yield Unbind(others, only=True)
    vgpus = tuple(name for name in record.vgpus if host.vgpus.named(name) is not None)
    if vgpus:
        yield StopVgpu(vgpus)


# ---- the hook itself


@plans(InstallHook)
def plan_install(host: HostSnapshot, request: InstallHook) -> Plan:
    """Install the hook in libvirt.

    Raises:
        Refusal: vfiomgr is not installed as a command that a script can run.

    """
    if request.program is None:
        message = "cannot run vfiomgr from a script: it is not installed as a command"
        remedy = "install vfiomgr as its README says, and run that command"
        refuse("hook-without-program", "", message, remedy)
    wanted = render_script(request.program)
    there = host.files.text(SCRIPT)
    if there == wanted:
        return Plan("install the hook", (), already=("the hook is already installed",))
    notes = ["enable it for a guest: vfiomgr libvirt hook install DOMAIN"]
    if there is None:
        notes.append(
            "restart libvirtd or virtqemud once: libvirt looks for hooks only when it starts "
            "(running guests continue)"
        )
    return Plan(
        summary="install the hook",
        steps=(ReplaceFile(SCRIPT, there, wanted, mode=MODE),),
        locks=(LOCK,),
        notes=tuple(notes),
    )


@plans(UninstallHook)
def plan_uninstall(host: HostSnapshot, _request: UninstallHook) -> Plan:
    """Remove the script; what it bound for running guests stays bound."""
    there = host.files.text(SCRIPT)
    if there is None:
        return Plan("uninstall the hook", (), already=("the hook is not installed",))
    return Plan(
        summary="uninstall the hook",
        steps=(ReplaceFile(SCRIPT, there, None, mode=MODE),),
        locks=(LOCK,),
        notes=(
            "devices of running guests stay bound; vfiomgr unbind returns them to the host",
            "from now on, bind the devices of these guests yourself before they start",
        ),
    )
