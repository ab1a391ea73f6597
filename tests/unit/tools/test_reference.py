"""The reference: pages of commands, manual pages, and the documents of `--format json`."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import pytest

from tests.unit.conftest import GOLDEN
from tests.unit.golden.transcripts import documents_in
from tools.reference import man
from tools.reference.__main__ import stale
from tools.reference.json_documents import Contract
from tools.reference.pages import Page, all_pages
from vfiomgr.main.program import cli

if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCES = Path(__file__).parents[3] / "src"
PAGES = {page.name: page for page in all_pages()}


@pytest.fixture(scope="module")
def contract() -> Contract:
    return Contract()


def test_the_reference_is_up_to_date() -> None:
    assert stale() == [], "run: python -m tools.reference"


def read(roff: str) -> str:
    """Roff as a terminal shows it, without its layout."""
    lines = [line for line in roff.splitlines() if not re.match(r"\.[A-Za-z]", line)]
    text = re.sub(r"\\f[BIP]|\\&", "", "\n".join(lines))
    for char, name in man._SPECIAL.items():
        if char != "\\":
            text = text.replace(name, char)
    text = re.sub(r"\\\[u([0-9A-F]{4,6})\]", lambda found: chr(int(found[1], 16)), text)
    return " ".join(text.replace(r"\(rs", "\\").split())


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
def test_the_manual_says_what_help_says(page: Page) -> None:
    """Each word of `--help`, in its order, but for headings and filled lines."""
    context = click.Context(cli, info_name="vfiomgr", terminal_width=9999, **cli.context_settings)
    for name in page.path[1:]:
        group = context.command
        assert isinstance(group, click.Group)
        command = group.get_command(context, name)
        assert command is not None
        context = click.Context(command, info_name=name, parent=context)
    manual = read(man.render(page, "2026-01-01", ()))
    help_text = " ".join(context.get_help().split())
    said = [page.usage, *(f"{entry.term} {entry.text}" for entry in page.options)]
    for text in [*said, *(part.text for part in page.description), page.exit_status]:
        shown = " ".join(text.split())
        assert shown in help_text
        assert shown.replace("`", "") in manual
    for line in page.examples.splitlines():
        assert " ".join(line.split()) in manual


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
def test_the_help_of_each_command_fits_a_terminal(
    page: Page, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stopped:
        cli.main(args=[*page.path[1:], "--help"], prog_name="vfiomgr")
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"Usage: {' '.join(page.path)} ")
    _, _, options = shown.partition("\nOptions:\n")
    assert "--help" in options
    assert max(map(len, options.splitlines())) <= 80
    assert max(map(len, shown.splitlines())) <= 100, "lines that click does not fill"


@pytest.mark.parametrize(
    ("text", "roff"),
    [
        ("--dry-run", r"\-\-dry\-run"),
        (".TH in a text\n'quote", "\\&.TH in a text\n\\(aqquote"),
        (r"a\n", r"a\(rsn"),
        ("…", r"\[u2026]"),
        ("~^`", r"\(ti\(ha\(ga"),
    ],
)
def test_no_text_is_a_request_of_roff(text: str, roff: str) -> None:
    assert man.escaped(text) == roff


def documents() -> Iterator[tuple[str, dict[str, Any]]]:
    """The documents of vfiomgr in golden files, with the names of the files."""
    for file in sorted([*GOLDEN.rglob("*.json"), *(GOLDEN / "commands").glob("*.txt")]):
        for document in documents_in(file.read_text(encoding="utf-8")):
            yield file.name, document


def test_every_field_of_every_document_is_documented(contract: Contract) -> None:
    found = {(f"{name}: {fault}") for name, one in documents() for fault in contract.faults(one)}
    assert sorted(found) == [], "see tools/reference/documents.toml"


def test_every_kind_is_documented_and_seen(contract: Contract) -> None:
    assert printed_kinds() <= set(contract.kinds)
    assert printed_kinds() - {document["kind"] for _, document in documents()} == set()


def printed_kinds() -> set[str]:
    """The kinds that commands name when they print a document."""
    found = set()
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(
                    func=ast.Name(id="print_document"), args=[ast.Constant(value=kind), *_]
                ):
                    found.add(str(kind))
    return found


def test_every_field_has_a_meaning(contract: Contract) -> None:
    assert list(contract.undescribed()) == []
    assert list(contract.unused()) == []


def test_what_does_not_fit_is_found(contract: Contract) -> None:
    wrong = {
        "api_version": "vfiomgr/v1",
        "kind": "HookOutcome",
        "state": "off",
        "changed": [1],
        "more": None,
    }
    assert sorted(contract.faults(wrong)) == [
        "HookOutcome.changed[]: 1 is not string",
        "HookOutcome.domains: documented, and not there",
        "HookOutcome.more: not documented",
        "HookOutcome.state: 'off' is not `enabled` or `disabled`",
    ]
    assert list(contract.faults({"kind": "Nothing"})) == ["Nothing: no such kind in documents.toml"]
