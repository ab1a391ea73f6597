"""Check changes of container runtime entries with the runtime, and apply them."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from msgspec import field

from vfiomgr.containers.runtimes import values
from vfiomgr.containers.runtimes.containerd import CRI_NAMES
from vfiomgr.containers.runtimes.location import (
    RuntimeLocation,
    matching_files,
    read_config,
    read_facts,
)
from vfiomgr.containers.runtimes.model import Texts, absolute, covers, imports_of, is_pattern, shown
from vfiomgr.containers.runtimes.record import RECORD, Decision, InstalledRuntime
from vfiomgr.diagnostic import refuse
from vfiomgr.documents.text import Malformed, parse_toml
from vfiomgr.engine.locks import hold
from vfiomgr.engine.transaction import ApplyContext, carry_out, prepared
from vfiomgr.errors import HostError, InvalidDocument, RollbackIncomplete, RolledBack, VfiomgrError
from vfiomgr.expressions import expression
from vfiomgr.host.tree import HostTree
from vfiomgr.listing import listed
from vfiomgr.paths import HostPath
from vfiomgr.persistence.steps import ChangeFiles, FileChange
from vfiomgr.units import Version
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.containers.runtimes.model import Key, RuntimeFacts
    from vfiomgr.engine.run import Outcome
    from vfiomgr.host.programs import ProgramAnswer

_DUMP_SECONDS = 20.0
_UNKNOWN = "Ignoring unknown key in TOML"
_NAMED = expression(r'\b(?:plugin|key)=("[^"]*"|\S+)')
_SAID = 300


class Dump(Value):
    """The settings that a program reads, and the keys that it does not know."""

    data: dict[str, Any]
    unknown: tuple[str, ...] = ()


def dump_containerd(
    tree: HostTree, main: HostPath, texts: Texts, version: Version | None
) -> Dump | None:
    """The settings that containerd reads; None if it cannot be queried.

    Without texts it reads the files in their own places, and resolves imports itself.

    Raises:
        HostError: it cannot read them.
    """
    if not tree.runs_programs:
        return None
    with tempfile.TemporaryDirectory(prefix="vfiomgr-") as directory:
        if texts:
            place = _Shown(tree, texts, directory, version).put(main, is_main=True)
        else:
            place = tree.locate(main) if tree.exists(main) else None
        dump = ("--config", place, "config", "dump") if place else ("config", "default")
        answer = tree.ask(("containerd", *dump), _DUMP_SECONDS)
    return None if answer is None else _read(answer, "containerd")


class _Shown(Value):
    """Planned files in a directory."""

    tree: HostTree
    texts: Texts
    directory: str
    version: Version | None
    places: dict[str, str] = field(default_factory=dict)
    """The temporary path of each file."""

    def put(self, path: str, *, is_main: bool = False) -> str | None:
        """Show a file to the program, with imported files in their own places.

        None without a main file; the program reports a missing import itself.
        """
        import tomlkit  # noqa: PLC0415 - slow to import
        from tomlkit.exceptions import TOMLKitError  # noqa: PLC0415

        if path in self.places:
            return self.places[path]
        own = HostPath(self.tree.followed(HostPath(path)))
        text = self._text(own)
        if text is None:
            gone = os.path.join(self.directory, "gone")
            return None if is_main else gone if own in self.texts else self._own_place(path)
        try:
            document = tomlkit.parse(text)
        except (TOMLKitError, ValueError, RecursionError) as error:
            message = f"cannot read {own}: {error}"
            raise InvalidDocument(message, "correct the file first; nothing was changed") from None
        patterns = imports_of(document.unwrap(), path)
        is_own = not patterns and own not in self.texts
        place = os.path.join(self.directory, f"{len(self.places)}-{HostPath(path).name}")
        self.places[path] = self._own_place(own) if is_own else place  # files may import each other
        if patterns:
            files = (file for pattern in patterns for file in self._found(pattern, path))
            document["imports"] = [self.put(file) for file in files]
        if not is_own:
            with open(place, "w", encoding="utf-8", newline="") as file:
                file.write(document.as_string())
        return self.places[path]

    def _text(self, path: str) -> str | None:
        return self.texts[path] if path in self.texts else self.tree.read_text(HostPath(path))

    def _own_place(self, path: str) -> str:
        return self.tree.locate(HostPath(path))

    def _found(self, pattern: str, importer: str) -> Iterator[str]:
        """The files that match an import, including planned ones; sorted as in Go."""
        pattern = absolute(pattern, importer, self.version)
        if not is_pattern(pattern):
            yield pattern
            return
        to_be = {path for path in self.texts if covers(pattern, path)}
        for path in sorted(
            to_be.union(matching_files(self.tree, pattern)), key=lambda path: path.split("/")
        ):
            if self.texts.get(path, "") is not None:
                yield path


def _said(answer: ProgramAnswer) -> str:
    """The end of what a program printed, in one line."""
    return " ".join((answer.error or answer.output).split())[-_SAID:]


def _read(answer: ProgramAnswer, name: str) -> Dump:
    if answer.status:
        message = f"{name} cannot read its configuration: {_said(answer)}"
        raise HostError(message, "correct it first; nothing was changed")
    try:
        data = parse_toml(answer.output)
    except Malformed as error:
        message = f"cannot read the output of {name}: {error}"
        raise HostError(message, "nothing was changed; please report its version") from None
    lines = (line for line in answer.error.splitlines() if _UNKNOWN in line)
    return Dump(data, tuple(" ".join(_NAMED.findall(line)).replace('"', "") for line in lines))


def dump_crio(
    tree: HostTree, main: HostPath, drop_ins: Iterable[HostPath], texts: Texts
) -> Dump | None:
    """The settings that CRI-O reads; None if it cannot be queried.

    Without texts it reads the files in their own places.

    Raises:
        HostError: it cannot read them.
    """
    if not tree.runs_programs:
        return None
    if not texts:  # CRI-O works without its main file, but not if a missing one is named
        named = ("--config", tree.locate(main)) if tree.exists(main) else ()
        inner = tree.locate(main.parent / "crio.conf.d")
        answer = tree.ask(("crio", *named, "--config-dir", inner, "config"), _DUMP_SECONDS)
        return None if answer is None else _read(answer, "CRI-O")
    with tempfile.TemporaryDirectory(prefix="vfiomgr-") as directory:
        inner = os.path.join(directory, "crio.conf.d")
        os.mkdir(inner)
        place = os.path.join(directory, "crio.conf")
        _copy(tree, main, texts, place)
        for path in dict.fromkeys((*drop_ins, *texts)):
            if path != main:
                _copy(tree, HostPath(path), texts, os.path.join(inner, HostPath(path).name))
        command = ("crio", "--config", place, "--config-dir", inner, "config")
        answer = tree.ask(command, _DUMP_SECONDS)
    return None if answer is None else _read(answer, "CRI-O")


def _copy(tree: HostTree, path: HostPath, texts: Mapping[str, str | None], place: str) -> None:
    text = texts[path] if path in texts else tree.read_text(path)
    if text is None and not place.endswith("crio.conf"):
        return
    with open(place, "w", encoding="utf-8", newline="") as file:
        file.write(text or "")


def validate_docker(tree: HostTree, text: str) -> bool:
    """Let Docker validate a daemon.json; False if it is not installed, or too old (before 23).

    Raises:
        HostError: it rejects the file.
    """
    if not tree.runs_programs:
        return False
    with tempfile.TemporaryDirectory(prefix="vfiomgr-") as directory:
        place = os.path.join(directory, "daemon.json")
        with open(place, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        answer = tree.ask(("dockerd", "--validate", "--config-file", place), _DUMP_SECONDS)
    if answer is None or "unknown flag" in answer.error:
        return False
    if answer.status:
        message = f"Docker rejects the file: {_said(answer)}"
        raise HostError(message, "nothing was changed; correct what it names, or report it")
    return True


_MOST = 5
"""How many keys a message names."""


def refuse_others(before: values.Data, after: values.Data, decision: Decision, name: str) -> None:
    """Make sure that only the intended settings of a runtime differ."""
    one, other = values.without_zeros(before), values.without_zeros(after)
    foreign = [
        key
        for key in values.differences(one, other)
        if not any(key[: len(own)] == own for own in decision.ours)
    ]
    if foreign:
        message = (
            f"{name} would also read other settings differently: "
            f"{listed([shown(key) for key in foreign], _MOST)}"
        )
        refuse(
            "runtime-reads-otherwise",
            name,
            message,
            "nothing was changed; please report the files that it reads",
        )
    unseen = list(_unseen(other, decision))
    if unseen:
        message = f"{name} would not read {', '.join(map(shown, unseen[:_MOST]))}"
        hint = f"nothing was changed; check whether another file of {name} sets it again"
        refuse("runtime-entry-unseen", name, message, hint)


def _unseen(after: values.Data, decision: Decision) -> Iterator[Key]:
    """Keys that a runtime does not read as written, under either name of CRI."""
    for setting in decision.expected:
        if setting.is_item or setting.key == ("version",):
            continue
        key = setting.key
        names = [key] if key[0] != "plugins" else [(key[0], cri, *key[2:]) for cri in CRI_NAMES]
        wanted = values.without_zeros(setting.value)
        if not any(_holds(values.found(after, name), wanted) for name in names):
            yield key


def _holds(there: object, wanted: object) -> bool:
    """Whether a value is the expected one, or a table that contains it."""
    if isinstance(wanted, dict):
        return isinstance(there, dict) and all(
            name in there and _holds(there[name], value) for name, value in wanted.items()
        )
    return there == wanted


def checked(  # noqa: PLR0913 - a check is of one text against another
    tree: HostTree,
    place: RuntimeLocation,
    facts: RuntimeFacts,
    texts: Texts,
    *,
    decision: Decision,
    before: Dump | None,
) -> tuple[tuple[str, ...], dict[str, Any] | None]:
    """Let the runtime read the planned files; return what was not checked, and what it will read.

    Raises:
        Refusal: it would not read the entry, or would read other settings differently.
    """
    name = str(place)
    if place.program == "docker":
        with _refusing():
            is_valid = validate_docker(tree, texts[place.main] or "{}")
        return (() if is_valid else (_why_unchecked(tree, place),)), None
    if before is None:
        return (_why_unchecked(tree, place),), None
    with _refusing():
        after = dump(tree, place, facts, texts)
    if after is None:
        return (_why_unchecked(tree, place),), None
    new = [key for key in after.unknown if key not in before.unknown]
    if new:
        message = f"unknown keys for {name}: {'; '.join(dict.fromkeys(new))}"
        refuse(
            "runtime-unknown-key",
            name,
            message,
            "nothing was changed; check that it is the version that reads these files",
        )
    refuse_others(before.data, after.data, decision, name)
    return (), after.data


@contextmanager
def _refusing() -> Iterator[None]:
    """Turn a rejection by a runtime into a refusal: nothing has been written yet."""
    try:
        yield
    except HostError as error:
        refuse("runtime-rejects", "", error.message, error.hint)


def dump(tree: HostTree, place: RuntimeLocation, facts: RuntimeFacts, texts: Texts) -> Dump | None:
    """The settings that a runtime reads from the files; None if it cannot be queried.

    Raises:
        HostError: it cannot read them.
    """
    if place.other is not None:
        return None
    match place.program:
        case "containerd":
            return dump_containerd(tree, place.given, texts, place.version)
        case "crio":
            drop_ins = [file.path for file in (*facts.imported, facts.drop_in)]
            return dump_crio(tree, place.main, drop_ins, texts)
        case _:
            return None


def _why_unchecked(tree: HostTree, place: RuntimeLocation) -> str:
    name = str(place)
    if place.program in ("k3s", "rke2"):
        return f"how {name} reads the template: it does so when it starts"
    if place.other is not None:
        return f"how {name} reads the files: containerd {place.other} is installed"
    if not tree.runs_programs:
        return f"how {name} reads the files: programs of {tree.root} cannot be run from here"
    return f"how {name} reads the files: it is not installed here, or does not answer"


_READING = "runtimes-read"
"""Held from the first read of files until they are written, around the locks of the plan."""


class Prepared(Value):
    """A prepared change, and notes to print before it is applied."""

    place: RuntimeLocation
    request: ChangeFiles
    unchecked: tuple[str, ...]
    """What was not checked, and why."""
    backups: tuple[str, ...] = ()
    foreseen: dict[str, Any] | None = None
    """What the runtime will read; None if it cannot be queried."""
    directories: tuple[HostPath, ...] = ()
    """Directories created for files that are removed; removed if they are empty."""


def change(make: Callable[[], Prepared], work: ApplyContext) -> tuple[Prepared, Outcome]:
    """Prepare a change and apply it, without other vfiomgr processes in between.

    Raises:
        VfiomgrError: as the preparation, and `apply_prepared`.
    """
    with ExitStack() as stack:
        with prepared(work, only_files=True):
            stack.enter_context(hold(work.tree, (_READING,), work.on_note))
        ready = make()
        return ready, apply_prepared(ready, work)


def apply_prepared(prepared: Prepared, work: ApplyContext) -> Outcome:
    """Apply a change, and let the runtime read the result.

    Raises:
        RolledBack: it does not read the expected settings; all files were restored.
        RollbackIncomplete: the files could not be restored.
    """
    outcome = carry_out(prepared.request, work)
    has_answer = outcome.is_changed and prepared.foreseen is not None
    why = find_surprise(work.tree, prepared) if has_answer else None
    if why is None:
        for directory in prepared.directories:
            work.tree.remove_empty_directory(directory)
        return outcome
    try:
        carry_out(prepared.request.inverse(), work)
    except VfiomgrError as error:
        message = f"{why}; cannot restore the files: {error.message}"
        raise RollbackIncomplete(message, error.hint) from error
    message = f"{why}; all files were restored"
    hint = "check whether it imports unknown files, or whether a file was changed meanwhile;"
    raise RolledBack(message, f"{hint} then run the command again")


def find_surprise(tree: HostTree, prepared: Prepared) -> str | None:
    """Why the runtime reads other settings than expected."""
    place = prepared.place
    try:
        now = dump(tree, place, read_facts(tree, place, {}, was_ours=True), {})
    except VfiomgrError as error:
        return error.message
    if now is None or _comparable(now.data) == _comparable(prepared.foreseen or {}):
        return None
    return f"{place} does not read the expected settings"


def _comparable(data: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in data.items() if name != "imports"}


_LOCK = "runtimes"
_COPY = ".vfiomgr-"
"""Between the name of a file and the time of the copy."""
DEFAULTS: tuple[Key, ...] = (
    *(("plugins", cri, "containerd", "default_runtime_name") for cri in CRI_NAMES),
    ("crio", "runtime", "default_runtime"),
    ("default-runtime",),
)
"""The keys that name the default runtime."""


def texts_of(tree: HostTree, runtime: InstalledRuntime) -> Texts:
    """The present texts of the files with entries."""
    return {file.path: tree.read_text(HostPath(file.path)) for file in runtime.files}


def file_changes(
    tree: HostTree, before: Mapping[str, str | None], after: Mapping[str, str | None]
) -> Iterator[FileChange]:
    """The changes of files, from the texts that the new ones were made from.

    That way changes of other programs in between are not lost.
    """
    for path, new in after.items():
        old = before[path] if path in before else tree.read_text(HostPath(path))
        if old != new:
            mode = 0o600 if path == RECORD else read_config(tree, HostPath(path)).mode
            yield FileChange(path, old, new, mode)


def backup_path(path: str) -> str:
    """The path of a backup that is made now."""
    return f"{path}{_COPY}{_stamp()}"


def _stamp() -> str:
    """The time of a copy, as part of its name."""
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())


def backups_of(tree: HostTree, path: str) -> list[str]:
    """The copies of a file that vfiomgr made, the latest last."""
    place = HostPath(path)
    names = sorted(tree.children(place.parent))
    return [place.parent / name for name in names if name.startswith(f"{place.name}{_COPY}")]


def no_change(place: RuntimeLocation, name: str, why: str) -> ChangeFiles:
    """A request that changes nothing."""
    return ChangeFiles(why, (), lock_names(place, name), already=(why,))


def lock_names(place: RuntimeLocation, name: str) -> tuple[str, ...]:
    """The second lock is per entry: a run for one entry does not affect another one."""
    return (_LOCK, f"{_LOCK}-{place.program}-{name}")
