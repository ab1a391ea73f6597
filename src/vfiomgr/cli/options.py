"""What commands are made of: shared options, types of values, and groups with lazy imports."""

from __future__ import annotations

import importlib
import math
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import click

from vfiomgr.cli.keywords import keywords_of
from vfiomgr.cli.output import say_text
from vfiomgr.paths import MACHINE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from click.shell_completion import CompletionItem

    from vfiomgr.cli.keywords import Keyword

    Items = list[CompletionItem[str]]
    Describe = Callable[[], str]
    Candidates = Iterable[tuple[str, Describe | None]]
    """Words, each with what says what it is."""

    from vfiomgr.diagnostic import Override


_DAY = 86400

if TYPE_CHECKING:
    WordChoice = click.Choice[str]
else:
    WordChoice = click.Choice
    """A class without parameters before click 8.2, e.g. in Debian 13."""


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
    from click.shell_completion import CompletionItem  # noqa: PLC0415 - for shells alone

    return [CompletionItem(incomplete, type="file")]


def complete_directory(
    _context: click.Context, _parameter: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    """Have the shell complete directories of this machine."""
    from click.shell_completion import CompletionItem  # noqa: PLC0415 - for shells alone

    return [CompletionItem(incomplete, type="dir")]


def flag(*names: str, text: str) -> Callable[[Any], Any]:
    """An option without a value."""
    return click.option(*names, is_flag=True, help=text)


def file_option(*names: str, text: str) -> Callable[[Any], Any]:
    """An option with a file of this machine."""
    return click.option(*names, metavar="FILE", shell_complete=complete_file, help=text)


def directory_option(*names: str, text: str) -> Callable[[Any], Any]:
    """An option with a directory of this machine."""
    return click.option(*names, metavar="DIR", shell_complete=complete_directory, help=text)


def continuing(
    context: click.Context, parameter: click.Parameter, incomplete: str, names: Candidates
) -> Items:
    """Those that continue what is typed, without those that an argument has already."""
    from click.shell_completion import CompletionItem  # noqa: PLC0415 - for shells alone

    typed = context.params.get(str(parameter.name)) or ()
    taken = frozenset(typed if isinstance(typed, tuple) else ())
    return [
        CompletionItem(name, describe=describe)
        for name, describe in dict(names).items()
        if name.startswith(incomplete) and name not in taken
    ]


def names_only(names: Iterable[str]) -> Iterator[tuple[str, None]]:
    """Candidates that say themselves what they are."""
    return ((name, None) for name in names)


Format = Literal["table", "json", "yaml"]


class Options:
    """The values of the shared options; an option after the command overrides one before it."""

    def __init__(self) -> None:
        self.format: Format = "table"
        self.root = MACHINE
        self.snapshot: str | None = None
        self.dry_run = False
        self.timeout: float | None = None
        """Seconds for one step of a change; None for the default."""
        self.yes = False
        self.verbose = 0
        self.debug = False
        self._typed: set[str] = set()
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


def with_options(command: Callable[..., Any], *options: Callable[[Any], Any]) -> Callable[..., Any]:
    """Decorate a command with options, which its help lists in this order."""
    for option in reversed(options):
        command = option(command)
    return command


def declared(declaration: type, *names: str) -> Callable[[Any], Any]:
    """Decorate a command with the options that the keywords of a TypedDict declare.

    With `names` only with these; the help lists them in the order of the declaration.
    """

    def decorate(command: Any) -> Any:  # noqa: ANN401 - click decorates untyped functions
        for name, keyword in reversed(list(keywords_of(declaration).items())):
            if name in names or (not names and keyword.is_for_commands):
                command = _declared_option(keyword)(command)
        return command

    return decorate


def _declared_option(keyword: Keyword) -> Callable[[Any], Any]:
    option, flags = keyword.option, keyword.option.flags or (keyword.flag,)
    settings: dict[str, Any] = {"help": option.help or None, "required": keyword.is_required}
    if keyword.kind is not bool:
        settings |= {"type": _declared_type(keyword), "metavar": option.metavar}
        settings["multiple"] = keyword.is_multiple
    elif keyword.is_optional:
        flags, settings["default"] = (f"{keyword.flag}/--no-{keyword.flag[2:]}",), None
    else:
        settings["is_flag"] = True
    if option.default is not None:
        settings |= {"default": option.default, "show_default": option.shows_default}
    if option.complete:
        settings["shell_complete"] = partial(_complete_as, option.complete)
    return click.option(*flags, keyword.name, **settings)


def _declared_type(keyword: Keyword) -> Any:  # noqa: ANN401 - a type of click, or None
    option = keyword.option
    if option.written:
        return _WrittenChoice(keyword.choices, dict(option.written))
    if keyword.choices:
        return click.Choice(keyword.choices, case_sensitive=not option.any_case)
    return WholeNumber(option.least, option.most) if keyword.kind is int else None


class _WrittenChoice(WordChoice):
    """Words, some of which a person writes in another way."""

    def __init__(self, words: Iterable[str], written: Mapping[str, str]) -> None:
        super().__init__([written.get(word, word) for word in words])
        self._words = {shown: word for word, shown in written.items()}

    def convert(
        self,
        value: Any,  # noqa: ANN401 - as click has it
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> str:
        """The word itself."""
        shown = super().convert(value, param, ctx)
        return self._words.get(shown, shown)


def _complete_as(
    place: str, context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[Any]:
    """What completes an option, imported for shells alone: `MODULE:FUNCTION` below vfiomgr."""
    module, _, name = place.partition(":")
    found: list[Any] = getattr(importlib.import_module(f"vfiomgr.{module}"), name)(
        context, parameter, incomplete
    )
    return found


def function_only_option(text: str) -> Callable[[Any], Any]:
    """The option that excludes the other functions of a slot; `text` is its help."""
    return flag("--function-only", "only", text=text)


def allow_option(
    *overrides: Override, text: str = "Override a safety check (the error message names it)."
) -> Callable[[Any], Any]:
    """The option that overrides safety checks; `text` is its help."""
    named = f"{text}  [{', '.join(overrides)}]"
    return click.option(
        "--allow", multiple=True, type=click.Choice(overrides), metavar="CHECK", help=named
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
                envvar=f"VFIOMGR_{name.upper()}" if from_environment else None,
            )(function)
        return function

    return decorate


_WIDTH = 100
"""Characters of a short help: shells cut it at the end of the line."""


def typed_options(names: Iterable[str]) -> list[str]:
    """The options on the command line, as help shows them, of parameters of the command."""
    context = click.get_current_context()
    typed = click.core.ParameterSource.COMMANDLINE
    return [
        max(option.opts, key=len)
        for option in context.command.params
        if option.name in set(names) and context.get_parameter_source(option.name) is typed
    ]


class LazyGroup(click.Group):
    """Finds its commands in a table; those in `unlisted`, for services and hooks, are not shown."""

    def __init__(
        self,
        *arguments: Any,  # noqa: ANN401 - click's own
        table: Mapping[str, tuple[str, str]],
        unlisted: Mapping[str, tuple[str, str]] | None = None,
        **settings: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(*arguments, **settings)
        self._table = dict(table)
        self._unlisted = dict(unlisted or {})

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The commands in the order of the table, the basic ones first."""
        return [*self._table, *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command with this name."""
        place = self._table.get(cmd_name) or self._unlisted.get(cmd_name)
        if place is None:
            return super().get_command(ctx, cmd_name)
        module, attribute = place
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)  # noqa: S101 - the tables are ours
        prepare(command)
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[str]]:
        """Its commands by name, then its options.

        A module is imported for the help of a command, so only where a shell shows it.
        """
        from click.shell_completion import CompletionItem  # noqa: PLC0415 - for shells alone

        hidden = {name for name, command in self.commands.items() if command.hidden}
        commands = [
            CompletionItem(name, describe=partial(self._short_help, ctx, name))
            for name in self.list_commands(ctx)
            if name.startswith(incomplete) and name not in hidden
        ]
        return commands + click.Command.shell_complete(self, ctx, incomplete)

    def _short_help(self, ctx: click.Context, name: str) -> str:
        command = self.get_command(ctx, name)
        return "" if command is None else command.get_short_help_str(_WIDTH)


_EPILOG = "Options of all commands (--root, --snapshot, -v, --debug): see vfiomgr --help"


def prepare(command: click.Command) -> None:
    """Have a command and those below it print their help, which refers to shared options.

    The help option of click itself looks for a translation, which takes two milliseconds.
    """
    if command.add_help_option:
        command.add_help_option = False
        command.params.append(_help_option())
    if isinstance(command, click.Group):
        for below in command.commands.values():
            prepare(below)
    else:
        command.epilog = command.epilog or _EPILOG


def _help_option() -> click.Option:
    return click.Option(
        ["-h", "--help"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_show_help,
        help="Show this message and exit.",
    )


def _show_help(context: click.Context, _parameter: click.Parameter, value: object) -> None:
    if value and not context.resilient_parsing:
        say_text(f"{context.get_help()}\n")
        context.exit()
