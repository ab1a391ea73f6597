"""What a golden file of a command is made of: a host, the lines that are typed, the transcript."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tests.fakes.hosts import workstation
from vfiomgr.engine.journal import encode, names, read_journal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    import pytest

    from tests.fakes.kernel import FakeKernel
    from tests.unit.conftest import Run

WIDTH = 80
"""Columns of the terminal that helps are wrapped for."""
PROGRAM = "/usr/bin/python3"
"""The interpreter that units and hooks are written for."""
_UNSHOWN = "."
_INODES = re.compile(r"(==> /run/vfiomgr/made/.*\n\S+) \d+ \d+")
"""Of a virtual function, whose incarnation they tell."""
_MOMENT = re.compile(r"\b\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:?\d\d)?")


@dataclass(frozen=True)
class Place:
    """Where a scenario is: what a preparation may change."""

    directory: Path
    """Where the user is; a name without a directory is there."""
    kernel: FakeKernel
    patch: pytest.MonkeyPatch


def as_installed(patch: pytest.MonkeyPatch) -> None:
    """Run as a program that root installed, whatever runs the tests."""
    program = SimpleNamespace(executable=PROGRAM, prefix="/usr", argv=["vfiomgr"])
    patch.setattr("vfiomgr.persistence.named.sys", program)
    patch.setattr("vfiomgr.persistence.named._is_command", lambda: True)
    patch.setattr("vfiomgr.persistence.named._isolated_places", list)
    patch.setattr("vfiomgr.persistence.named.weakness", lambda *_: "")


def untouched(_place: Place) -> None:
    """Leave the host as it was made."""


@dataclass(frozen=True)
class Scenario:
    """A host, and what is typed on it, a command a line.

    A line that begins with a point is run and not shown.
    """

    command: str
    """The command that it shows, e.g. `vgpu create`."""
    lines: str
    host: Callable[[Path], FakeKernel] = workstation
    files: Mapping[str, str] = field(default_factory=dict)
    """Where the user is."""
    host_files: Mapping[str, str] = field(default_factory=dict)
    """Below the root of the host."""
    prepare: Callable[[Place], None] = untouched
    stdin: str | None = None
    case: str = ""
    """Which of several of the command it is."""
    journals: Mapping[str, str] = field(default_factory=dict)
    """Golden files in tests/golden/journals, and the kind of request of each."""
    keeps: bool = False
    """What vfiomgr keeps at the end is golden too, in tests/golden/kept."""
    in_json: bool = False
    """Its JSON is golden too. Of each kind of document one or two are; all are checked."""
    is_document: bool = False
    """It prints JSON without being asked to, so that both forms are one file."""

    def __str__(self) -> str:
        """What its golden files are called."""
        return "-".join(filter(None, [*self.command.split(), self.case]))

    def lay_out(self, place: Place) -> None:
        """Write the files, then prepare the rest."""
        for name, text in self.files.items():
            (place.directory / name).write_text(text)
        for name, text in self.host_files.items():
            path = place.directory.parent / "host" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        self.prepare(place)

    def transcript(self, run: Run, before: Callable[[], None], *options: str) -> str:
        """What a terminal would show, with these options before each command."""
        told = ""
        for line in filter(None, map(str.strip, self.lines.splitlines())):
            before()
            words = shlex.split(line.removeprefix(_UNSHOWN))
            answer = run(*(() if line.startswith(_UNSHOWN) else options), *words)
            if line.startswith(_UNSHOWN):
                assert answer.status == 0, f"{line}: {answer.stderr}"
                continue
            told += f"$ {shlex.join(['vfiomgr', *options, *words])}\n{ended(answer.stdout)}"
            told += "".join(f"[stderr] {one}\n" for one in answer.stderr.splitlines())
            told += f"[exit status {answer.status}]\n\n"
        return told


def documents_in(text: str) -> Iterator[dict[str, Any]]:
    """The documents of vfiomgr in a transcript or a golden file."""
    text = re.sub(r"^\[stderr\] ", "", text, flags=re.MULTILINE)
    for start in re.finditer(r"^\{$|^\{(?=\")", text, re.MULTILINE):
        try:
            document, _ = json.JSONDecoder().raw_decode(text, start.start())
        except ValueError:
            continue  # a part of a configuration file of others
        if document.get("api_version") == "vfiomgr/v1":
            yield document


def first_journal(place: Place, kind: str) -> str:
    """The first journal of a request of a kind, without the time; its checksums are right."""
    for name in names(place.kernel):
        told = json.dumps(read_journal(place.kernel, name))
        records = json.loads(steady(told, place.directory.parent))
        if records[0]["request"]["kind"] == kind:
            bare = ({key: r[key] for key in r if key != "crc32"} | {"time": 0.0} for r in records)
            return b"".join(map(encode, bare)).decode()
    message = f"no journal of {kind}"
    raise AssertionError(message)


def kept_files(place: Place) -> str:
    """The files that vfiomgr keeps for itself, besides locks and journals."""
    root = place.directory.parent / "host"
    found = sorted(
        file
        for below in ("var/lib/vfiomgr", "run/vfiomgr", "etc/vfiomgr")
        for file in (root / below).rglob("*")
        if file.is_file() and not {"journal", "locks"} & set(file.parts)
    )
    texts = "".join(f"==> /{file.relative_to(root)}\n{ended(file.read_text())}" for file in found)
    return steady(_INODES.sub(r"\1 INODE INODE", texts), place.directory.parent)


def ended(text: str) -> str:
    """The same with a newline at its end."""
    return text if not text or text.endswith("\n") else f"{text}\n[no newline]\n"


def steady(text: str, directory: Path) -> str:
    """Without what differs from run to run: where the host is, and when it was."""
    return _MOMENT.sub("TIME", text.replace(str(directory), "/TMP"))
