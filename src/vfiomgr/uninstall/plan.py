"""The plan of an uninstallation, joined from the removal plans of all capabilities."""

from __future__ import annotations

import shlex
from collections.abc import Container, Iterator
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.containers.cdi.plan import is_as_written, plan_remove
from vfiomgr.containers.cdi.requests import RemoveCdi
from vfiomgr.definitions import model as definitions
from vfiomgr.definitions import plan
from vfiomgr.definitions.model import GPU_DIRECTORY
from vfiomgr.definitions.plan import LOCK as DEFINITIONS
from vfiomgr.diagnostic import Diagnostic, Remedy, diagnostics_of, refusal
from vfiomgr.documents.text import TextFile, is_sealed
from vfiomgr.engine.plan import Plan, Step, joined
from vfiomgr.engine.registry import plans
from vfiomgr.errors import InvalidDocument, Refusal
from vfiomgr.layout.boot import LOCK as LAYOUT
from vfiomgr.layout.boot import restored_entries
from vfiomgr.libvirt.hook import UninstallHook
from vfiomgr.libvirt.hook import plan_uninstall as plan_hook
from vfiomgr.passthrough.plan import plan_unbind
from vfiomgr.passthrough.steps import Unbind
from vfiomgr.paths import SCRIPT, STATE, HostPath
from vfiomgr.pci.model import PciDevice, is_address
from vfiomgr.persistence import installed_layout as layouts
from vfiomgr.persistence import plan as persistence
from vfiomgr.persistence.installed_layout import FILE, RECORD, SERVICES
from vfiomgr.persistence.model import (
    HOOKS,
    RULES,
    UNIT,
    hook_mode,
    is_rule_file,
    parse_rule,
    render_rule,
)
from vfiomgr.persistence.reservation import (
    is_reservation_file,
    parse_reservation,
    render_reservation,
    reservation_file,
    reservations,
)
from vfiomgr.persistence.steps import ReplaceFile, replaced
from vfiomgr.tuning.model import TUNED, parse_tuned
from vfiomgr.tuning.plan import plan_restoring
from vfiomgr.tuning.steps import RestoreHost
from vfiomgr.uninstall.requests import Uninstall

if TYPE_CHECKING:
    from vfiomgr.snapshot.model import HostSnapshot

_SUMMARY = "remove what vfiomgr wrote on this host"


@plans(Uninstall)
def plan_uninstall(host: HostSnapshot, request: Uninstall) -> Plan:
    """Remove all files of vfiomgr, or nothing; devices first, since only these can be refused.

    Raises:
        Refusal: a device to be unbound is in use.
    """
    edited = dict.fromkeys(edited_files(host))
    unedited = _without(host, edited)
    made = joined(
        _SUMMARY,
        (
            _devices(host, request),
            *_guests(host),
            persistence.plan_change(host, request.files),
            plan_hook(unedited, UninstallHook()),
            plan_remove(unedited, RemoveCdi(every=True)),
            _definitions(unedited),
            _rules(unedited, rebuild=request.update_initramfs),
            Plan("", (), notes=tuple(_edited_note(host, path) for path in edited)),
        ),
    )
    if not made.steps:
        return replace(made, already=("no files to remove",))
    kept = f"{STATE} stays: journals, and the original drivers of bound devices"
    return replace(made, notes=(*made.notes, kept), already=())


def _with_way_out(found: Diagnostic) -> Diagnostic:
    address, _, _ = found.subject.partition(" ")
    leave = f"leave it on its driver: --keep {address if is_address(address) else 'ADDRESS'}"
    return replace(found, remedies=(*found.remedies, Remedy(leave)))


def _devices(host: HostSnapshot, request: Uninstall) -> Plan:
    """Return bound functions to their original drivers, or report that they stay."""
    notes = tuple(_vgpu_notes(host))
    ours = [device for device in host.devices if _is_ours(host, device)]
    going = [device for device in ours if device.address not in request.keep]
    staying = [d for d in ours if d.is_on_vfio and not (request.unbind and d in going)]
    if staying:
        named = ", ".join(str(device.address) for device in staying)
        how = "" if request.unbind else "; to return them now, pass --unbind"
        notes = (f"staying on VFIO drivers until the next boot: {named}{how}", *notes)
    if not (request.unbind and going):
        return Plan("", (), notes=notes)
    # Without the files that are removed too; notes about the next boot and CDI would be wrong.
    bare = replace(host, files=replace(host.files, texts=()), cdi_files=())
    addresses = tuple(device.address for device in going)
    try:
        made = plan_unbind(bare, Unbind(addresses, only=True))
    except Refusal as error:
        raise refusal(map(_with_way_out, diagnostics_of(error))) from None
    return replace(made, notes=(*made.notes, *notes))


def _guests(host: HostSnapshot) -> Iterator[Plan]:
    """Restore what the hook changed for guests, which nothing would do when they end."""
    for guest in parse_tuned(host.files.text(TUNED)):
        note = f"the hook's settings for guest {guest.name} end now, even if it is running"
        yield replace(plan_restoring(host, RestoreHost(guest.uuid, guest.name)), notes=(note,))


def _is_ours(host: HostSnapshot, device: PciDevice) -> bool:
    """Whether vfiomgr bound a function, by a command or by a rule at boot."""
    is_persisted = host.files.binding(device.address) is not None
    return host.origin(device) is not None or (device.is_on_vfio and is_persisted)


def _vgpu_notes(host: HostSnapshot) -> Iterator[str]:
    names = [vgpu.name for vgpu in host.vgpus.active if host.vgpus.is_own(vgpu)]
    if names:
        yield f"vGPUs stay active: {', '.join(names)}; remove them with: vfiomgr vgpu remove NAME"


