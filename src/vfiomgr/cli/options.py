"""The shared options of the commands, and the value types of options and arguments."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import click
from click.shell_completion import CompletionItem

from vfiomgr.paths import MACHINE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_DAY = 86400


class WholeNumber(click.IntRange):
    """A whole number in a range."""

    def convert(
        self,
        value: Any,  # noqa: ANN401 - as click has it
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> int:
        """Read the number."""
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter:
            upward = "up" if self.max is None else f"to {self.max}"
            self.fail(f"{value!r} is not a whole number from {self.min} {upward}", param, ctx)


class Seconds(click.FloatRange):
    """A time to wait: above 0 and at most one day."""

    def __init__(self) -> None:
        super().__init__(min=0, min_open=True, max=_DAY)

    def convert(
        self,
        value: Any,  # noqa: ANN401 - as click has it
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> float:
        """Read a number, possibly with a fraction."""
        try:
            seconds = super().convert(value, param, ctx)
        except click.BadParameter:
            seconds = math.nan
        if math.isnan(seconds):  # which is neither too small nor too large
            text = f"{value!r} is not a number of seconds above 0 and up to {_DAY} (one day)"
            self.fail(text, param, ctx)
        return seconds


def complete_file(
    _context: click.Context, _parameter: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    """Have the shell complete files of this machine."""
    return [CompletionItem(incomplete, type="file")]


def complete_directory(
    _context: click.Context, _parameter: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    """Have the shell complete directories of this machine."""
    return [CompletionItem(incomplete, type="dir")]


Format = Literal["table", "json", "yaml"]


@dataclass
class Options:
    """The values of the shared options; an option after the command overrides one before it."""

    format: Format = "table"
    root: str = MACHINE
    snapshot: str | None = None
    dry_run: bool = False
    timeout: float | None = None
    """Seconds for one step of a change; None for the default."""
    yes: bool = False
    verbose: int = 0
    debug: bool = False
    _typed: set[str] = field(default_factory=set, init=False, repr=False)
    """Options given on the command line, which take precedence over the environment."""

    def remember(self, name: str, value: object, *, is_typed: bool) -> None:
        """Store the value of an option; a typed --root or --snapshot replaces the other one."""
        setattr(self, name, value)
        if is_typed:
            self._typed.add(name)
        if "snapshot" in self._typed and "root" not in self._typed:
            self.root = MACHINE
        if "root" in self._typed and "snapshot" not in self._typed:
            self.snapshot = None


def _remember(context: click.Context, parameter: click.Parameter, value: object) -> None:
    options = context.ensure_object(Options)
    name = str(parameter.name)
    source = context.get_parameter_source(name)
    if source is not click.core.ParameterSource.DEFAULT:
        is_typed = source is click.core.ParameterSource.COMMANDLINE
        options.remember(name, value, is_typed=is_typed)


class RenamedOption(click.Option):
    """An option with former names (before 1.0), which are accepted but not shown."""

    def __init__(self, *arguments: Any, former: Sequence[str], **settings: Any) -> None:  # noqa: ANN401
        super().__init__(*arguments, **settings)
        self._former = former

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:  # noqa: ANN401 - click's own
        """Make the parser accept the former names too."""
        shown, self.opts = self.opts, [*self.opts, *self._former]
        super().add_to_parser(parser, ctx)
        self.opts = shown


def function_only_option(text: str) -> Callable[[Any], Any]:
    """The option that excludes the other functions of a slot; `text` is its help."""
    return click.option(
        "--function-only", "only", cls=RenamedOption, former=("--only",), is_flag=True, help=text
    )


_OPTIONS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "format": (
        ("--format",),
        {
            "type": click.Choice(["table", "json", "yaml"]),
            "help": "Output format.  [default: table]",
        },
    ),
    "root": (
        ("--root",),
        {
            "metavar": "DIR",
            "shell_complete": complete_directory,
            "help": "Use the host below DIR, e.g. a recorded host.",
        },
    ),
    "snapshot": (
        ("--snapshot",),
        {
            "metavar": "FILE",
            "shell_complete": complete_file,
            "help": "Use the host in FILE, the output of `vfiomgr snapshot`.",
        },
    ),
    "dry_run": (("--dry-run",), {"is_flag": True, "help": "Print the plan and change nothing."}),
    "timeout": (
        ("--timeout",),
        {
            "cls": RenamedOption,
            "former": ("--deadline",),
            "type": Seconds(),
            "metavar": "SECONDS",
            "help": "Time limit for one step or one libvirt call.  "
            "[default: 60 for a step, 30 for libvirt]",
        },
    ),
    "yes": (("--yes",), {"is_flag": True, "help": "Answer yes to all questions."}),
    "verbose": (
        ("-v", "--verbose"),
        {"count": True, "type": WholeNumber(min=0), "help": "Print each step as it begins."},
    ),
    "debug": (("--debug",), {"is_flag": True, "help": "Print the traceback of an error."}),
}
_GLOBAL = frozenset({"root", "snapshot", "verbose", "debug"})
READING = ("format", "root", "snapshot")
"""The options of commands that only read."""
CHANGING = (*READING, "dry_run", "timeout", "verbose")
"""The options of commands that change the host."""
FILES = ("format", "root", "dry_run", "verbose")
"""The options of commands that only change files."""


def session_options(*names: str, from_environment: bool = False) -> Callable[[Any], Any]:
    """Decorate a command with the named shared options; without names, with all of them.

    Only the help of vfiomgr itself shows --verbose, --debug and the options that select the host.

    With `from_environment` they can also be set as VFIOMGR_<OPTION>.
    """

    def decorate(function: Any) -> Any:  # noqa: ANN401 - click decorates untyped functions
        for name in reversed((*names, "debug") if names else tuple(_OPTIONS)):
            words, settings = _OPTIONS[name]
            function = click.option(
                *words,
                **settings,
                expose_value=False,
                callback=_remember,
                hidden=bool(names) and name in _GLOBAL,
                envvar=_variables(name) if from_environment else None,
            )(function)
        return function

    return decorate


def _variables(name: str) -> str | list[str]:
    variable = f"VFIOMGR_{name.upper()}"
    return [variable, "VFIOMGR_DEADLINE"] if name == "timeout" else variable
