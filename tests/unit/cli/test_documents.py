"""Every command that a document names exists, with its options, and every link leads somewhere."""

from __future__ import annotations

import re
import shlex
import subprocess
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import click
import pytest

from vfiomgr.main.program import cli
from vfiomgr.messages.known import known_messages

if TYPE_CHECKING:
    from collections.abc import Iterator

CHECKOUT = Path(__file__).parents[3]
NOT_OF_TODAY = {"CHANGELOG.md"}
"""What names commands of earlier versions."""
PARTS = {"json_head.md"}
"""Beginnings of documents in other places."""
PLACES = ("*.md", "templates/**", "kata/**", "packaging/**", "docs/examples/**", "src/**/*.py")
_LINK = re.compile(r"(?<!\!)\[[^\]]*\]\(([^)\s]+)\)")
_SPAN = re.compile(r"`(vfiomgr [^`]+)`")
_LINE = re.compile(r"^(?: {4,}|\$ | +# )(?:sudo )?(vfiomgr [a-z-].*)$", re.MULTILINE)
_IN_SENTENCE = re.compile(r"vfiomgr (?:(?! and | or )[^.,;:()])+")
_FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
_PLACEHOLDER = re.compile(r"[A-Z…{<\[(|]|\.\.\.|$")


def tracked(*patterns: str) -> list[Path]:
    """The files of the repository."""
    globs = [f":(glob){pattern}" for p in patterns for pattern in (p, f"**/{p}")]
    listed = subprocess.run(
        ["/usr/bin/git", "ls-files", *globs], cwd=CHECKOUT, capture_output=True, check=True
    )
    return [CHECKOUT / name for name in listed.stdout.decode().splitlines()]


def commands_in(path: Path) -> Iterator[str]:
    """What is written as a command of vfiomgr: in backquotes, and as a line of its own."""
    text = path.read_text(errors="replace")
    for found in _SPAN.findall(text):
        yield " ".join(found.split())
    if path.suffix in (".md", ".yaml", ".yml", ".service", ".sh", ".conf"):
        yield from _LINE.findall(text)


def fault(text: str) -> str | None:
    """What is wrong with a command; None if it exists and has the options."""
    try:
        words = shlex.split(re.split(r"[|;>]|&&| # ", text)[0], comments=True)[1:]
    except ValueError:
        return None  # a part of a sentence with an apostrophe
    context = click.Context(cli, info_name="vfiomgr")
    for word in words:
        command = context.command
        if word in ("-", "--") or _PLACEHOLDER.match(word):
            if isinstance(command, click.Group):
                return None
        elif word.startswith("-"):
            if word.partition("=")[0].rstrip(",.") not in _options(context):
                return f"{context.command_path} has no option {word}"
        elif isinstance(command, click.Group):
            below = command.get_command(context, word.rstrip(",."))
            if below is None:
                if command.invoke_without_command or (context.parent is None and "=" in word):
                    return None
                previous = words[words.index(word) - 1]
                return None if previous.startswith("-") else f"no command {word!r} in {text!r}"
            context = click.Context(below, info_name=word, parent=context)
    return None


def _options(context: click.Context | None) -> set[str]:
    found = {"--help", "-h"}
    while context is not None:
        for parameter in context.command.params:
            found.update(parameter.opts, parameter.secondary_opts)
        context = context.parent
    return found


def test_every_command_in_a_document_exists() -> None:
    wrong = [
        f"{path.relative_to(CHECKOUT)}: {text}: {what}"
        for path in tracked(*PLACES)
        if path.name not in NOT_OF_TODAY and path.is_file()
        for text in commands_in(path)
        if (what := fault(text)) is not None
    ]
    assert wrong == []


def test_every_command_in_the_remedy_of_a_message_exists() -> None:
    wrong = [
        f"{each.name}: {what}"
        for each in known_messages()
        for text in _IN_SENTENCE.findall(f"{each.meaning} {each.remedy}")
        if (what := fault(text)) is not None
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "text",
    ["vfiomgr diff", "vfiomgr layout diff x", "vfiomgr bind 04:00.0 --al", "vfiomgr list --nosuch"],
)
def test_a_command_that_does_not_exist_is_found(text: str) -> None:
    assert fault(text) is not None


@cache
def anchors(path: Path) -> frozenset[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    text = _FENCE.sub("", path.read_text())
    found: list[str] = []
    for heading in re.findall(r"^#+ +(.+?) *$", text, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        found.append(slug if slug not in found else f"{slug}-{found.count(slug)}")
    found += re.findall(r"<a (?:id|name)=\"([^\"]+)\"", text)
    return frozenset(found)


def broken_links(path: Path) -> Iterator[str]:
    """Links of a document to a file or a heading that does not exist."""
    text = re.sub(r"`[^`\n]*`", "", _FENCE.sub("", path.read_text()))
    for link in _LINK.findall(text):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        if not target.exists():
            yield f"{path.relative_to(CHECKOUT)}: no file {link}"
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            yield f"{path.relative_to(CHECKOUT)}: no heading {link}"


def test_every_link_in_a_document_leads_somewhere() -> None:
    documents = [path for path in tracked("*.md") if path.name not in PARTS]
    assert [wrong for path in documents for wrong in broken_links(path)] == []


def test_a_link_that_leads_nowhere_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.unit.cli.test_documents.CHECKOUT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("# One `two`\n[a](#one-two) [b](#three) [c](other.md) `[d](none.md)`\n")
    assert list(broken_links(page)) == ["page.md: no heading #three", "page.md: no file other.md"]
