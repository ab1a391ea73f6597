"""Prepare and check entries in the configuration of container runtimes.

The runtime itself checks the new texts before any of them is written. The record is written before
the files: after an interruption, everything written is known as vfiomgr's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.containers.runtimes import containerd, other_runtimes, releases, removal, text
from vfiomgr.containers.runtimes.apply import (
    DEFAULTS,
    Prepared,
    backup_path,
    checked,
    dump,
    file_changes,
    lock_names,
    no_change,
    texts_of,
)
from vfiomgr.containers.runtimes.location import RuntimeLocation, beside, read_facts
from vfiomgr.containers.runtimes.record import (
    RECORD,
    ChangedFile,
    InstalledEntry,
    InstalledRuntime,
    parse_record,
    parts_in,
    runtime_at,
    text_of_record,
    with_parts,
    with_runtime,
)
from vfiomgr.persistence.steps import ChangeFiles

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from vfiomgr.containers.runtimes.facts import Texts
    from vfiomgr.containers.runtimes.model import RuntimeRequest
    from vfiomgr.containers.runtimes.record import Edit
    from vfiomgr.host.tree import HostTree
    from vfiomgr.persistence.steps import FileChange

_DECISIONS = {
    "containerd": containerd.decide,
    "crio": other_runtimes.decide_crio,
    "docker": other_runtimes.decide_docker,
    "k3s": other_runtimes.decide_k3s,
    "rke2": other_runtimes.decide_k3s,
}


def prepare_entry(
    tree: HostTree, place: RuntimeLocation, request: RuntimeRequest, command: str
) -> Prepared:
    """Prepare an entry; `command` is the command that removes it.

    Raises:
        InvalidDocument: a file is not readable.
        Refusal: the runtime would not accept the entry, or would lose other settings.

    """
    told = text_of_record(tree)
    record = parse_record(told)
    runtime = runtime_at(record, place.program, place.main)
    seen: Texts = {RECORD: told, **texts_of(tree, runtime)}
    was_ours = runtime.has_entry(request.name)
    without = removal.Removal({}, runtime)
    if was_ours:
        without = removal.remove(runtime, {request.name}, seen, beside(tree, place), command)
    now = read_facts(tree, place, without.texts, was_ours=was_ours)
    releases.refuse_missing(now)
    before = dump(tree, place, now, without.texts)
    facts = now if before is None else replace(now, effective=before.data)
    decision = _DECISIONS[request.program](facts, request)
    seen = {**{edit.file.path: edit.file.text for edit in decision.edits}, **seen}
    made: Texts = {edit.file.path: edit.text for edit in decision.edits}
    texts: Texts = {**without.texts, **made}
    unchecked, foreseen = checked(tree, place, facts, texts, decision=decision, before=before)
    if was_ours and all(_means(path, seen[path], text) for path, text in texts.items()):
        why = f"{request.subject} already exists"
        return Prepared(place, no_change(place, request.name, why), unchecked)
    installed = _with_entry(tree, runtime, without.record, request.name, decision.edits)
    backups = tuple(_backups(tree, runtime, installed, seen))
    changes = (
        *backups,
        *file_changes(tree, seen, without.texts),
        *file_changes(tree, seen, {RECORD: with_runtime(record, installed)}),
        *file_changes(tree, {**seen, **without.texts}, made),
    )
    summary = f"add {request.subject} to {place}"
    notes = (*decision.notes, *_lost_default(runtime, request))
    return Prepared(
        place,
        ChangeFiles(summary, changes, lock_names(place, request.name), notes),
        unchecked,
        tuple(change.path for change in backups),
        foreseen,
    )


def _with_entry(
    tree: HostTree,
    known: InstalledRuntime,
    others: InstalledRuntime,
    name: str,
    edits: Iterable[Edit],
) -> InstalledRuntime:
    """The record of other entries and a new one; `known` is the record before."""
    files = {file.path: file for file in others.files}
    for edit in edits:
        path = edit.file.path
        old = files.get(path)
        parts = [*parts_in(path, others.entries), edit.part]
        original = edit.file.text if old is None else old.original
        written = with_parts(original, edit.head, parts, path) or edit.text
        earlier = known.file(path) or ChangedFile(
            path,
            edit.head,
            original,
            written,
            None if original is None else backup_path(path),
            original is None and not tree.exists(edit.file.path.parent),
        )
        files[path] = replace(earlier, original=original, written=written)
    entry = InstalledEntry(name, tuple(edit.part for edit in edits))
    return replace(others, files=tuple(files.values()), entries=(*others.entries, entry))


def _lost_default(runtime: InstalledRuntime, request: RuntimeRequest) -> Iterator[str]:
    """Note that an entry stops being the default runtime."""
    if not request.set_default and any(
        setting.key in DEFAULTS for setting in runtime.settings_of((request.name,))
    ):
        yield f"{request.name} is no longer the default runtime; pass --set-default to keep it"


def _means(path: str, one: str | None, other: str | None) -> bool:
    if one == other:
        return True
    if one is None or other is None or path.endswith(".tmpl"):
        return False
    return text.parse(one, path) == text.parse(other, path)


def _backups(
    tree: HostTree, known: InstalledRuntime, installed: InstalledRuntime, seen: Texts
) -> Iterator[FileChange]:
    """The backups to make, of files that vfiomgr changes for the first time."""
    for file in installed.files:
        if file.backup is not None and known.file(file.path) is None:
            yield from file_changes(tree, {file.backup: None}, {file.backup: seen[file.path]})