def _definitions(host: HostSnapshot) -> Plan:
    """Remove the definitions that only vfiomgr reads, and the units that start vGPUs at boot."""
    own = [file for file in host.defined.files if file.path.startswith(f"{GPU_DIRECTORY}/")]
    removals = (ReplaceFile(file.path, file.text, None) for file in own)
    unread = [path for path in host.defined.unreadable if path.startswith(f"{GPU_DIRECTORY}/")]
    notes = [f"{path} cannot be read and stays: rm {shlex.quote(path)}" for path in unread]
    if host.defined.vgpus:
        names = ", ".join(definition.uuid for definition in host.defined.vgpus)
        undo = "delete them with: vfiomgr vgpu undefine NAME"
        notes.append(f"definitions in mdevctl's format stay: {names}; {undo}")
    steps = (*removals, *plan.exchange(host, (), (), None).steps)
    return Plan("", steps, locks=(DEFINITIONS,) if steps else (), notes=tuple(notes))


def _rules(host: HostSnapshot, *, rebuild: bool) -> Plan:
    """Remove the layout, all rules with their unit and hook, and rebuild the initramfs."""
    installed = host.files.text(RECORD) is not None
    notes = []
    if not installed and host.files.text(FILE) is not None:
        notes.append(f"{FILE} stays: it was not written by vfiomgr layout install")
    part = persistence.exchange(host, {}, None, rebuild=rebuild)
    steps: list[Step] = [s for path in reversed(SERVICES) for s in replaced(host, path, None)]
    steps += restored_entries(host)
    steps += _unused_hooks(host)
    cards = sorted(reservations(host.files))
    steps += [s for card in cards for s in replaced(host, reservation_file(card), None)]
    steps += [s for path in (FILE, RECORD) if installed for s in replaced(host, path, None)]
    steps += part.steps  # the last one rebuilds the initramfs, and cannot be undone
    locks = (*part.locks, LAYOUT) if steps else ()
    return Plan("", tuple(steps), locks=locks, notes=(*notes, *part.notes))


def _without(host: HostSnapshot, paths: Container[str]) -> HostSnapshot:
    """The host without these files of vfiomgr."""
    defined = tuple(file for file in host.defined.files if file.path not in paths)
    texts = tuple(file for file in host.files.texts if file.path not in paths)
    return replace(
        host,
        files=replace(host.files, texts=texts),
        definitions=replace(host.defined, files=defined),
        cdi_files=tuple(file for file in host.cdi_files if file.path not in paths),
    )


def _edited_note(host: HostSnapshot, path: str) -> str:
    effect = ""
    if path.startswith(f"{RULES}/") and is_rule_file(HostPath(path).name):
        binding = parse_rule(host.files.text(path) or "")
        what = "applies" if binding is None else f"binds {binding.address}"
        effect = f", and still {what} at boot"
    elif is_reservation_file(HostPath(path).name):
        effect = ", and still keeps compositors off the card"
    remedy = f"check it, then: rm {shlex.quote(path)}"
    return f"{path} stays: it differs from what vfiomgr writes{effect}; {remedy}"


def _unused_hooks(host: HostSnapshot) -> Iterator[ReplaceFile]:
    """Hooks of tools that no longer build the initramfs."""
    used = None if host.files.initramfs is None else HOOKS.get(host.files.initramfs.tool)
    for path, mode in {path: hook_mode(tool) for tool, path in HOOKS.items()}.items():
        if path != used:
            yield from replaced(host, path, None, mode)


_SEALED = frozenset(
    {
        UNIT,
        SCRIPT,
        definitions.SERVICE,
        definitions.INSTANCE,
        definitions.WANTED,
        definitions.RULE,
        layouts.BOOT,
        layouts.WATCH,
        layouts.WANTED,
        *HOOKS.values(),
    }
)
"""Units and hooks, whose last line is a hash of the others."""


def edited_files(host: HostSnapshot) -> Iterator[str]:
    """The paths of edited files, which stay."""
    for file in (*host.files.texts, *host.defined.files):
        try:
            is_own = _is_as_written(host, file)
        except (InvalidDocument, Refusal):  # no vfiomgr could have written this
            is_own = False
        if not is_own:
            yield file.path
    for specification in host.cdi_files:
        has_text = specification.text is not None
        if specification.is_own and has_text and not is_as_written(specification):
            yield specification.path


def _is_as_written(host: HostSnapshot, file: TextFile) -> bool:
    """Whether vfiomgr writes such a text to a path, or writes nothing there.

    Raises:
        InvalidDocument: it is not a definition of vGPUs.
        Refusal: it contains something that vfiomgr cannot write.
    """
    if is_sealed(file.text):
        return True
    path = HostPath(file.path)
    if path.parent == RULES and is_rule_file(path.name):
        return _is_own_rule(host, file)
    if path.parent == RULES and is_reservation_file(path.name):
        reserved = parse_reservation(file.text)
        return reserved is not None and render_reservation(reserved) == file.text
    if path.parent == definitions.GPU_DIRECTORY:
        definition = definitions.parse_gpu_definition(file)
        return definitions.render_gpu_definition(definition) == file.text
    return path not in _SEALED


def _is_own_rule(host: HostSnapshot, file: TextFile) -> bool:
    """Whether a rule of a function is as `bind` or `layout install` wrote it."""
    layout = layouts.parse_record(host.files.text(layouts.RECORD))
    written = () if layout is None else layout.rules
    if any(rule.path == file.path and rule.is_as_written(file.text) for rule in written):
        return True
    binding = parse_rule(file.text)
    return binding is not None and render_rule(binding) == file.text
