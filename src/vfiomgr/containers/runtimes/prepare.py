"""Prepare and check entries in the configuration of container runtimes.

The runtime itself checks the new texts before any of them is written. The record is written before
the files: after an interruption, everything written is known as vfiomgr's.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from vfiomgr.containers.runtimes import containerd, other_runtimes, releases, removal, text, values
from vfiomgr.containers.runtimes import facts as runtimes_facts
from vfiomgr.containers.runtimes.apply import Prepared, checked, dump
from vfiomgr.containers.runtimes.location import RuntimeLocation, beside, locate, read_facts
from vfiomgr.containers.runtimes.model import (
    PROGRAMS,
    RECORD,
    InstalledRuntime,
    OwnedFile,
    parse_record,
    render_record,
    shown,
)
from vfiomgr.containers.runtimes.text import Decision
from vfiomgr.diagnostic import refuse
from vfiomgr.errors import HostError, NeedsRoot
from vfiomgr.paths import HostPath
from vfiomgr.persistence.steps import ChangeFiles, FileChange

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from vfiomgr.containers.runtimes.facts import Texts
    from vfiomgr.containers.runtimes.model import Key, ProgramName, RuntimeRequest
    from vfiomgr.host.tree import HostTree
    from vfiomgr.units import Version

_LOCK = "runtimes"
_DEFAULTS: tuple[Key, ...] = (
    *(("plugins", cri, "containerd", "default_runtime_name") for cri in containerd.CRI_NAMES),
    ("crio", "runtime", "default_runtime"),
    ("default-runtime",),
)
_COPY = ".vfiomgr-"
"""Between the name of a file and the time of the copy."""
_OF_KATA = ("ConfigPath", "runtime_config_path")
"""Keys that only entries of Kata have, in containerd and Docker, and in CRI-O."""
_DECISIONS = {
    "containerd": containerd.decide,
    "crio": other_runtimes.decide_crio,
    "docker": other_runtimes.decide_docker,
    "k3s": other_runtimes.decide_k3s,
    "rke2": other_runtimes.decide_k3s,
}


def read_record(tree: HostTree) -> tuple[InstalledRuntime, ...]:
    """The recorded entries of vfiomgr.

    Raises:
        NeedsRoot: only root may read them, because they contain entire files.
        InvalidDocument: the record is damaged.

    """
    return parse_record(text_of_record(tree))


def places_of(
    tree: HostTree,
    name: str,
    program: ProgramName | None,
    main: str | None,
    version: Version | None,
) -> tuple[RuntimeLocation, ...]:
    """The places of vfiomgr's entry with a name, in each runtime and file that the options allow.

    Raises:
        NeedsRoot, InvalidDocument: as `read_record`.

    """
    places = []
    for one in read_record(tree):
        if one.name != name or one.program not in PROGRAMS or program not in (None, one.program):
            continue
        usual = locate(tree, one.program, main, version)
        if usual.main == one.main:
            places.append(usual)
        elif main is None:
            places.append(locate(tree, one.program, one.main, version))
    return tuple(places)


def recorded_places(tree: HostTree) -> tuple[RuntimeLocation, ...]:
    """All places with entries of vfiomgr.

    Raises:
        NeedsRoot, InvalidDocument: as `read_record`.

    """
    names = dict.fromkeys(one.name for one in read_record(tree))
    found = (place for name in names for place in places_of(tree, name, None, None, None))
    return tuple({(place.program, place.main): place for place in found}.values())


def text_of_record(tree: HostTree) -> str | None:
    """The text of the record of all entries; None if there is none.

    Raises:
        NeedsRoot: only root may read it.

    """
    told = tree.read_text(RECORD)
    if told is None and tree.exists(RECORD):
        message = f"reading {RECORD}"
        raise NeedsRoot(message, has_plan=False)
    return told


def _entry(
    record: Iterable[InstalledRuntime], place: RuntimeLocation, name: str
) -> InstalledRuntime | None:
    wanted = (place.program, place.main, name)
    return next((one for one in record if (one.program, one.main, one.name) == wanted), None)


def _elsewhere(record: Iterable[InstalledRuntime], place: RuntimeLocation, name: str) -> str:
    """The other places of an entry with this name; otherwise the other entries."""
    alike = [one for one in record if (one.program, one.name) == (place.program, name)]
    if alike:
        return "".join(f"; {one.main} has one: --runtime-config {one.main}" for one in alike)
    others = [one.name for one in record if (one.program, one.main) == (place.program, place.main)]
    return f"; it added: {', '.join(others)}" if others else ""


# ---- giving an entry


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
    mine = _entry(record, place, request.name)
    rest = tuple(one for one in record if one is not mine)
    seen: Texts = {RECORD: told, **(_texts(tree, mine) if mine is not None else {})}
    cleaned, others = _without(mine, rest, seen, beside(tree, place), command)
    now = read_facts(tree, place, cleaned, was_ours=mine is not None)
    releases.refuse_missing(now)
    before = dump(tree, place, now, cleaned)
    facts = now if before is None else replace(now, effective=before.data)
    decision = _DECISIONS[request.program](facts, request)
    made = tuple(edit.made() for edit in decision.edits)
    seen = {**{file.path: file.before for file in made}, **seen}
    texts: Texts = {**cleaned, **{file.path: file.after for file in made}}
    unchecked, foreseen = checked(tree, place, facts, texts, decision=decision, before=before)
    if mine is not None and _is_so(mine, made, seen, texts):
        return Prepared(
            place, _nothing(place, request.name, f"{request.subject} already exists"), unchecked
        )
    kept = _with_backups(tree, made, record)
    entry = InstalledRuntime(request.program, place.main, request.name, kept)
    backups = tuple(_backups(tree, kept, record, seen))
    changes = (
        *backups,
        *_changes(tree, seen, cleaned),
        *_changes(tree, seen, {RECORD: render_record((*others, entry))}),
        *_changes(tree, {**seen, **cleaned}, {file.path: file.after for file in made}),
    )
    summary = f"add {request.subject} to {place}"
    notes = (*decision.notes, *_lost_default(mine, request))
    return Prepared(
        place,
        ChangeFiles(summary, changes, _locks(place, request.name), notes),
        unchecked,
        tuple(change.path for change in backups),
        foreseen,
    )


def _lost_default(mine: InstalledRuntime | None, request: RuntimeRequest) -> Iterator[str]:
    """Note that an entry was the default, and is no longer requested to be."""
    files = () if mine is None else mine.files
    if not request.set_default and any(
        key.path in _DEFAULTS for file in files for key in file.keys
    ):
        yield f"{request.name} is no longer the default runtime; pass --set-default to keep it"


def _without(
    mine: InstalledRuntime | None,
    rest: tuple[InstalledRuntime, ...],
    seen: Texts,
    others: tuple[HostPath, ...],
    command: str,
) -> tuple[Texts, tuple[InstalledRuntime, ...]]:
    """The texts of an entry's files without it."""
    if mine is None:
        return {}, rest
    now = {file.path: seen[file.path] for file in mine.files}
    taken = removal.remove(mine, rest, now, others, command)
    return taken.texts, taken.others


