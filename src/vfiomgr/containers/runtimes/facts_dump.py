"""The configuration as a runtime reads it: of present files, or of planned ones.

Planned files are shown to the program in a private directory.
"""

from __future__ import annotations

import os
import re
import tempfile
from typing import TYPE_CHECKING, Any

from msgspec import field

from vfiomgr.containers.runtimes.facts import found
from vfiomgr.containers.runtimes.model import absolute, covers, imports_of, is_pattern
from vfiomgr.documents.text import Malformed, parse_toml
from vfiomgr.errors import HostError, InvalidDocument
from vfiomgr.host.tree import HostTree
from vfiomgr.paths import HostPath
from vfiomgr.units import Version
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from vfiomgr.host.programs import ProgramAnswer

_SECONDS = 20.0
_UNKNOWN = "Ignoring unknown key in TOML"
_NAMED = re.compile(r'\b(?:plugin|key)=("[^"]*"|\S+)')
_SAID = 300

Texts = dict[str, str | None]
"""The planned content of files; others are unchanged."""


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
        answer = tree.ask(("containerd", *dump), _SECONDS)
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

        if path in self.places:
            return self.places[path]
        own = HostPath(self.tree.followed(HostPath(path)))
        text = self._text(own)
        if text is None:
            gone = os.path.join(self.directory, "gone")
            return None if is_main else gone if own in self.texts else self._own_place(path)
        try:
            document = tomlkit.parse(text)
        except (ValueError, RecursionError) as error:
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
            to_be.union(found(self.tree, pattern)), key=lambda path: path.split("/")
        ):
            if self.texts.get(path, "") is not None:
                yield path


def _read(answer: ProgramAnswer, name: str) -> Dump:
    if answer.status:
        said = " ".join((answer.error or answer.output).split())[-_SAID:]
        message = f"{name} cannot read its configuration: {said}"
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
    if not texts:
        return _own_dump_of_crio(tree, main)
    with tempfile.TemporaryDirectory(prefix="vfiomgr-") as directory:
        inner = os.path.join(directory, "crio.conf.d")
        os.mkdir(inner)
        place = os.path.join(directory, "crio.conf")
        _copy(tree, main, texts, place)
        for path in dict.fromkeys((*drop_ins, *texts)):
            if path != main:
                _copy(tree, HostPath(path), texts, os.path.join(inner, HostPath(path).name))
        command = ("crio", "--config", place, "--config-dir", inner, "config")
        answer = tree.ask(command, _SECONDS)
    return None if answer is None else _read(answer, "CRI-O")


def _own_dump_of_crio(tree: HostTree, main: HostPath) -> Dump | None:
    """CRI-O works without its main file, but not if a missing one is named."""
    named = ("--config", tree.locate(main)) if tree.exists(main) else ()
    inner = tree.locate(main.parent / "crio.conf.d")
    answer = tree.ask(("crio", *named, "--config-dir", inner, "config"), _SECONDS)
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
        answer = tree.ask(("dockerd", "--validate", "--config-file", place), _SECONDS)
    if answer is None or "unknown flag" in answer.error:
        return False
    if answer.status:
        said = " ".join((answer.error or answer.output).split())[-_SAID:]
        message = f"Docker rejects the file: {said}"
        raise HostError(message, "nothing was changed; correct what it names, or report it")
    return True
