"""Remove entries from the files of container runtimes, and keep everything else in them.

The record has each file as it was before the first entry. If nothing else was changed since, the
file becomes that text with the remaining entries, so removing the last one restores the original
bytes. Otherwise the keys of the entries are removed from the present text, if they are as written.

The runtime itself checks the new texts before any of them is written. The record is written last:
after an interruption, everything written is known as vfiomgr's.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from msgspec.structs import replace

from vfiomgr.containers.runtimes import containerd, other_runtimes, text, values
from vfiomgr.containers.runtimes.apply import (
    DEFAULTS,
    Prepared,
    backup_path,
    backups_of,
    checked,
    dump,
    file_changes,
    lock_names,
    no_change,
    texts_of,
)
from vfiomgr.containers.runtimes.containerd import CRI_NAMES
from vfiomgr.containers.runtimes.location import RuntimeLocation, beside, has_entry, read_facts
from vfiomgr.containers.runtimes.model import ConfigFile, Setting, absolute, covers, shown
from vfiomgr.containers.runtimes.other_runtimes import BASE, beginning_of
from vfiomgr.containers.runtimes.record import (
    RECORD,
    ChangedFile,
    Decision,
    EntryPart,
    InstalledEntry,
    InstalledRuntime,
    parse_record,
    parts_in,
    runtime_at,
    text_of_record,
    with_parts,
    with_runtime,
)
from vfiomgr.diagnostic import refuse
from vfiomgr.errors import HostError
from vfiomgr.paths import HostPath
from vfiomgr.persistence.facts import read_system
from vfiomgr.persistence.steps import ChangeFiles, FileChange
from vfiomgr.persistence.systems import refuse_lost
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.containers.runtimes.model import Key, RuntimeRequest, Texts
    from vfiomgr.containers.runtimes.record import Edit
    from vfiomgr.host.tree import HostTree


class Removal(Value):
    """The texts of the changed files without the entries, and the record of the others."""

    texts: dict[str, str | None]
    record: InstalledRuntime
    notes: tuple[str, ...] = ()


def remove(
    record: InstalledRuntime,
    names: Collection[str],
    texts: Mapping[str, str | None],
    beside: Collection[HostPath],
    command: str,
) -> Removal:
    """Remove entries from the present texts of their files.

    `beside` are drop-ins of other programs; `command` is the command to run again after a manual
    edit.

    Raises:
        InvalidDocument: a file is not readable.
        Refusal: an entry was changed since, or cannot be removed without losing something else.
    """
    going = [entry for entry in record.entries if entry.name in names]
    staying = [entry for entry in record.entries if entry.name not in names]
    staying = _with_shared_settings(staying, going)
    left: dict[str, str | None] = {}
    files: list[ChangedFile] = []
    notes: list[str] = []
    for file in record.files:
        removed, others = parts_in(file.path, going), parts_in(file.path, staying)
        if not removed:
            files.append(file)
            continue
        current = texts[file.path]
        settings = [setting for part in removed for setting in part.settings]
        needed = [] if others else [*_needed(file, current, settings, beside)]
        kept = EntryPart(file.path, tuple(setting for setting, _ in needed))
        target = with_parts(file.original, file.head, [*others, kept], file.path)
        if others and target is not None:
            files.append(replace(file, written=target))
        notes += [why for _, why in needed]
        if current is None:
            notes.append(f"{file.path} is already removed")
            left[file.path] = None
        elif current == file.written:
            left[file.path] = target
        else:
            taken = [setting for setting in settings if setting not in kept.settings]
            edited = _EditedFile(file, current, target, command)
            left[file.path] = edited.without(taken) if settings else edited.without_block()
            if file.original is None and not others and left[file.path] is not None:
                notes.append(f"{file.path} stays: another program or a person also wrote to it")
            if not settings or not all(one.is_shared for one in settings):
                edited.refuse_remaining(left[file.path], record.program, going)
    made = replace(record, files=tuple(files), entries=tuple(staying))
    return Removal(left, made, tuple(dict.fromkeys(notes)))


def _with_shared_settings(
    staying: list[InstalledEntry], going: Iterable[InstalledEntry]
) -> list[InstalledEntry]:
    """The entries that stay; the first of them gets the settings that all of them need."""
    if not staying:
        return []
    first, *others = staying
    parts = {part.path: part for part in first.parts}
    for part in (part for entry in going for part in entry.parts):
        own = parts.get(part.path, EntryPart(part.path))
        shared = [one for one in part.settings if one.is_shared and one not in own.settings]
        if shared:
            parts[part.path] = replace(own, settings=(*shared, *own.settings))
    return [replace(first, parts=tuple(parts.values())), *others]


def _needed(
    file: ChangedFile,
    current: str | None,
    settings: Iterable[Setting],
    beside: Collection[HostPath],
) -> Iterator[tuple[Setting, str]]:
    """The shared settings that stay after the last entry, each with the reason."""
    shared = [setting for setting in settings if setting.is_shared]
    if current is None or not shared:
        return
    data, written = text.parse(current, file.path), text.parse(file.written, file.path)
    original = text.parse(file.original or "", file.path)
    ours = {setting.key for setting in settings}
    for setting in shared:
        name = shown(setting.key)
        if values.is_edited(data, setting, written, original):
            yield setting, f"{name} in {file.path} stays: it was changed since"
        elif users := _runtimes_beside(data, setting, ours):
            named = ", ".join(users)
            yield (
                setting,
                f"{name} in {file.path} stays: without it containerd would only have {named}",
            )
        elif users := _imported_by(setting, file, beside):
            named = ", ".join(users)
            yield (
                setting,
                f"{name} in {file.path} keeps {setting.value}, which also imports {named}",
            )


def _runtimes_beside(data: values.Data, runc: Setting, ours: Collection[object]) -> list[str]:
    """Runtimes of other programs in the table where runc was added, which it still needs."""
    around = values.found(data, runc.key[:-1])
    if not isinstance(runc.value, dict) or not isinstance(around, dict):
        return []
    return [name for name in around if (*runc.key[:-1], name) not in ours]


def _imported_by(setting: Setting, file: ChangedFile, beside: Iterable[HostPath]) -> list[str]:
    """Files of other programs that an import matches."""
    if not setting.is_item:
        return []
    pattern = absolute(setting.value, file.path)
    return [str(path) for path in beside if covers(pattern, path)]


class _EditedFile(Value):
    """A file that another program changed since vfiomgr wrote it."""

    file: ChangedFile
    current: str
    target: str | None
    """The text that it would become otherwise."""
    command: str

    def without(self, taken: Collection[Setting]) -> str | None:
        """The text without settings; None if nothing is left of a file that vfiomgr created."""
        path = self.file.path
        data = text.parse(self.current, path)
        written, target = text.parse(self.file.written, path), text.parse(self.target or "", path)
        for setting in taken:
            if not setting.is_shared and values.is_edited(data, setting, written, target):
                self._refuse_edited(setting, values.found(data, setting.key))
        wanted = values.merge(data, taken, written, target)
        merged = text.merge(self.current, self.file.written, self.target or "")
        return self._unless_bare(text.with_values(self.current, wanted, merged, taken, path))

    def _unless_bare(self, left: str) -> str | None:
        """The text; None if nothing but the heading is left of a file that vfiomgr created."""
        is_bare = left.strip() in ("", self.file.head.strip())
        return None if self.file.original is None and is_bare else left

    def _refuse_edited(self, setting: Setting, current: object) -> NoReturn:
        path, key = self.file.path, shown(setting.key)
        below, before, there = values.first_difference(setting.value, current)
        changed = shown((*setting.key, *below))
        message = (
            f"{changed} in {path} was changed since: it is {there}, but vfiomgr wrote {before}"
        )
        hint = f"restore it, or remove {key} from the file manually; then run {self.command} again"
        refuse("runtime-entry-changed", path, message, hint)

    def without_block(self) -> str | None:
        """A template without the appended text; unchanged if the lines are not found."""
        left = text.merge(self.current, self.file.written, self.target or self.file.head)
        return self.current if left is None else self._unless_bare(left)

    def refuse_remaining(
        self, left: str | None, program: str, going: Iterable[InstalledEntry]
    ) -> None:
        """Refuse if the text still has an entry, e.g. below another name of the plugin."""
        found = ConfigFile(HostPath(self.file.path), left)
        for name in (entry.name for entry in going if has_entry(found, program, entry.name)):
            message = f"entry {name} in {self.file.path} was changed since vfiomgr wrote it"
            lines = f"`{beginning_of(name).strip()}`"
            block = f", including its lines {lines}" if self.file.head == BASE else ""
            hint = f"remove it manually{block}; then run {self.command} again"
            refuse("runtime-entry-changed", self.file.path, message, hint)


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
    left = remove(runtime, names, seen, beside(tree, place), command)
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
    remedy = f"vfiomgr runtime uninstall {shlex.quote(name)}"
    refuse("runtime-other-command", name, message, remedy)


def _refuse_unknown(tree: HostTree, place: RuntimeLocation, name: str) -> None:
    """Refuse an entry that vfiomgr wrote, but whose record is missing."""
    facts = read_facts(tree, place, {}, was_ours=False)
    own = facts.drop_in.path if facts.drop_in.path != facts.main.path else None
    for file in (facts.main, *facts.imported, facts.drop_in):
        copies = backups_of(tree, file.path)
        if (file.path != own and not copies) or not has_entry(file, place.program, name):
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
    without = Removal({}, runtime)
    if was_ours:
        without = remove(runtime, {request.name}, seen, beside(tree, place), command)
    now = read_facts(tree, place, without.texts, was_ours=was_ours)
    containerd.refuse_missing(now)
    before = dump(tree, place, now, without.texts)
    facts = now if before is None else replace(now, effective=before.data)
    decision = _DECISIONS[request.program](facts, request)
    refuse_lost(read_system(tree), [edit.file.path for edit in decision.edits])
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