def _is_so(mine: InstalledRuntime, made: Iterable[OwnedFile], seen: Texts, texts: Texts) -> bool:
    """Whether all files already have the settings, however they are written."""
    paths = {file.path for file in (*mine.files, *made)}
    return all(_means(path, seen[path], texts[path]) for path in paths)


def _means(path: str, one: str | None, other: str | None) -> bool:
    if one == other:
        return True
    if one is None or other is None or path.endswith(".tmpl"):
        return False
    return text.parse(one, path) == text.parse(other, path)


# ---- taking an entry back


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
    mine = _entry(record, place, name)
    if mine is None:
        _refuse_unknown(tree, place, name)
        why = f"{place} has no entry {name} that vfiomgr added{_elsewhere(record, place, name)}"
        return Prepared(place, _nothing(place, name, why), ())
    if is_kata is not None:
        _refuse_other_kind(mine, place, is_kata=is_kata)
    return _without_entries(tree, place, (mine,), told, command)


def prepare_removals(
    tree: HostTree, place: RuntimeLocation, told: str, command: str
) -> tuple[Prepared, str | None]:
    """Prepare the removal of all entries in one place, and the text of the record without them.

    `told` is the present text of the record.

    Raises:
        InvalidDocument, Refusal: as `prepare_removal`.

    """
    record = parse_record(told)
    mine = tuple(one for one in record if (one.program, one.main) == (place.program, place.main))
    ready = _without_entries(tree, place, mine, told, command)
    return ready, ready.request.changes[-1].after


