"""Specifications that vfiomgr writes: made, kept to what is there, and removed when empty."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from vfiomgr.model.cdi import DIRECTORIES, CdiEdits, own_file
from vfiomgr.model.cdi_document import read_quickly, render_specification
from vfiomgr.model.host_step import ReplaceFile
from vfiomgr.model.plan import Plan
from vfiomgr.planner.cdi.consumers import CONSUMERS
from vfiomgr.planner.cdi.grammar import needed_version, version_of
from vfiomgr.planner.cdi.nodes import resolve
from vfiomgr.planner.cdi.offer import LOWEST, nothing_ready, specification_of
from vfiomgr.planner.guards import Objection, refuse_if_any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from vfiomgr.model.cdi import CdiDevice, CdiSpecification
    from vfiomgr.model.intent import RemoveCdi, WriteCdi
    from vfiomgr.model.path import HostPath
    from vfiomgr.model.pci import PciAddress
    from vfiomgr.model.snapshot import HostSnapshot
    from vfiomgr.planner.cdi.nodes import Target

LOCK = "cdi"


def plan_write(host: HostSnapshot, intent: WriteCdi) -> Plan:
    """Have one file with what is ready; with addresses, these besides what it has.

    Raises:
        Refusal: nothing is ready, or another file says something else of the same devices.
        UsageError: the kind is none.

    """
    wished = specification_of(host, intent.wish)
    path = own_file(DIRECTORIES[intent.lifetime], intent.wish.kind)
    there = next((file for file in host.cdi_files if file.path == path), None)
    before = None if there is None else read_quickly(there)
    after = wished
    if intent.wish.addresses and before is not None:
        after = _joined(host, before, wished)
    if not after.devices and there is None:
        raise nothing_ready(host)
    refuse_if_any(_objections(host, after, path), frozenset())
    text = render_specification(after) if after.devices else None
    summary = f"write {path}" if after.devices else f"remove {path}"
    notes = [] if before is None else list(_change_notes(before, after))
    if there is not None and there.text == text:
        return Plan(summary, (), already=(f"{path} says so already",))
    if text is None:
        notes.append("nothing is ready for a guest, and a file without devices breaks consumers")
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
            what = "is another device" if device.name in names else "goes"
            yield f"{before.qualified(device)} {what}"


def _joined(
    host: HostSnapshot, before: CdiSpecification, wished: CdiSpecification
) -> CdiSpecification:
    """What a file has and is still there, and what is to be in it besides."""
    names = {device.name for device in wished.devices}
    groups = {t.group for device in wished.devices for t in _targets(host, device)}
    kept = [
        device
        for device in before.devices
        if device.name not in names
        and not is_stale(host, device)
        and not groups.intersection(t.group for t in _targets(host, device))
    ]
    nodes = dict.fromkeys((*before.edits.device_nodes, *wished.edits.device_nodes))
    both = sorted((*kept, *wished.devices), key=lambda device: _place(host, device))
    return _of_devices(replace(wished, edits=CdiEdits(device_nodes=tuple(nodes))), tuple(both))


def _place(host: HostSnapshot, device: CdiDevice) -> tuple[bool, list[PciAddress], str]:
    """Where a device stands in a file: as in one of all that is ready."""
    found = [d.address for target in _targets(host, device) for d in target.functions]
    return not found, sorted(found)[:1], device.name


def _of_devices(
    specification: CdiSpecification, devices: tuple[CdiDevice, ...]
) -> CdiSpecification:
    made = replace(specification, devices=devices)
    return replace(made, version=str(max(LOWEST, needed_version(made))))


def _targets(host: HostSnapshot, device: CdiDevice) -> tuple[Target, ...]:
    """Where the VFIO nodes of a device lead to."""
    found = (resolve(host, node.on_host) for node in device.edits.device_nodes)
    return tuple(target for target in found if target.kind in ("group", "cdev"))


def is_stale(host: HostSnapshot, device: CdiDevice) -> bool:
    """Whether a device of VFIO is none that a guest could have, or another by now."""
    targets = _targets(host, device)
    known = host.device_named(device.name)
    return bool(targets) and (
        any(target.problem is not None for target in targets)
        or (known is not None and all(device.name not in target.names for target in targets))
    )


def _objections(
    host: HostSnapshot, wished: CdiSpecification, path: HostPath
) -> Iterator[Objection]:
    """What other files say of the same names, or of the same groups in another form."""
    names = {wished.qualified(device): device for device in wished.devices}
    forms = {t.group: (d, t.kind) for d in wished.devices for t in _targets(host, d)}
    for file in host.cdi_files:
        if file.path == path:
            continue
        other = read_quickly(file)
        own = f"vfiomgr cdi remove --all --kind {other.kind}"
        remedy = own if file.is_own else f"remove it from {file.path}"
        for device in other.devices:
            name = other.qualified(device)
            if name in names:
                reason = f"{file.path} has {name} already, and consumers refuse one name twice"
                yield Objection(reason, f"{remedy}, or pass another --kind")
                continue
            for target in _targets(host, device):
                mine = forms.get(target.group)
                if target.group is not None and mine is not None and mine[1] != target.kind:
                    reason = (
                        f"{file.path} has {name}, which is IOMMU group {target.group} as "
                        f"{'a cdev' if target.kind == 'cdev' else 'a group'}: "
                        "the same device would be given away twice"
                    )
                    yield Objection(reason, f"{remedy}, or pass --node {target.kind}")


def _version_notes(specification: CdiSpecification) -> Iterator[str]:
    version = version_of(specification.version)
    older = [c.title for c in CONSUMERS if version is not None and c.library < version]
    if older and specification.devices:
        names = " and ".join(dict.fromkeys(older))
        yield f"its class has a dot, which is CDI {specification.version}: {names} do not read it"


def plan_remove(host: HostSnapshot, intent: RemoveCdi) -> Plan:
    """Take devices out of vfiomgr's own files; a file that loses its last one goes.

    Raises:
        Refusal: a name is in a file of somebody else alone.

    """
    steps: list[ReplaceFile] = []
    gone: list[str] = []
    for file in host.cdi_files:
        if not file.is_own:
            continue
        specification = read_quickly(file)
        if intent.of_kind not in (None, specification.kind):
            continue
        going = [d for d in specification.devices if _goes(host, specification, d, intent)]
        left = tuple(d for d in specification.devices if d not in going)
        if intent.every or (going and not left):
            steps.append(ReplaceFile(file.path, file.text, None))
        elif going:
            text = render_specification(_of_devices(specification, left))
            steps.append(ReplaceFile(file.path, file.text, text))
        gone += [specification.qualified(device) for device in going]
    lacking = [n for n in intent.names if not any(_is_called(g, n) for g in gone)]
    refuse_if_any(_of_others(host, lacking, intent), frozenset())
    return Plan(
        summary=f"take {', '.join(gone) or 'nothing'} out of CDI specifications",
        steps=tuple(steps),
        locks=(LOCK,) if steps else (),
        notes=tuple(f"{name} goes" for name in gone),
        already=_already(intent, lacking, steps),
    )


def _already(
    intent: RemoveCdi, lacking: Iterable[str], steps: Iterable[ReplaceFile]
) -> tuple[str, ...]:
    if intent.names:
        return tuple(f"no specification of vfiomgr has {name}" for name in lacking)
    if steps:
        return ()
    what = "nothing in the specifications of vfiomgr is stale" if intent.stale else ""
    return (what or "there is no such specification of vfiomgr",)


def _goes(
    host: HostSnapshot, specification: CdiSpecification, device: CdiDevice, intent: RemoveCdi
) -> bool:
    if intent.every:
        return True
    if intent.stale and is_stale(host, device):
        return True
    return any(_is_called(specification.qualified(device), name) for name in intent.names)


def _is_called(qualified: str, name: str) -> bool:
    return name in (qualified, qualified.partition("=")[2])


def _of_others(host: HostSnapshot, names: Iterable[str], intent: RemoveCdi) -> Iterator[Objection]:
    """Devices of others are theirs to remove."""
    for file in host.cdi_files:
        if file.is_own:
            continue
        other = read_quickly(file)
        if intent.of_kind not in (None, other.kind):
            continue
        for device in other.devices:
            name = other.qualified(device)
            if any(_is_called(name, wanted) for wanted in names):
                reason = f"{name} is in {file.path}, which vfiomgr did not write"
                yield Objection(reason, "remove it with the program that wrote it, or by hand")
