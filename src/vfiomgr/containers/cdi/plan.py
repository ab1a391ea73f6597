"""Plan vfiomgr's own specifications: create, update and delete them."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.containers.cdi.devices import (
    LOWEST,
    kind_notes,
    nothing_ready,
    refuse_unread,
    specification_of,
)
from vfiomgr.containers.cdi.document import (
    is_called,
    is_readable,
    needed_version,
    read_file,
    render_specification,
    version_of,
)
from vfiomgr.containers.cdi.model import (
    DIRECTORIES,
    STATIC,
    CdiDevice,
    CdiEdits,
    CdiSpecification,
    own_file,
)
from vfiomgr.containers.cdi.requests import GOES, RemoveCdi, WriteCdi
from vfiomgr.containers.cdi.rules import CONSUMERS
from vfiomgr.diagnostic import Diagnostic, blocker, refuse_if_any
from vfiomgr.engine.plan import Plan
from vfiomgr.engine.registry import plans
from vfiomgr.guests.nodes import NodeDevice, resolve
from vfiomgr.persistence.steps import ReplaceFile

if TYPE_CHECKING:
    from vfiomgr.containers.cdi.model import CdiFile
    from vfiomgr.paths import HostPath
    from vfiomgr.pci.model import PciAddress
    from vfiomgr.snapshot.model import HostSnapshot

LOCK = "cdi"
_LONGEST_NAME = 240
"""A file name may have 255 bytes; the file is created under a longer name and then renamed."""


@plans(WriteCdi)
def plan_write(host: HostSnapshot, request: WriteCdi) -> Plan:
    """Plan one file with the available devices; with addresses, add these to its devices.

    Raises:
        Refusal: no device is available, another file has the same devices differently, or the
            existing file is not vfiomgr's.
        UsageError: the kind is invalid.
    """
    wanted = specification_of(host, request.offer)
    path = own_file(DIRECTORIES[request.lifetime], request.offer.kind)
    there = next((file for file in host.cdi_files if file.path == path), None)
    before = None if there is None else read_file(there)
    refuse_if_any(_against_file(path, before, request.offer.kind), frozenset())
    after = wanted
    if request.offer.addresses and before is not None:
        after = _joined(host, before, wanted, by_index=request.offer.name_by == "index")
        refuse_unread(after, request.offer)
    if not after.devices and there is None:
        raise nothing_ready(host)
    refuse_if_any(_diagnostics(host, after, path), frozenset())
    text = render_specification(after) if after.devices else None
    summary = f"write {path}" if after.devices else f"remove {path}"
    notes = [*kind_notes(host, after), *_twice_notes(host, after, path)]
    if there is not None and there.text == text:
        return Plan(summary, (), already=(f"{path} is already up to date",), notes=tuple(notes))
    if before is not None:
        notes += [*_change_notes(before, after), *_lost_notes(before, after)]
    if text is None:
        notes.append(
            "no device is available; deleting the file, because a file without devices breaks "
            "consumers"
        )
    return Plan(
        summary=summary,
        steps=(ReplaceFile(path, None if there is None else there.text, text),),
        locks=(LOCK,),
        notes=(*notes, *_version_notes(after)),
    )


def _change_notes(before: CdiSpecification, after: CdiSpecification) -> Iterator[str]:
    names = {device.name for device in after.devices}
    for device in before.devices:
        if device not in after.devices:
            what = "is another device" if device.name in names else "is removed"
            yield f"{before.qualified(device)} {what}"


def _against_file(
    path: HostPath, before: CdiSpecification | None, kind: str
) -> Iterator[Diagnostic]:
    """Reasons against writing the file: its name, or its present content."""
    if len(path.name) > _LONGEST_NAME:
        yield blocker(
            "cdi-file-name",
            path,
            f"the file name for kind {kind[:40]}… would be too long: {len(path.name)} characters",
            "use a shorter kind, or write it elsewhere with --output",
        )
    if before is None:
        return
    remedy = f"check the file, then: vfiomgr cdi remove --all --kind {shlex.quote(kind)}"
    if not is_readable(before):
        what = "; ".join(oddity.found.summary for oddity in before.oddities[:1])
        yield blocker(
            "cdi-unreadable", path, f"{path} is no longer a valid specification ({what})", remedy
        )
    elif before.kind != kind:
        reason = f"{path} contains {before.kind or 'no kind'}, not {kind}"
        yield blocker(
            "cdi-other-kind", path, reason, f"move it elsewhere: vfiomgr uses this path for {kind}"
        )


def _lost_notes(before: CdiSpecification, after: CdiSpecification) -> Iterator[str]:
    """Notes about manual changes to a file of vfiomgr that will be lost."""
    for oddity in before.oddities:
        yield f"{before.file}: {oddity.found.summary}: a manual change that is removed"
    if before.annotations and before.annotations != after.annotations:
        yield f"{before.file}: manually added annotations are removed"
    if replace(before.edits, device_nodes=()) != replace(after.edits, device_nodes=()):
        yield f"{before.file}: containerEdits was changed manually and is overwritten"
    written = {device.name: device for device in after.devices}
    for device in before.devices:
        by_hand = device.annotations or replace(device.edits, device_nodes=()) != CdiEdits()
        if by_hand and written.get(device.name, device) != device:
            yield f"{before.file}: {device.name} was changed manually and is overwritten"


def _indexed(
    host: HostSnapshot,
    kept: Iterable[CdiDevice],
    published: Iterable[CdiDevice],
    wanted: Iterable[CdiDevice],
) -> Iterator[CdiDevice]:
    """Devices with numbers: those that they already have, else free ones."""
    numbers = {
        target.group: device.name
        for device in published
        if device.name.isdecimal()
        for target in _targets(host, device)
    }
    wanted = list(wanted)
    known = [next((numbers.get(t.group) for t in _targets(host, d)), None) for d in wanted]
    taken = {device.name for device in kept} | {name for name in known if name is not None}
    for device, name in zip(wanted, known, strict=True):
        free = (number for number in (device.name, *map(str, range(len(taken) + 1))))
        chosen = name or next(number for number in free if number not in taken)
        taken.add(chosen)
        yield replace(device, name=chosen)


def _joined(
    host: HostSnapshot, before: CdiSpecification, wanted: CdiSpecification, *, by_index: bool
) -> CdiSpecification:
    """The available devices of a file, with the added ones."""
    groups = {t.group for device in wanted.devices for t in _targets(host, device)}
    kept = [
        device
        for device in before.devices
        if not is_stale(host, device)
        and not groups.intersection(t.group for t in _targets(host, device))
    ]
    added = list(wanted.devices)
    if by_index:
        published = [device for device in before.devices if not is_stale(host, device)]
        added = list(_indexed(host, kept, published, added))
    names = {device.name for device in added}
    kept = [device for device in kept if device.name not in names]
    nodes = dict.fromkeys((*before.edits.device_nodes, *wanted.edits.device_nodes))
    both = sorted((*kept, *added), key=lambda device: _place(host, device))
    made = replace(
        wanted,
        edits=replace(before.edits, device_nodes=tuple(nodes)),
        annotations=before.annotations,
    )
    return _of_devices(made, tuple(both))


def _place(host: HostSnapshot, device: CdiDevice) -> tuple[bool, list[PciAddress], str]:
    """The position of a device in a file, as in one of all available devices."""
    found = [d.address for target in _targets(host, device) for d in target.functions]
    return not found, sorted(found)[:1], device.name


def _of_devices(
    specification: CdiSpecification, devices: tuple[CdiDevice, ...]
) -> CdiSpecification:
    made = replace(specification, devices=devices)
    return replace(made, version=str(max(LOWEST, needed_version(made))))


def _targets(host: HostSnapshot, device: CdiDevice) -> tuple[NodeDevice, ...]:
    """The devices behind the VFIO nodes of a device."""
    found = (resolve(host, node.on_host) for node in device.edits.device_nodes)
    return tuple(target for target in found if target.kind in ("group", "cdev"))


def is_stale(host: HostSnapshot, device: CdiDevice) -> bool:
    """Whether a VFIO device is unavailable, or has become another device."""
    targets = _targets(host, device)
    known = host.device_named(device.name)
    return bool(targets) and (
        any(target.problem is not None for target in targets)
        or (known is not None and all(device.name not in target.names for target in targets))
    )


def _diagnostics(
    host: HostSnapshot, wanted: CdiSpecification, path: HostPath
) -> Iterator[Diagnostic]:
    """Conflicts with other files: the same names, or the same groups with another kind of node."""
    names = {wanted.qualified(device): device for device in wanted.devices}
    forms = {t.group: (d, t.kind) for d in wanted.devices for t in _targets(host, d)}
    for file in host.cdi_files:
        if file.path == path:
            continue
        other = read_file(file)
        own = f"vfiomgr cdi remove --all --kind {shlex.quote(other.kind)}"
        remedy = own if file.is_own else f"remove it from {file.path}"
        for device in other.devices:
            name = other.qualified(device)
            if name in names:
                reason = f"{file.path} already has {name}, and consumers reject duplicate names"
                yield blocker("cdi-conflict", name, reason, f"{remedy}, or pass another --kind")
                continue
            for target in _targets(host, device):
                mine = forms.get(target.group)
                if target.group is not None and mine is not None and mine[1] != target.kind:
                    reason = (
                        f"{file.path} has {name}, which is IOMMU group {target.group} as "
                        f"{'a cdev' if target.kind == 'cdev' else 'a group'}: the same device "
                        "could be assigned twice"
                    )
                    yield blocker(
                        "cdi-twice-published",
                        name,
                        reason,
                        f"{remedy}, or pass --node {target.kind}",
                    )


def _twice_notes(host: HostSnapshot, written: CdiSpecification, path: HostPath) -> Iterator[str]:
    """Groups that another file also offers, which may be intended or not."""
    names = {t.group: written.qualified(d) for d in written.devices for t in _targets(host, d)}
    for file in host.cdi_files:
        if file.path == path:
            continue
        other = read_file(file)
        for device in other.devices:
            found = {t.group for t in _targets(host, device) if t.group in names}
            for group in sorted(group for group in found if group is not None):
                yield (
                    f"{names[group]} is IOMMU group {group}, which is also "
                    f"{other.qualified(device)} in {file.path}: it can be assigned twice, and "
                    "the second start fails"
                )


def _version_notes(specification: CdiSpecification) -> Iterator[str]:
    version = version_of(specification.version)
    older = [c.title for c in CONSUMERS if version is not None and c.library < version]
    if older and specification.devices:
        names = " and ".join(dict.fromkeys(older))
        yield (
            f"the class has a dot, which needs CDI {specification.version}: {names} cannot read it"
        )


def is_as_written(file: CdiFile) -> bool:
    """Whether a specification contains only data that vfiomgr writes: devices with their nodes."""
    found = read_file(file)
    devices = tuple(CdiDevice(each.name, _nodes_of(each.edits)) for each in found.devices)
    bare = CdiSpecification("", found.kind, edits=_nodes_of(found.edits))
    return render_specification(_of_devices(bare, devices)) == file.text


def _nodes_of(edits: CdiEdits) -> CdiEdits:
    return CdiEdits(device_nodes=edits.device_nodes)


@plans(RemoveCdi)
def plan_remove(host: HostSnapshot, request: RemoveCdi) -> Plan:
    """Remove devices from vfiomgr's own files; a file without devices is deleted.

    Raises:
        Refusal: a name is only in a file of another program.
    """
    steps: list[ReplaceFile] = []
    gone: list[str] = []
    lost: list[str] = []
    unread: list[str] = []
    for file in host.cdi_files:
        if not file.is_own:
            continue
        specification = read_file(file)
        if not is_readable(specification):
            name = file.path.rpartition("/")[2]
            if request.of_kind is not None and name != own_file(STATIC, request.of_kind).name:
                continue
            if request.every and file.text is not None:
                steps.append(ReplaceFile(file.path, file.text, None))
            else:
                unread.append(unread_note(file, specification))
            continue
        if request.of_kind not in (None, specification.kind):
            continue
        going = [d for d in specification.devices if _goes(host, specification, d, request)]
        left = tuple(d for d in specification.devices if d not in going)
        if request.every or (going and not left):
            steps.append(ReplaceFile(file.path, file.text, None))
        elif going:
            rest = _of_devices(specification, left)
            lost += _lost_notes(specification, rest)
            steps.append(ReplaceFile(file.path, file.text, render_specification(rest)))
        gone += [specification.qualified(device) for device in going]
    lacking = [n for n in request.names if not any(is_called(g, n) for g in gone)]
    refuse_if_any(_of_others(host, lacking, request), frozenset())
    return Plan(
        summary=f"remove {', '.join(gone) or 'nothing'} from CDI specifications",
        steps=tuple(steps),
        locks=(LOCK,) if steps else (),
        notes=(*(f"{name}{GOES}" for name in gone), *lost, *unread),
        already=_already(request, lacking, steps),
    )


def unread_note(file: CdiFile, specification: CdiSpecification) -> str:
    """The note about an unreadable file of vfiomgr."""
    why = "; ".join(oddity.found.summary for oddity in specification.oddities[:1])
    remedy = f"rm {shlex.quote(file.path)}"
    if file.text is not None:
        remedy = "remove it with: vfiomgr cdi remove --all"
    return f"{file.path} is no longer a valid specification ({why}) and is not changed: {remedy}"


def _already(
    request: RemoveCdi, lacking: Iterable[str], steps: Iterable[ReplaceFile]
) -> tuple[str, ...]:
    if request.names:
        return tuple(f"no specification of vfiomgr has {name}" for name in lacking)
    if steps:
        return ()
    what = "no stale devices in the specifications of vfiomgr" if request.stale else ""
    return (what or "no such specification of vfiomgr",)


def _goes(
    host: HostSnapshot, specification: CdiSpecification, device: CdiDevice, request: RemoveCdi
) -> bool:
    return (
        request.every
        or (request.stale and is_stale(host, device))
        or any(is_called(specification.qualified(device), name) for name in request.names)
    )


def _of_others(
    host: HostSnapshot, names: Iterable[str], request: RemoveCdi
) -> Iterator[Diagnostic]:
    """Refuse to remove devices of other programs."""
    for file in host.cdi_files:
        if file.is_own:
            continue
        other = read_file(file)
        if request.of_kind not in (None, other.kind):
            continue
        for device in other.devices:
            name = other.qualified(device)
            if any(is_called(name, wanted) for wanted in names):
                reason = f"{name} is in {file.path}, which vfiomgr did not write"
                yield blocker(
                    "cdi-foreign-device",
                    name,
                    reason,
                    "remove it with the program that wrote it, or manually",
                )
