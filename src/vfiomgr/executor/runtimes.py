"""Entries in the configuration of container runtimes: made ready, checked, then written.

Texts are made by the adapters and looked at by the runtime itself before any of them is written.
The record comes before the files: whatever cuts a run off, what is there is known as vfiomgr's.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from vfiomgr.adapters.runtimes import containerd, crio, difference, docker, removal, template, text
from vfiomgr.adapters.runtimes.edit import Decision
from vfiomgr.errors import (
    HostError,
    NeedsRoot,
    Refusal,
    RollbackIncomplete,
    RolledBack,
    VfiomgrError,
)
from vfiomgr.executor.change import Work, carry_out
from vfiomgr.host import runtime_dump, runtimes
from vfiomgr.model.intent import ChangeFiles, FileChange
from vfiomgr.model.path import HostPath
from vfiomgr.model.runtime import (
    RECORD,
    ConfigFile,
    InstalledRuntime,
    OwnedFile,
    ProgramName,
    RuntimeFacts,
    parse_record,
    render_record,
)
from vfiomgr.model.version import Version

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from vfiomgr.executor.run import Outcome
    from vfiomgr.host.runtime_dump import Dump, Texts
    from vfiomgr.host.tree import HostTree
    from vfiomgr.model.runtime import Key, Wish

_LOCK = "runtimes"
_DROP_IN = "50-vfiomgr"
_V3_TEMPLATE_SINCE = Version(2, 0)
_DECISIONS = {
    "containerd": containerd.decide,
    "crio": crio.decide,
    "docker": docker.decide,
    "k3s": template.decide,
    "rke2": template.decide,
}


@dataclass(frozen=True, slots=True)
class Place:
    """The runtime that is meant, and where it reads its configuration."""

    program: ProgramName
    main: HostPath
    version: Version | None


@dataclass(frozen=True, slots=True)
class Prepared:
    """A change that is ready to be carried out, and what a person should read before it."""

    place: Place
    intent: ChangeFiles
    unchecked: tuple[str, ...]
    """What nobody could look at, and why."""
    backups: tuple[str, ...] = ()
    foreseen: dict[str, Any] | None = None
    """What the runtime will read; None where it could not be asked."""


def locate(
    tree: HostTree, program: ProgramName, main: str | None, version: Version | None
) -> Place:
    """The runtime, with what is not told read from the host."""
    path = runtimes.main_file(program) if main is None else HostPath(main)
    place = runtimes.read_config(tree, path).path
    return Place(program, place, version or runtimes.read_version(tree, program))


def read_record(tree: HostTree) -> tuple[InstalledRuntime, ...]:
    """The entries that vfiomgr gave.

    Raises:
        NeedsRoot: only root may read of them: they hold whole files.
        InvalidDocument: the record is damaged.

    """
    text_of_record = tree.read_text(RECORD)
    if text_of_record is None and tree.exists(RECORD):
        raise NeedsRoot
    return parse_record(text_of_record)


def _entry(record: Iterable[InstalledRuntime], place: Place, name: str) -> InstalledRuntime | None:
    wanted = (place.program, place.main, name)
    return next((one for one in record if (one.program, one.main, one.name) == wanted), None)


def _elsewhere(record: Iterable[InstalledRuntime], place: Place, name: str) -> str:
    """Where else an entry of the name is."""
    alike = (one for one in record if (one.program, one.name) == (place.program, name))
    return "".join(f"; there is one in {one.main}: --runtime-config {one.main}" for one in alike)


# ---- giving an entry


def prepare_entry(tree: HostTree, place: Place, wish: Wish, command: str) -> Prepared:
    """Make an entry ready; `command` is what takes it back.

    Raises:
        InvalidDocument: a file cannot be read.
        Refusal: the runtime would not have it, or would lose something else by it.

    """
    record = read_record(tree)
    mine = _entry(record, place, wish.name)
    rest = tuple(one for one in record if one is not mine)
    cleaned, others = _without(tree, place, mine, rest, command)
    now = _facts(tree, place, cleaned, was_ours=mine is not None)
    before = _dump(tree, place, now, cleaned)
    facts = now if before is None else replace(now, effective=before.data)
    decision = _DECISIONS[wish.program](facts, wish)
    made = tuple(edit.made() for edit in decision.edits)
    texts: Texts = {**cleaned, **{file.path: file.after for file in made}}
    unchecked, foreseen = _checked(tree, place, facts, texts, decision=decision, before=before)
    if mine is not None and _is_so(tree, mine, made, texts):
        return Prepared(
            place, _nothing(place, wish.name, f"{wish.subject} is there already"), unchecked
        )
    kept = _with_backups(made, record)
    entry = InstalledRuntime(wish.program, place.main, wish.name, kept)
    changes = (
        *_backups(tree, kept, record),
        *_changes(tree, {}, cleaned),
        *_changes(tree, {}, {RECORD: render_record((*others, entry))}),
        *_changes(tree, cleaned, {file.path: file.after for file in made}),
    )
    summary = f"give {_told(place)} {wish.subject}"
    return Prepared(
        place,
        ChangeFiles(summary, changes, _locks(place, wish.name), decision.notes),
        unchecked,
        tuple(change.path for change in _backups(tree, kept, record)),
        foreseen,
    )


def _without(
    tree: HostTree,
    place: Place,
    mine: InstalledRuntime | None,
    rest: tuple[InstalledRuntime, ...],
    command: str,
) -> tuple[Texts, tuple[InstalledRuntime, ...]]:
    """The texts of an entry's files as they were without it."""
    if mine is None:
        return {}, rest
    taken = removal.remove(mine, rest, _texts(tree, mine), _beside(tree, place), command)
    return taken.texts, taken.others


