"""What a shell typed, word by word, and candidates as bash takes them."""

from __future__ import annotations

import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from vfiomgr.main.program import cli
from vfiomgr.main.shells import Bash, Word, split_line

BREAKS = " \t\n\"'@><=;|&(:"
"""COMP_WORDBREAKS of bash, as it starts."""


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("vfiomgr ", ["vfiomgr", ""]),
        ("vfiomgr bind 0000:01", ["vfiomgr", "bind", "0000:01"]),
        ("vfiomgr 'a b' \"c $d\" e\\ f", ["vfiomgr", "a b", "c $d", "e f"]),
        ('vfiomgr "a\\"b\\x" \'a\\', ["vfiomgr", 'a"b\\x', "a\\"]),
        ("vfiomgr '", ["vfiomgr", ""]),
        ("vfiomgr x\\", ["vfiomgr", "x"]),
        ("vfiomgr ~/x a~ '~'/x", ["vfiomgr", "/home/me/x", "a~", "~/x"]),
        ("vfiomgr $HOME/x ${HOME} '$HOME' \"$HOME\" $NO$", None),
    ],
)
def test_a_line_is_split_as_a_shell_does(
    monkeypatch: pytest.MonkeyPatch, line: str, words: list[str] | None
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("NO", raising=False)
    expected = words or ["vfiomgr", "/home/me/x", "/home/me", "$HOME", "/home/me", "$NO$"]
    assert [word.text for word in split_line(line)] == expected


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("v 0000:01:0", Word("0000:01:0", kept=8)),
        ("v 0000:", Word("0000:", kept=5)),
        ("v --type=A40-", Word("--type=A40-", kept=7)),
        ("v '0000:01", Word("0000:01", kept=0, quote="'")),
        ('v a"b:c', Word("ab:c", kept=1, quote='"')),
        ('v "a:b"c', Word("a:bc", kept=0)),
        ("v a\\:b", Word("a:b", kept=0)),
        ("v a > b", Word("b", is_redirection=True)),
        ("v a 2>", Word("", is_redirection=True)),
    ],
)
def test_bash_keeps_what_stands_before_a_break_or_a_quote(line: str, word: Word) -> None:
    assert split_line(line, BREAKS)[-1] == word


def test_a_redirection_is_no_argument() -> None:
    words = split_line("vfiomgr 2>/dev/null list >> out <in &>all --f")
    assert [word.text for word in words if not word.is_redirection] == ["vfiomgr", "list", "--f"]


def _completed(line: str, value: str) -> str:
    """The line with a candidate in place of what bash replaces of its last word."""
    shell = Bash(cli, {}, "vfiomgr", "")
    shell._word = split_line(line, BREAKS)[-1]
    inserted = shell._inserted(value)
    typed = shell._word
    raw = len(line) if not typed.text[typed.kept :] else line.rindex(typed.text[typed.kept :])
    return line[:raw] + inserted + typed.quote


_NAMES = some.text(
    some.characters(blacklist_categories=("C", "Z"), whitelist_characters=" "), min_size=1
)


@pytest.mark.parametrize("opening", ["v ", "v '", 'v "', "v x:", "v --layout="])
@settings(max_examples=40, deadline=None)
@given(name=_NAMES)
def test_bash_reads_a_name_back_whatever_it_holds(opening: str, name: str) -> None:
    before = split_line(opening)[-1].text
    line = _completed(opening, before + name)
    if line != opening + split_line(opening)[-1].quote:  # what quotes cannot hold is left out
        command = ("bash", "-c", f"printf '%s\\n' {line.removeprefix('v ')}")
        read = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert read == f"{before}{name}\n"
    else:
        assert set(name) & set("'!")


def test_a_common_beginning_is_the_same_text_in_all_candidates() -> None:
    assert _completed("v a", "a b").startswith("v a")
    assert _completed("v a", "a$(x)") == "v a\\$\\(x\\)"
