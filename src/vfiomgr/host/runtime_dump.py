"""What a runtime makes of its configuration: of files as they are, or as they are to be.

Files that are not written yet are shown to the program in a directory that nobody else can read.
"""

from __future__ import annotations

import os
import re
import tempfile
import tomllib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vfiomgr.errors import HostError
from vfiomgr.model.path import HostPath
from vfiomgr.model.runtime import absolute, covers

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from vfiomgr.host.tree import HostTree, ProgramAnswer

_SECONDS = 20.0
_UNKNOWN = "Ignoring unknown key in TOML"
_NAMED = re.compile(r'\b(?:plugin|key)=("[^"]*"|\S+)')
_SAID = 300

Texts = dict[str, str | None]
"""What files are to hold; what is not among them is as it is."""


@dataclass(frozen=True, slots=True)
class Dump:
    """What a program reads, and the keys that it does not know."""

    data: dict[str, Any]
    unknown: tuple[str, ...] = ()


def dump_containerd(tree: HostTree, main: HostPath, texts: Texts) -> Dump | None:
    """What containerd reads; None where it is not there to be asked.

    Raises:
        HostError: it cannot read it.

    """
    if not tree.runs_programs:
        return None
    with tempfile.TemporaryDirectory(prefix="vfiomgr-") as directory:
        place = _put(tree, main, texts, directory, 0)
        dump = ("--config", place, "config", "dump") if place else ("config", "default")
        answer = tree.ask(("containerd", *dump), _SECONDS)
    return None if answer is None else _read(answer, "containerd")


def _put(tree: HostTree, path: str, texts: Texts, directory: str, depth: int) -> str | None:
    """Show a file to the program, with the files that it imports at their own places.

    None where there is no main file; an import that is not there is the program's to tell.
    """
    import tomlkit  # noqa: PLC0415 - slow to import

    text = texts[path] if path in texts else tree.read_text(HostPath(path))
    if text is None:
        gone = os.path.join(directory, "gone") if path in texts else tree.locate(HostPath(path))
        return gone if depth else None
    document = tomlkit.parse(text)
    patterns = document.unwrap().get("imports", [])
    if not patterns and path not in texts:
        return tree.locate(HostPath(path))
    places = (
        _put(tree, found, texts, directory, depth + 1)
        for pattern in patterns
        for found in _found(tree, absolute(pattern, path), texts)
        if depth < 2  # noqa: PLR2004 - imports of imports are as deep as anybody goes
    )
    if patterns:
        document["imports"] = list(places)
    number = len(os.listdir(directory))
    place = os.path.join(directory, f"{number}-{HostPath(path).name}")
    with open(place, "w", encoding="utf-8", newline="") as file:
        file.write(document.as_string())
    return place


def _found(tree: HostTree, pattern: str, texts: Texts) -> Iterator[str]:
    """The files that an import finds, among them those that are to be; sorted as Go does it."""
    if "*" not in pattern:
        yield pattern
        return
    directory = HostPath(pattern).parent
    names = {f"{directory}/{name}" for name in tree.children(directory)} | texts.keys()
    for path in sorted(names):
        if covers(pattern, path) and texts.get(path, "") is not None:
            yield path


def _read(answer: ProgramAnswer, name: str) -> Dump:
    if answer.status:
        said = " ".join((answer.error or answer.output).split())[-_SAID:]
        message = f"{name} cannot read its configuration: {said}"
        raise HostError(message, "mend it first; nothing was changed")
    try:
        data = tomllib.loads(answer.output)
    except tomllib.TOMLDecodeError as error:
        message = f"{name} told its configuration in a way that cannot be read: {error}"
        raise HostError(message, "nothing was changed; please report its version") from None
    lines = (line for line in answer.error.splitlines() if _UNKNOWN in line)
    return Dump(data, tuple(" ".join(_NAMED.findall(line)).replace('"', "") for line in lines))


def dump_crio(
    tree: HostTree, main: HostPath, drop_ins: Iterable[HostPath], texts: Texts
) -> Dump | None:
    """What CRI-O reads; None where it is not there to be asked.

    Raises:
        HostError: it cannot read it.

    """
    if not tree.runs_programs:
        return None
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


def _copy(tree: HostTree, path: HostPath, texts: Mapping[str, str | None], place: str) -> None:
    text = texts[path] if path in texts else tree.read_text(path)
    if text is None and not place.endswith("crio.conf"):
        return
    with open(place, "w", encoding="utf-8", newline="") as file:
        file.write(text or "")


def validate_docker(tree: HostTree, text: str) -> bool:
    """Have Docker look at a daemon.json; False where it is not there, or too old to (before 23).

    Raises:
        HostError: it rejects it.

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
        raise HostError(message, "nothing was changed; mend what it names, or report it")
    return True