def _is_so(tree: HostTree, mine: InstalledRuntime, made: Iterable[OwnedFile], texts: Texts) -> bool:
    """Whether all files say already what they are to say, however it is written."""
    paths = {file.path for file in (*mine.files, *made)}
    return all(_means(path, _text(tree, path), texts[path]) for path in paths)


def _means(path: str, one: str | None, other: str | None) -> bool:
    if one == other:
        return True
    if one is None or other is None or path.endswith(".tmpl"):
        return False
    return text.parse(one, path) == text.parse(other, path)


# ---- taking an entry back


def prepare_removal(tree: HostTree, place: Place, name: str, command: str) -> Prepared:
    """Make the removal of an entry ready.

    Raises:
        InvalidDocument: a file cannot be read.
        Refusal: what was written was changed since.

    """
    record = read_record(tree)
    mine = _entry(record, place, name)
    if mine is None:
        why = f"{_told(place)} has no entry {name} of vfiomgr's{_elsewhere(record, place, name)}"
        return Prepared(place, _nothing(place, name, why), ())
    rest = tuple(one for one in record if one is not mine)
    taken = removal.remove(mine, rest, _texts(tree, mine), _beside(tree, place), command)
    unchecked, foreseen = _checked_removal(tree, place, mine, taken.texts)
    left = render_record(taken.others) if taken.others else None
    ordered = {file.path: taken.texts[file.path] for file in reversed(mine.files)}
    changes = (
        *_changes(tree, {}, ordered),
        *_changes(tree, {}, _redundant(tree, mine, ordered)),
        *_changes(tree, {}, {RECORD: left}),
    )
    summary = f"take the entry {name} from {_told(place)}"
    intent = ChangeFiles(summary, changes, _locks(place, name), taken.notes)
    return Prepared(place, intent, unchecked, foreseen=foreseen)


def _redundant(tree: HostTree, mine: InstalledRuntime, texts: Texts) -> Texts:
    """Backups that hold just what is there again."""
    backups = {file.backup: file.path for file in mine.files if file.backup is not None}
    return {backup: None for backup, path in backups.items() if _text(tree, backup) == texts[path]}


def _checked_removal(
    tree: HostTree, place: Place, mine: InstalledRuntime, texts: Texts
) -> tuple[tuple[str, ...], dict[str, Any] | None]:
    """As for an entry; but that a runtime reads nothing at all now keeps no entry in its files."""
    keys = tuple(key.path for file in mine.files for key in file.keys)
    ours: list[Key] = [("imports",), ("version",)]
    ours += [("plugins", cri, *key[2:]) for key in keys for cri in containerd.CRI_NAMES]
    decision = Decision((), ours=(*ours, *keys))
    try:
        facts = _facts(tree, place, {}, was_ours=True)
        before = _dump(tree, place, facts, {})
        return _checked(tree, place, facts, texts, decision=decision, before=before)
    except HostError as error:
        return (error.message,), None


# ---- carrying it out


