"""The options that every command takes, and kinds of values that options and arguments take."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import click

from vfiomgr.paths import MACHINE

if TYPE_CHECKING:
    from collections.abc import Callable

_DAY = 86400


class WholeNumber(click.IntRange):
    """A whole number of a range."""

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
            self.fail(f"{value!r} is no whole number from {self.min} {upward}", param, ctx)


class Seconds(click.FloatRange):
    """A time to wait: above 0, and a day at most."""

    def __init__(self) -> None:
        super().__init__(min=0, min_open=True, max=_DAY)

    def convert(
        self,
        value: Any,  # noqa: ANN401 - as click has it
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> float:
        """Read a number, which may have a fraction."""
        try:
            seconds = super().convert(value, param, ctx)
        except click.BadParameter:
            seconds = math.nan
        if math.isnan(seconds):  # which is neither too small nor too large
            text = f"{value!r} is no number of seconds above 0, and up to {_DAY} (a day)"
            self.fail(text, param, ctx)
        return seconds


Format = Literal["table", "json", "yaml"]


@dataclass
class Options:
    """What these options say; those after a command override those before it."""

    format: Format = "table"
    root: str = MACHINE
    snapshot: str | None = None
    dry_run: bool = False
    deadline: float | None = None
    """Seconds for one step of a change; None for the usual one."""
    yes: bool = False
    verbose: int = 0
    debug: bool = False
    _typed: set[str] = field(default_factory=set, init=False, repr=False)
    """Options that stand in the command line, which counts more than the environment."""

    def remember(self, name: str, value: object, *, is_typed: bool) -> None:
        """Take the value of an option; of two hosts, the one that was typed."""
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


_OPTIONS: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    (
        ("--format",),
        {
            "type": click.Choice(["table", "json", "yaml"]),
            "help": "How to print data.  [default: table]",
        },
    ),
    (("--root",), {"metavar": "DIR", "help": "Read the host below DIR, e.g. a recorded one."}),
    (("--snapshot",), {"metavar": "FILE", "help": "Answer from `vfiomgr snapshot` output."}),
    (("--dry-run",), {"is_flag": True, "help": "Print the plan and change nothing."}),
    (
        ("--deadline",),
        {
            "type": Seconds(),
            "metavar": "SECONDS",
            "help": "How long one step may take, or libvirt to answer.  [default: 60, 30]",
        },
    ),
    (("--yes",), {"is_flag": True, "help": "Answer every question with yes."}),
    (
        ("-v", "--verbose"),
        {
            "count": True,
            "type": WholeNumber(min=0),
            "help": "Say what is being done; -vv for more.",
        },
    ),
    (("--debug",), {"is_flag": True, "help": "Show the traceback of an error."}),
)


def session_options(*, from_environment: bool = False) -> Callable[[Any], Any]:
    """Decorate a command with the options of a session; the outermost also reads VFIOMGR_…."""

    def decorate(function: Any) -> Any:  # noqa: ANN401 - click decorates untyped functions
        for names, settings in reversed(_OPTIONS):
            variable = f"VFIOMGR_{names[-1].lstrip('-').replace('-', '_').upper()}"
            function = click.option(
                *names,
                **settings,
                expose_value=False,
                callback=_remember,
                envvar=variable if from_environment else None,
            )(function)
        return function

    return decorate
