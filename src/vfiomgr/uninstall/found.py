"""Files of vfiomgr that a snapshot does not contain, and reasons to refuse their removal."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.containers.runtimes.apply import Prepared, find_surprise
from vfiomgr.containers.runtimes.entries import prepare_removals
from vfiomgr.containers.runtimes.location import RuntimeLocation, recorded_places
from vfiomgr.containers.runtimes.record import (
    InstalledRuntime,
    parse_record,
    runtime_at,
    text_of_record,
)
from vfiomgr.diagnostic import refuse
from vfiomgr.documents.text import is_sealed
from vfiomgr.errors import InvalidDocument, Refusal
from vfiomgr.expressions import expression
from vfiomgr.kata.facts import read_configuration, read_configurations
from vfiomgr.kata.model import CONFIGURATIONS, DROP_IN, handler_configuration
from vfiomgr.metrics import timer
from vfiomgr.node import answers, manifests, offers
from vfiomgr.node.dra.records import DIRECTORY as CLAIMS
from vfiomgr.node.model import FEATURES
from vfiomgr.paths import HostPath
from vfiomgr.persistence.installed_layout import DIRECTORY
from vfiomgr.persistence.model import SWEPT
from vfiomgr.persistence.steps import ChangeFiles, FileChange
from vfiomgr.uninstall.requests import Uninstall
from vfiomgr.units import counted
from vfiomgr.users.node_agent import is_running
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.engine.host import ManagedHost
    from vfiomgr.host.tree import HostTree

    _Prepared = tuple[Prepared, str | None]

LEFTOVERS = (SWEPT, offers.FILE, answers.FILE, FEATURES / "vfiomgr")
"""Files of a node agent that has ended, and of the service of `bind --persist`."""
_BY_HAND = (manifests.AGENT, manifests.CDI, manifests.ENVIRONMENT, manifests.CREDENTIALS)
"""Units that an administrator installs; `node manifests` only prints them."""
_STOP = (
    f"systemctl disable --now {manifests.AGENT.name} {manifests.CDI.name}; a DaemonSet: "
    "kubectl delete -f MANIFEST"
)
_START = f"start the agent (a service: systemctl start {manifests.AGENT.name}); then "
_COMMAND = "vfiomgr uninstall"
_CONFIGURATION = expression(r"/[^\s\"']+\.toml")


class Found(Value):
    """The request, and the data for the work after it."""

    request: Uninstall
    runtimes: tuple[Prepared, ...]
    directories: tuple[HostPath, ...]
    """Directories that vfiomgr created; removed if they are empty."""


class _Entries(Value):
    """The removal of the entries of container runtimes."""

    prepared: tuple[Prepared, ...] = ()
    staying: tuple[InstalledRuntime, ...] = ()
    notes: tuple[str, ...] = ()


def find(
    host: ManagedHost,
    *,
    unbind: bool = False,
    keep: Iterable[str] = (),
    update_initramfs: bool = True,
) -> Found:
    """Find the files to remove.

    Raises:
        Refusal: an operation was interrupted, or the node agent or its pods still need the files.
        NeedsRoot: only root may read the records.
    """
    host.require_live("a snapshot cannot be changed", "run vfiomgr uninstall on the host itself")
    tree = host.files
    refuse_unfinished(host)
    record = parse_record(text_of_record(tree))
    entries = _remove_entries(tree)
    staying = (entry for runtime in entries.staying for entry in runtime.entries)
    needed = {handler_configuration(entry.name) for entry in staying}
    kata = [found for found in _kata_files(tree, record) if found[0] not in needed]
    foreign = [path for path, text in kata if not is_sealed(text)]
    going = [path for path, _ in kata if path not in foreign]
    own = [place for path in going for place in (path.parent, path.parent.parent)]
    going += [path for path in LEFTOVERS if tree.read_text(path) is not None]
    of_metrics = tuple(timer.removals(tree))
    changes = (
        *(change for ready in entries.prepared for change in ready.request.changes),
        *(_removal(tree, path) for path in going),
        *of_metrics,
    )
    notes = (
        *entries.notes,
        *(
            f"{path} stays: edited, or not by `kata config --output`; check it, then: "
            f"rm {shlex.quote(path)}"
            for path in foreign
        ),
        *timer.edited_notes(tree),
        *(f"{path} stays: vfiomgr did not install it" for path in _BY_HAND if tree.exists(path)),
    )
    locks = dict.fromkeys(lock for ready in entries.prepared for lock in ready.request.locks)
    locks |= {timer.LOCK: None} if of_metrics else {}
    files = ChangeFiles("remove files", changes, tuple(locks), notes)
    made = (directory for ready in entries.prepared for directory in ready.directories)
    return Found(
        Uninstall(files, unbind, host.addresses(keep), update_initramfs),
        entries.prepared,
        tuple(dict.fromkeys((*made, *own, DIRECTORY / "vgpu.d", DIRECTORY, CONFIGURATIONS))),
    )


def finish(tree: HostTree, found: Found) -> Iterator[str]:
    """Remove empty directories after the removal, and report runtimes that read other settings."""
    for directory in found.directories:
        tree.remove_empty_directory(directory)
    for ready in found.runtimes:
        why = None if ready.foreseen is None else find_surprise(tree, ready)
        if why is not None:
            yield f"{why}: check its files before you restart it"


def refuse_unfinished(host: ManagedHost) -> None:
    """Refuse while something still needs the files of vfiomgr.

    Raises:
        Refusal: an operation was interrupted, pods have claims, or an agent runs.
    """
    for run in host.interrupted().cut_off:
        message = f"an operation was interrupted: {run.summary}, in step: {run.step}"
        refuse("uninstall-interrupted", run.name, message, "vfiomgr recover")
    is_served = is_running(host.files)
    claims = [name for name in host.files.children(CLAIMS) if name.endswith(".json")]
    if claims:  # the kubelet can release claims only while an agent runs
        found = counted(len(claims), "ResourceClaim")
        message = f"pods of this node have {found} that vfiomgr prepared"
        start = "" if is_served else _START
        drain = f"{start}drain the node: kubectl drain NODE --ignore-daemonsets"
        remedy = f"{drain}; then stop the agent: {_STOP}; then: vfiomgr uninstall"
        if not is_served:
            place = shlex.quote(host.files.locate(CLAIMS))
            remedy += f"; if no agent should run here: rm {place}/*.json"
        refuse("uninstall-claims", CLAIMS, message, remedy)
    if is_served:
        message = "the node agent is running, and would write its files again"
        refuse("uninstall-agent", manifests.AGENT, message, _STOP)


def _remove_entries(tree: HostTree) -> _Entries:
    """Remove the entries of each container runtime, except those that were edited."""
    told = text_of_record(tree)
    prepared: list[Prepared] = []
    notes: list[str] = []
    for place in recorded_places(tree):
        found, staying = _removable(tree, place, told or "")
        notes += staying
        if found is None:
            continue
        ready, told = found
        restart = f"restart {place.program} to apply the change"
        unchecked = (f"not checked: {text}" for text in ready.unchecked)
        request = replace(ready.request, notes=(*ready.request.notes, *unchecked, restart))
        prepared.append(replace(ready, request=request))
        notes += request.notes
    return _Entries(tuple(prepared), parse_record(told), tuple(notes))


def _removable(
    tree: HostTree, place: RuntimeLocation, told: str
) -> tuple[_Prepared | None, list[str]]:
    """The removal of the entries of a place that can be removed, and notes about the others.

    An edited entry stays, with the settings that it shares with others.
    """
    runtime = runtime_at(parse_record(told), place.program, place.main)
    names = tuple(entry.name for entry in runtime.entries)
    every = _prepared(tree, place, names, told)
    if not isinstance(every, str):
        return every, []
    alone = {name: _prepared(tree, place, (name,), told) for name in names}
    edited = {name: reason for name, reason in alone.items() if isinstance(reason, str)}
    others = tuple(name for name in names if name not in edited)
    found = _prepared(tree, place, others, told) if others else every
    if isinstance(found, str):
        return None, [f"entries of {place} stay: {every}"]
    return found, [f"entry {name} of {place} stays: {why}" for name, why in edited.items()]


def _prepared(
    tree: HostTree, place: RuntimeLocation, names: tuple[str, ...], told: str
) -> _Prepared | str:
    """The removal of entries, and the record without them; or why it is refused."""
    try:
        return prepare_removals(tree, place, names, told, _COMMAND)
    except (Refusal, InvalidDocument) as error:
        return f"{error.message}; {error.remedy}"


def _kata_files(
    tree: HostTree, record: Iterable[InstalledRuntime]
) -> Iterator[tuple[HostPath, str]]:
    """Drop-ins of all known configurations of Kata, and vfiomgr's configurations of handlers."""
    own = [handler_configuration(name) for name in tree.children(CONFIGURATIONS)]
    named = {
        p for one in record for file in one.files for p in _CONFIGURATION.findall(file.written)
    }
    more = (read_configuration(tree, path) for path in (*own, *map(HostPath, sorted(named))))
    known = [*read_configurations(tree), *(file for file in more if file is not None)]
    drop_ins = (found for file in known for found in file.drop_ins if found[0].name == DROP_IN)
    texts = ((path, tree.read_text(path)) for path in own)
    yield from dict(
        (*drop_ins, *((path, text) for path, text in texts if text is not None))
    ).items()


def _removal(tree: HostTree, path: HostPath) -> FileChange:
    access = tree.access(path)
    mode = 0o644 if access is None else access.mode
    return FileChange(path, tree.read_text(path), None, mode)