def apply_prepared(prepared: Prepared, work: Work) -> Outcome:
    """Carry a change out, and have the runtime read what came of it.

    Raises:
        RolledBack: it does not read what was foreseen; all is as it was.
        RollbackIncomplete: and it could not be put back.

    """
    outcome = carry_out(prepared.intent, work)
    if not outcome.is_changed or prepared.foreseen is None:
        return outcome
    why = _surprise(work.tree, prepared)
    if why is None:
        return outcome
    try:
        carry_out(prepared.intent.inverse(), work)
    except VfiomgrError as error:
        message = f"{why}; and it could not be taken back: {error.message}"
        raise RollbackIncomplete(message, error.hint) from error
    message = f"{why}; all files are as they were"
    raise RolledBack(message, "did somebody else change them at the same time? run it again")


def _surprise(tree: HostTree, prepared: Prepared) -> str | None:
    """Why what a runtime reads now is not what it was going to read."""
    place = prepared.place
    try:
        now = _dump(tree, place, _facts(tree, place, {}, was_ours=True), {})
    except VfiomgrError as error:
        return error.message
    if now is None or _comparable(now.data) == _comparable(prepared.foreseen or {}):
        return None
    return f"{_told(place)} reads something else than it was going to"


def _comparable(data: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in data.items() if name != "imports"}


# ---- facts


def _facts(tree: HostTree, place: Place, texts: Texts, *, was_ours: bool) -> RuntimeFacts:
    """The files of a runtime, with texts that they are to have."""
    main = _with(runtimes.read_config(tree, place.main), texts)
    drop_in = runtimes.read_config(tree, _drop_in(tree, place))
    imported: tuple[ConfigFile, ...] = ()
    if place.program == "containerd" and main.text is not None:
        patterns = text.parse(main.text, main.path).get("imports", [])
        imported = runtimes.read_imported(tree, main.path, patterns, place.version)
    elif place.program == "crio":
        others = (path for path in _beside(tree, place) if not path.endswith("~"))
        imported = tuple(runtimes.read_config(tree, path) for path in others)
    imported = tuple(_with(file, texts) for file in imported)
    return RuntimeFacts(
        place.version,
        main,
        _with(drop_in, texts),
        tuple(file for file in imported if file.text is not None),
        _beside(tree, place),
        was_ours=was_ours,
    )


def _with(file: ConfigFile, texts: Texts) -> ConfigFile:
    return replace(file, text=texts[file.path]) if file.path in texts else file


def _drop_in(tree: HostTree, place: Place) -> HostPath:
    """The file that vfiomgr writes, beside the main one or instead of it."""
    directory = place.main.parent
    match place.program:
        case "containerd":
            return directory / f"conf.d/{_DROP_IN}.toml"
        case "crio":
            return directory / f"crio.conf.d/{_DROP_IN}.conf"
        case "docker":
            return place.main
        case _:
            return _template(tree, place)


def _template(tree: HostTree, place: Place) -> HostPath:
    """The template that k3s or rke2 takes, or would take.

    Raises:
        Refusal: which one cannot be told.

    """
    directory = place.main.parent
    names = {3: directory / template.V3_NAME, 2: directory / "config.toml.tmpl"}
    for path in names.values():
        if tree.exists(path):
            return path
    made = runtimes.read_config(tree, place.main)
    if made.text is not None:
        return names[3 if text.parse(made.text, made.path).get("version") == 3 else 2]  # noqa: PLR2004
    if place.version is None:
        message = f"{place.program} has made no {made.path} yet, so its template is not known"
        hint = f"start {place.program} once, or pass --containerd-version (k3s --version tells)"
        raise Refusal(message, hint)
    return names[3 if place.version >= _V3_TEMPLATE_SINCE else 2]


def _beside(tree: HostTree, place: Place) -> tuple[HostPath, ...]:
    """Files of others where drop-ins are."""
    if place.program not in ("containerd", "crio"):
        return ()
    own = _drop_in(tree, place)
    return tuple(path for path in runtimes.files_in(tree, own.parent) if path != own)


# ---- checks