def _without_entries(
    tree: HostTree,
    place: RuntimeLocation,
    going: tuple[InstalledRuntime, ...],
    told: str | None,
    command: str,
) -> Prepared:
    """Prepare the removal of entries of a place; the last change is that of the record."""
    left = parse_record(told)
    seen: Texts = {RECORD: told}
    texts: Texts = {}
    notes: list[str] = []
    for name in reversed([entry.name for entry in going]):
        mine = next(one for one in left if one.is_beside(going[0]) and one.name == name)
        rest = tuple(one for one in left if one is not mine)
        seen = {**_texts(tree, mine), **seen}
        now = {file.path: {**seen, **texts}[file.path] for file in mine.files}
        taken = removal.remove(mine, rest, now, beside(tree, place), command)
        texts, left = {**texts, **taken.texts}, taken.others
        notes += taken.notes
    for entry in going:
        _refuse_default(tree, place, texts, entry.name, command)
    unchecked, foreseen = _checked_removal(tree, place, going, texts)
    files = tuple(file for entry in going for file in entry.files)
    ordered = {file.path: texts[file.path] for file in reversed(files)}
    changes = (
        *_changes(tree, seen, ordered),
        *_changes(tree, {}, _redundant(tree, files, ordered)),
        *_changes(tree, seen, {RECORD: render_record(left) if left else None}),
    )
    names = ", ".join(entry.name for entry in going)
    summary = f"remove entry {names} from {place}"
    notes += _staying(tree, files, left, changes)
    locks = tuple(dict.fromkeys(lock for one in going for lock in _locks(place, one.name)))
    request = ChangeFiles(summary, changes, locks, tuple(dict.fromkeys(notes)))
    made = (file.path for file in files if file.made_directory and ordered[file.path] is None)
    directories = tuple(HostPath(path).parent for path in made)
    return Prepared(place, request, unchecked, foreseen=foreseen, directories=directories)


def _refuse_other_kind(entry: InstalledRuntime, place: RuntimeLocation, *, is_kata: bool) -> None:
    """Refuse an entry of the other command: only handlers of Kata name its configuration."""
    texts = [f"{key.path} {key.value}" for file in entry.files for key in file.keys] or [
        other_runtimes.block_of(file.after, entry.name) for file in entry.files
    ]
    was_kata = any(key in text for key in _OF_KATA for text in texts)
    if was_kata == is_kata:
        return
    installer = f"vfiomgr runtime install{' --kata' * was_kata}"
    message = f"entry {entry.name} of {place} was added by {installer}"
    remedy = f"vfiomgr runtime uninstall {entry.name}"
    refuse("runtime-other-command", entry.name, message, remedy)


def _refuse_unknown(tree: HostTree, place: RuntimeLocation, name: str) -> None:
    """Refuse an entry that vfiomgr wrote, but whose record is missing."""
    facts = read_facts(tree, place, {}, was_ours=False)
    own = facts.drop_in.path if facts.drop_in.path != facts.main.path else None
    for file in (facts.main, *facts.imported, facts.drop_in):
        copies = _copies(tree, file.path)
        if (file.path != own and not copies) or not runtimes_facts.has_entry(
            file, place.program, name
        ):
            continue
        message = f"entry {name} in {file.path} has no record in {RECORD}"
        kept = f" ({copies[-1]} is a backup from before)" if copies else ""
        hint = f"restore {RECORD} from a backup, or remove the entry from {file.path} manually"
        refuse("runtime-record-missing", name, message, f"{hint}{kept}")


def _copies(tree: HostTree, path: str) -> list[str]:
    """The copies of a file that vfiomgr made, the latest last."""
    place = HostPath(path)
    names = sorted(tree.children(place.parent))
    return [place.parent / name for name in names if name.startswith(f"{place.name}{_COPY}")]


def _staying(
    tree: HostTree,
    files: Iterable[OwnedFile],
    others: Iterable[InstalledRuntime],
    changes: Iterable[FileChange],
) -> Iterator[str]:
    """Copies that are no longer needed, but stay because the file has other changes."""
    needed = {file.backup for entry in others for file in entry.files}
    going = {change.path for change in changes}
    for file in files:
        copy = file.backup
        if copy is None or copy in needed or copy in going or not tree.exists(HostPath(copy)):
            continue
        yield (f"backup {copy} stays, because another program also changed {file.path}")


