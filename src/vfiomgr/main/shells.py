"""Completion in shells: the script that each of them reads, what it asks, and what it is answered.

A script passes the line up to the cursor (COMP_WORDS), which is split here: shells differ in how
they split it, and bash does so at the colons of addresses.
"""

from __future__ import annotations

import io
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any, ClassVar, NamedTuple

from click import Option
from click.shell_completion import (
    CompletionItem,
    ShellComplete,
    _resolve_context,
    add_completion_class,
)

from vfiomgr.errors import VfiomgrError
from vfiomgr.expressions import expression

_SCRIPTS = os.path.join(os.path.dirname(__file__), "scripts")
_PATIENCE = 5.0
"""Seconds that a person waits for an answer; a slow host has none."""
_ASSIGNMENT = expression(r"[A-Za-z_]\w*=")
_VARIABLE = expression(r"\$(?:(\w+)|\{(\w+)\})")
_UNSAFE = expression(r"[^\w@%+=:,./-]", re.ASCII)
"""What bash may act on outside of quotes; all that is not ASCII is taken as it is."""
_ESCAPED_IN_DOUBLE_QUOTES = '$`"\\'
_UNSAFE_IN_DOUBLE_QUOTES = expression(r"[$`\"\\]")


class Word(NamedTuple):
    """A word of a command line."""

    text: str
    """Without its quotes."""
    kept: int = 0
    """How many characters of the text bash does not replace: up to a word break, or a quote."""
    quote: str = ""
    """The quote that is still open at its end."""
    is_redirection: bool = False
    """Whether it is the file of a redirection."""


def split_line(line: str, breaks: str = "") -> list[Word]:
    """The words of a command line, quoted as in a shell; the last one is that at the cursor.

    Nothing is executed: of expansions only `~` and variables of the environment are followed.
    `breaks` are the characters at which bash breaks words (COMP_WORDBREAKS).
    """
    return _Splitter(line, breaks).words()


class _Splitter:
    def __init__(self, line: str, breaks: str) -> None:
        self._line = line
        self._breaks = breaks
        self._found: list[Word] = []
        self._is_redirected = False
        self._begin()

    def _begin(self) -> None:
        self._text: str = ""
        self._kept = self._kept_before = 0
        self._quote = ""
        self._is_word = False
        self._has_tilde = False

    def words(self) -> list[Word]:
        position = 0
        while position < len(self._line):
            position += self._take(position)
        self._end()
        if not self._is_word:
            self._found.append(Word("", is_redirection=self._is_redirected))
        return self._found

    def _take(self, position: int) -> int:
        """Take what begins at a position; how many characters that is."""
        one = self._line[position]
        if self._quote:
            return self._take_quoted(position, one)
        if one.isspace() or one in "<>":
            self._separate(one)
            return 1
        self._has_tilde = self._has_tilde or (one == "~" and not self._is_word)
        self._is_word = True
        if one in "'\"":
            self._open(one)
            return 1
        if one == "$":
            return self._take_variable(position)
        if one == "\\":
            self._text += self._line[position + 1 : position + 2]
            return 2
        self._text += one
        if one in self._breaks:
            self._kept = len(self._text)
        return 1

    def _take_quoted(self, position: int, one: str) -> int:
        if one == self._quote:
            self._quote = ""
            self._kept = self._kept_before
            return 1
        if self._quote == '"' and one == "$":
            return self._take_variable(position)
        following = self._line[position + 1 : position + 2]
        if self._quote == '"' and one == "\\" and following in _ESCAPED_IN_DOUBLE_QUOTES:
            self._text += following
            return 2
        self._text += one
        return 1

    def _open(self, quote: str) -> None:
        """Within open quotes bash replaces what follows the quote."""
        self._quote, self._kept_before = quote, self._kept
        self._kept = len(self._text)

    def _take_variable(self, position: int) -> int:
        variable = _VARIABLE.match(self._line, position)
        value = variable and os.environ.get(variable[1] or variable[2])
        taken = variable[0] if variable else "$"
        self._text += taken if value is None else value
        return len(taken)

    def _separate(self, one: str) -> None:
        """End a word; before `>` without a gap it is the number of a descriptor, or `&`."""
        is_redirection = not one.isspace()
        if not (is_redirection and (self._text.isdecimal() or self._text == "&")):
            self._end()
        self._begin()
        self._is_redirected = self._is_redirected or is_redirection

    def _end(self) -> None:
        if not self._is_word:
            return
        text = os.path.expanduser(self._text) if self._has_tilde else self._text
        self._found.append(Word(text, self._kept, self._quote, self._is_redirected))
        self._is_redirected = False


class _Late(BaseException):
    """Nobody waits any longer; a handler of errors must not take it for one."""