def _checked(  # noqa: PLR0913 - a check is of one text against another
    tree: HostTree,
    place: Place,
    facts: RuntimeFacts,
    texts: Texts,
    *,
    decision: Decision,
    before: Dump | None,
) -> tuple[tuple[str, ...], dict[str, Any] | None]:
    """Have the runtime read what is to be; what was not checked, and what it will read.

    Raises:
        Refusal: it would not read it, or read something else differently as well.

    """
    name = _told(place)
    if place.program == "docker":
        with _refusing():
            is_valid = runtime_dump.validate_docker(tree, texts[place.main] or "{}")
        return (() if is_valid else (_why_unchecked(tree, place),)), None
    if before is None:
        return (_why_unchecked(tree, place),), None
    with _refusing():
        after = _dump(tree, place, facts, texts)
    if after is None:
        return (_why_unchecked(tree, place),), None
    new = [key for key in after.unknown if key not in before.unknown]
    if new:
        message = f"{name} does not know: {'; '.join(dict.fromkeys(new))}"
        raise Refusal(message, "nothing was changed; is this the version that reads these files?")
    difference.refuse_others(before.data, after.data, decision, name)
    return (), after.data


@contextmanager
def _refusing() -> Iterator[None]:
    """What a runtime rejects before anything is written is refused, and has not failed."""
    try:
        yield
    except HostError as error:
        raise Refusal(error.message, error.hint) from error


def _dump(tree: HostTree, place: Place, facts: RuntimeFacts, texts: Texts) -> Dump | None:
    match place.program:
        case "containerd":
            return runtime_dump.dump_containerd(tree, place.main, texts, place.version)
        case "crio":
            drop_ins = [file.path for file in (*facts.imported, facts.drop_in)]
            return runtime_dump.dump_crio(tree, place.main, drop_ins, texts)
        case _:
            return None


def _why_unchecked(tree: HostTree, place: Place) -> str:
    name = _told(place)
    if place.program in ("k3s", "rke2"):
        return f"what {name} makes of the template: it does so when it starts"
    if not tree.runs_programs:
        return f"what {name} makes of it: programs of {tree.root} cannot be run from here"
    return f"what {name} makes of it: it is not installed here, or does not answer"


def _told(place: Place) -> str:
    names = {"containerd": "containerd", "crio": "CRI-O", "docker": "Docker"}
    name = names.get(place.program)
    if name is None:
        return place.program  # the version is that of the containerd in it
    return f"{name} {place.version}" if place.version is not None else name


# ---- files


def _text(tree: HostTree, path: str) -> str | None:
    return tree.read_text(HostPath(path))


def _texts(tree: HostTree, entry: InstalledRuntime) -> Texts:
    return {file.path: _text(tree, file.path) for file in entry.files}


def _changes(
    tree: HostTree, before: Mapping[str, str | None], after: Mapping[str, str | None]
) -> Iterator[FileChange]:
    """From the texts that files have by then, to others."""
    for path, new in after.items():
        old = before[path] if path in before else _text(tree, path)
        if old != new:
            yield FileChange(path, old, new, _mode(tree, path))


def _mode(tree: HostTree, path: str) -> int:
    if path == RECORD:
        return 0o600
    return runtimes.read_config(tree, HostPath(path)).mode


def _with_backups(
    made: Iterable[OwnedFile], record: Iterable[InstalledRuntime]
) -> tuple[OwnedFile, ...]:
    """The files with where they are kept as they are: those that are not vfiomgr's own."""
    stamp = _stamp()
    known = [file for entry in record for file in entry.files]
    kept: list[OwnedFile] = []
    for file in made:
        earlier = [other for other in known if other.path == file.path]
        backup = next((other.backup for other in earlier if other.backup is not None), None)
        is_own = any(other.before is None for other in earlier)
        if file.before is not None and not is_own and backup is None:
            backup = f"{file.path}.vfiomgr-{stamp}"
        kept.append(replace(file, backup=backup))
    return tuple(kept)


def _stamp() -> str:
    """When a copy was made, as part of its name."""
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())


def _backups(
    tree: HostTree, kept: Iterable[OwnedFile], record: Iterable[InstalledRuntime]
) -> tuple[FileChange, ...]:
    """Those that are to be made."""
    known = {file.backup for entry in record for file in entry.files}
    return tuple(
        FileChange(file.backup, None, _text(tree, file.path), _mode(tree, file.path))
        for file in kept
        if file.backup is not None and file.backup not in known
    )


def _nothing(place: Place, name: str, why: str) -> ChangeFiles:
    return ChangeFiles(why, (), _locks(place, name), already=(why,))


def _locks(place: Place, name: str) -> tuple[str, ...]:
    """The second one tells entries apart: the run for one does not settle that for another."""
    return (_LOCK, f"{_LOCK}-{place.program}-{name}")