def _refuse_default(
    tree: HostTree, place: RuntimeLocation, texts: Texts, name: str, command: str
) -> None:
    """Refuse to remove an entry that a file names as the default runtime."""
    if place.program in ("k3s", "rke2"):
        return
    facts = read_facts(tree, place, texts, was_ours=True)
    for file in (facts.main, *facts.imported, facts.drop_in):
        data = {} if file.text is None else text.parse(file.text, file.path)
        for key in _DEFAULTS:
            if values.found(data, key) == name:
                message = f"{shown(key)} in {file.path} names {name}, which would be removed"
                refuse(
                    "runtime-entry-is-default",
                    file.path,
                    message,
                    f"set another one there; then run {command} again",
                )


def _redundant(tree: HostTree, files: Iterable[OwnedFile], texts: Texts) -> Texts:
    """Backups that equal the restored files."""
    backups = {file.backup: file.path for file in files if file.backup is not None}
    return {backup: None for backup, path in backups.items() if _text(tree, backup) == texts[path]}


def _checked_removal(
    tree: HostTree, place: RuntimeLocation, going: Iterable[InstalledRuntime], texts: Texts
) -> tuple[tuple[str, ...], dict[str, Any] | None]:
    """Check like for an entry; but an unreadable configuration does not prevent the removal."""
    keys = tuple(
        key.path
        for entry in going
        for file in entry.files
        for key in file.keys
        if not (key.is_shared and isinstance(json.loads(key.value), dict))  # runc stays
    )
    ours: list[Key] = [("imports",), ("version",)]
    ours += [("plugins", cri, *key[2:]) for key in keys for cri in containerd.CRI_NAMES]
    decision = Decision((), ours=(*ours, *keys))
    try:
        facts = read_facts(tree, place, {}, was_ours=True)
        before = dump(tree, place, facts, {})
        return checked(tree, place, facts, texts, decision=decision, before=before)
    except HostError as error:
        return (error.message,), None


# ---- files


def _text(tree: HostTree, path: str) -> str | None:
    return tree.read_text(HostPath(path))


def _texts(tree: HostTree, entry: InstalledRuntime) -> Texts:
    return {file.path: _text(tree, file.path) for file in entry.files}


def _changes(
    tree: HostTree, before: Mapping[str, str | None], after: Mapping[str, str | None]
) -> Iterator[FileChange]:
    """The changes of files, from the texts that the new ones were made from.

    That way changes of other programs in between are not lost.
    """
    for path, new in after.items():
        old = before[path] if path in before else _text(tree, path)
        if old != new:
            yield FileChange(path, old, new, _mode(tree, path))


def _mode(tree: HostTree, path: str) -> int:
    if path == RECORD:
        return 0o600
    return runtimes_facts.read_config(tree, HostPath(path)).mode


def _with_backups(
    tree: HostTree, made: Iterable[OwnedFile], record: Iterable[InstalledRuntime]
) -> tuple[OwnedFile, ...]:
    """The files with their backup paths, unless they are vfiomgr's own."""
    stamp = _stamp()
    known = [file for entry in record for file in entry.files]
    kept: list[OwnedFile] = []
    for file in made:
        earlier = [other for other in known if other.path == file.path]
        backup = next((other.backup for other in earlier if other.backup is not None), None)
        is_own = any(other.before is None for other in earlier)
        if file.before is not None and not is_own and backup is None:
            backup = f"{file.path}{_COPY}{stamp}"
        is_first = file.before is None and not tree.exists(HostPath(file.path).parent)
        made_directory = is_first or any(other.made_directory for other in earlier)
        kept.append(replace(file, backup=backup, made_directory=made_directory))
    return tuple(kept)


def _stamp() -> str:
    """The time of a copy, as part of its name."""
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())


def _backups(
    tree: HostTree, kept: Iterable[OwnedFile], record: Iterable[InstalledRuntime], seen: Texts
) -> Iterator[FileChange]:
    """The backups to make."""
    known = {file.backup for entry in record for file in entry.files}
    for file in kept:
        if file.backup is not None and file.backup not in known:
            yield FileChange(file.backup, None, seen[file.path], _mode(tree, file.path))


def _nothing(place: RuntimeLocation, name: str, why: str) -> ChangeFiles:
    return ChangeFiles(why, (), _locks(place, name), already=(why,))


def _locks(place: RuntimeLocation, name: str) -> tuple[str, ...]:
    """The second lock is per entry: a run for one entry does not affect another one."""
    return (_LOCK, f"{_LOCK}-{place.program}-{name}")