@contextmanager
def _limited() -> Iterator[None]:
    """End what takes too long."""
    import signal  # noqa: PLC0415 - slow to import, and each start imports this module

    def stop(_number: int, _frame: object) -> None:
        raise _Late

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, _PATIENCE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class _Shell(ShellComplete):
    """What the shells have in common: a line is completed in silence, or not at all."""

    _breaks: str = ""
    _shows_help: ClassVar[bool] = True
    _word = Word("")
    """The one at the cursor."""

    def source(self) -> str:
        """The script that a shell reads."""
        with open(f"{_SCRIPTS}/vfiomgr.{self.name}", encoding="utf-8") as script:
            return script.read()

    def get_completion_args(self) -> tuple[list[str], str]:
        """The words after the command, and the one at the cursor."""
        words = split_line(os.environ.get("COMP_WORDS", ""), self._breaks)
        self._word = words[-1]
        typed = [word.text for word in words[:-1] if not word.is_redirection]
        while typed and _ASSIGNMENT.match(typed[0]):
            typed.pop(0)
        return typed[1:], self._word.text

    def complete(self) -> str:
        """The answers; none where the host is wrong, missing or slow. Nothing goes to stderr."""
        arguments, incomplete = self.get_completion_args()
        items: list[CompletionItem[Any]] = []
        if self._word.is_redirection:
            return "file,"
        try:
            with redirect_stderr(io.StringIO()), warnings.catch_warnings(), _limited():
                warnings.simplefilter("ignore")
                items = self.get_completions(arguments, incomplete)
                return "\n".join(filter(None, map(self._line, items)))
        except (VfiomgrError, OSError, _Late):
            return ""

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem[Any]]:
        """The candidates; the value of an option is asked for as `--option=value`.

        Where a value is missing, click would leave arguments unread: the file of `--layout`.
        """
        if args and args[-1].startswith("-") and args[-1] != "--" and incomplete[:1] != "-":
            *before, option = args
            if not self._is_flag(before, option):
                args, incomplete = before, f"{option}={incomplete}"
        return super().get_completions(args, incomplete)

    def _is_flag(self, before: list[str], name: str) -> bool:
        """Whether an option takes no value."""
        context = _resolve_context(self.cli, dict(self.ctx_args), self.prog_name, list(before))
        return any(
            isinstance(option, Option) and (option.is_flag or option.count)
            for option in context.command.get_params(context)
            if name in (*option.opts, *option.secondary_opts)
        )

    def format_completion(self, item: CompletionItem[Any]) -> str:
        """One answer; empty for what the line cannot take."""
        return self._line(item)

    def _line(self, item: CompletionItem[Any]) -> str:
        if item.type != "plain":
            return f"{item.type},"
        value = str(item.value)
        is_option = self._word.text.startswith("-")
        if not value.isprintable() or (value.startswith("-") and not is_option):
            return ""
        text = self._inserted(self._before_value() + value)
        help_ = self._help(item) if self._shows_help else ""
        return f"plain,{text}\t{help_}".rstrip("\t") if text else ""

    def _before_value(self) -> str:
        """Of `--option=value` what click leaves out of the value."""
        name, sign, _ = self._word.text.partition("=")
        return name + sign if sign and name.startswith("-") else ""

    def _inserted(self, text: str) -> str:
        """A word as the shell takes it."""
        return text

    def _help(self, item: CompletionItem[Any]) -> str:
        text = item.help or (item.describe() if item.describe else "")
        return " ".join("".join(c if c.isprintable() else " " for c in text or "").split())


@add_completion_class
class Bash(_Shell):
    """bash, which inserts what it is given as it is."""

    name = "bash"
    _shows_help = False

    @property
    def _breaks(self) -> str:  # type: ignore[override]
        return os.environ.get("COMP_WORDBREAKS", "")

    def _inserted(self, text: str) -> str:
        """What follows the part that bash keeps, in the quotes that are open, or escaped."""
        word = self._word
        if not text.startswith(word.text[: word.kept]):
            return ""
        rest = text[word.kept :]
        if word.quote == "'":
            return "" if "'" in rest else rest
        if word.quote == '"':
            return "" if "!" in rest else _UNSAFE_IN_DOUBLE_QUOTES.sub(r"\\\g<0>", rest)
        return "".join(f"\\{c}" if c.isascii() and _UNSAFE.match(c) else c for c in rest)


@add_completion_class
class Zsh(_Shell):
    """zsh, which quotes by itself, and takes the values of options alone."""

    name = "zsh"

    def _before_value(self) -> str:
        return ""


@add_completion_class
class Fish(_Shell):
    """fish, which quotes by itself."""

    name = "fish"
