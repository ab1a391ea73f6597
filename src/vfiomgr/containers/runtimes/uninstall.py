"""Prepare the removal of entries from the configuration of container runtimes.

The runtime itself checks the new texts before any of them is written. The record is written last:
after an interruption, everything written is known as vfiomgr's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vfiomgr.containers.runtimes import facts as runtimes_facts
from vfiomgr.containers.runtimes import removal, text, values
from vfiomgr.containers.runtimes.apply import (
    DEFAULTS,
    Prepared,
    backups_of,
    checked,
    dump,
    file_changes,
    lock_names,
    no_change,
    texts_of,
)
from vfiomgr.containers.runtimes.containerd import CRI_NAMES
from vfiomgr.containers.runtimes.location import RuntimeLocation, beside, read_facts
from vfiomgr.containers.runtimes.model import shown
from vfiomgr.containers.runtimes.record import (
    RECORD,
    ChangedFile,
    Decision,
    InstalledRuntime,
    parse_record,
    runtime_at,
    text_of_record,
    with_runtime,
)
from vfiomgr.diagnostic import refuse
from vfiomgr.errors import HostError
from vfiomgr.paths import HostPath
from vfiomgr.persistence.steps import ChangeFiles

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from vfiomgr.containers.runtimes.facts import Texts
    from vfiomgr.containers.runtimes.model import Key, Setting
    from vfiomgr.host.tree import HostTree
    from vfiomgr.persistence.steps import FileChange

_OF_KATA = ("ConfigPath", "runtime_config_path")
"""Keys that only entries of Kata have, in containerd and Docker, and in CRI-O."""


def prepare_removal(
    tree: HostTree, place: RuntimeLocation, name: str, command: str, *, is_kata: bool | None = None
) -> Prepared:
    """Prepare the removal of an entry: of a Kata handler, of another runtime, or of either.

    Raises:
        InvalidDocument: a file is not readable.
        Refusal: the entry was changed since, its record is missing, or it is of the other kind.

    """
    told = text_of_record(tree)
    record = parse_record(told)
    runtime = runtime_at(record, place.program, place.main)
    if not runtime.has_entry(name):
        _refuse_unknown(tree, place, name)
        why = f"{place} has no entry {name} that vfiomgr added{_elsewhere(record, place, name)}"
        return Prepared(place, no_change(place, name, why), ())
    if is_kata is not None:
        _refuse_other_kind(runtime, place, name, is_kata=is_kata)
    return _without_entries(tree, place, (name,), told, command)


def prepare_removals(
    tree: HostTree, place: RuntimeLocation, names: tuple[str, ...], told: str, command: str
) -> tuple[Prepared, str | None]:
    """Prepare the removal of entries in one place, and the text of the record without them.

    `told` is the present text of the record.

    Raises:
        InvalidDocument, Refusal: as `prepare_removal`.

    """
    ready = _without_entries(tree, place, names, told, command)
    return ready, ready.request.changes[-1].after


def _without_entries(
    tree: HostTree,
    place: RuntimeLocation,
    names: tuple[str, ...],
    told: str | None,
    command: str,
) -> Prepared:
    """Prepare the removal of entries of a place; the last change is that of the record."""
    record = parse_record(told)
    runtime = runtime_at(record, place.program, place.main)
    seen: Texts = {RECORD: told, **texts_of(tree, runtime)}
    left = removal.remove(runtime, names, seen, beside(tree, place), command)
    for name in names:
        _refuse_default(tree, place, left.texts, name, command)
    unchecked, foreseen = _checked_removal(tree, place, runtime.settings_of(names), left.texts)
    files = [file for file in reversed(runtime.files) if file.path in left.texts]
    unused = [file for file in files if left.record.file(file.path) is None]
    changes = (
        *file_changes(tree, seen, {file.path: left.texts[file.path] for file in files}),
        *file_changes(tree, {}, _redundant(tree, unused, left.texts)),
        *file_changes(tree, seen, {RECORD: with_runtime(record, left.record)}),
    )
    notes = (*left.notes, *_staying(tree, unused, changes))
    locks = tuple(dict.fromkeys(lock for name in names for lock in lock_names(place, name)))
    summary = f"remove entry {', '.join(names)} from {place}"
    request = ChangeFiles(summary, changes, locks, notes)
    made = (file.path for file in files if file.made_directory and left.texts[file.path] is None)
    directories = tuple(HostPath(path).parent for path in made)
    return Prepared(place, request, unchecked, foreseen=foreseen, directories=directories)


def _elsewhere(record: Iterable[InstalledRuntime], place: RuntimeLocation, name: str) -> str:
    """The other places of an entry with this name; otherwise the other entries."""
    alike = [one for one in record if one.program == place.program and one.has_entry(name)]
    if alike:
        return "".join(f"; {one.main} has one: --runtime-config {one.main}" for one in alike)
    others = [entry.name for entry in runtime_at(record, place.program, place.main).entries]
    return f"; it added: {', '.join(others)}" if others else ""


def _refuse_other_kind(
    runtime: InstalledRuntime, place: RuntimeLocation, name: str, *, is_kata: bool
) -> None:
    """Refuse an entry of the other command: only handlers of Kata name its configuration."""
    parts = (part for entry in runtime.entries if entry.name == name for part in entry.parts)
    was_kata = any(key in str(part) for part in parts for key in _OF_KATA)
    if was_kata == is_kata:
        return
    installer = f"vfiomgr runtime install{' --kata' if was_kata else ''}"
    message = f"entry {name} of {place} was added by {installer}"
    remedy = f"vfiomgr runtime uninstall {name}"
    refuse("runtime-other-command", name, message, remedy)


def _refuse_unknown(tree: HostTree, place: RuntimeLocation, name: str) -> None:
    """Refuse an entry that vfiomgr wrote, but whose record is missing."""
    facts = read_facts(tree, place, {}, was_ours=False)
    own = facts.drop_in.path if facts.drop_in.path != facts.main.path else None
    for file in (facts.main, *facts.imported, facts.drop_in):
        copies = backups_of(tree, file.path)
        if (file.path != own and not copies) or not runtimes_facts.has_entry(
            file, place.program, name
        ):
            continue
        message = f"entry {name} in {file.path} has no record in {RECORD}"
        kept = f" ({copies[-1]} is a backup from before)" if copies else ""
        hint = f"restore {RECORD} from a backup, or remove the entry from {file.path} manually"
        refuse("runtime-record-missing", name, message, f"{hint}{kept}")


def _refuse_default(
    tree: HostTree, place: RuntimeLocation, texts: Texts, name: str, command: str
) -> None:
    """Refuse to remove an entry that a file names as the default runtime."""
    if place.program in ("k3s", "rke2"):
        return
    facts = read_facts(tree, place, texts, was_ours=True)
    for file in (facts.main, *facts.imported, facts.drop_in):
        data = {} if file.text is None else text.parse(file.text, file.path)
        for key in DEFAULTS:
            if values.found(data, key) == name:
                message = f"{shown(key)} in {file.path} names {name}, which would be removed"
                refuse(
                    "runtime-entry-is-default",
                    file.path,
                    message,
                    f"set another one there; then run {command} again",
                )


def _checked_removal(
    tree: HostTree, place: RuntimeLocation, settings: Iterable[Setting], texts: Texts
) -> tuple[tuple[str, ...], dict[str, Any] | None]:
    """Check like for an entry; but an unreadable configuration does not prevent the removal."""
    keys = tuple(
        setting.key
        for setting in settings
        if not (setting.is_shared and isinstance(setting.value, dict))  # runc stays
    )
    ours: list[Key] = [("imports",), ("version",)]
    ours += [("plugins", cri, *key[2:]) for key in keys for cri in CRI_NAMES]
    decision = Decision((), ours=(*ours, *keys))
    try:
        facts = read_facts(tree, place, {}, was_ours=True)
        before = dump(tree, place, facts, {})
        return checked(tree, place, facts, texts, decision=decision, before=before)
    except HostError as error:
        return (error.message,), None


def _redundant(tree: HostTree, files: Iterable[ChangedFile], texts: Texts) -> Texts:
    """Backups that equal the restored files."""
    backups = {file.backup: file.path for file in files if file.backup is not None}
    return {
        backup: None
        for backup, path in backups.items()
        if tree.read_text(HostPath(backup)) == texts[path]
    }


def _staying(
    tree: HostTree, files: Iterable[ChangedFile], changes: Iterable[FileChange]
) -> Iterator[str]:
    """Unneeded backups that stay, because their file has other changes."""
    going = {change.path for change in changes}
    for file in files:
        if file.backup and file.backup not in going and tree.exists(HostPath(file.backup)):
            yield f"backup {file.backup} stays, because another program also changed {file.path}"
