"""What a reference page says of a command: all of it is what click prints for `--help`."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from vfiomgr.main.program import cli

if TYPE_CHECKING:
    from collections.abc import Iterator

_VERBATIM = "\b\n"
"""How a paragraph begins that click does not fill."""
_EXAMPLES = "Examples:\n"
_EXIT_STATUS = "Exit status: "


@dataclass(frozen=True)
class Paragraph:
    """A paragraph of a description."""

    text: str
    is_verbatim: bool = False
    """Whether its lines stay as they are."""


@dataclass(frozen=True)
class Entry:
    """An option, a command or a variable, and what it is for."""

    term: str
    text: str


@dataclass(frozen=True)
class Page:
    """A command."""

    path: tuple[str, ...]
    """Its words, e.g. `("vfiomgr", "libvirt", "hostdev")`."""
    usage: str
    summary: str
    description: tuple[Paragraph, ...]
    """The paragraphs after the summary, without examples and exit status."""
    options: tuple[Entry, ...]
    commands: tuple[Entry, ...]
    variables: tuple[Entry, ...]
    exit_status: str
    examples: str
    """Lines that can be pasted."""

    @property
    def name(self) -> str:
        """The name of its page, as git has it: `vfiomgr-libvirt-hostdev`."""
        return "-".join(self.path)

    @property
    def command(self) -> str:
        """What is typed: `vfiomgr libvirt hostdev`."""
        return " ".join(self.path)


def all_pages() -> Iterator[Page]:
    """The pages of all listed commands, parents first."""
    yield from _pages(_context(cli, "vfiomgr", None))


def _context(command: click.Command, name: str, parent: click.Context | None) -> click.Context:
    return click.Context(command, info_name=name, parent=parent, **command.context_settings)


def _pages(context: click.Context) -> Iterator[Page]:
    below = list(_commands_below(context))
    yield _page(context, below)
    for child in below:
        yield from _pages(child)


def _commands_below(context: click.Context) -> Iterator[click.Context]:
    group = context.command
    if not isinstance(group, click.Group):
        return
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if command is not None and not command.hidden:
            yield _context(command, name, context)


def _page(context: click.Context, below: list[click.Context]) -> Page:
    command = context.command
    summary, *others = _paragraphs(command)
    examples = [part for part in others if part.is_verbatim and part.text.startswith(_EXAMPLES)]
    statuses = [part for part in others if part.text.startswith(_EXIT_STATUS)]
    return Page(
        path=tuple(context.command_path.split()),
        usage=" ".join((context.command_path, *command.collect_usage_pieces(context))),
        summary=summary.text,
        description=tuple(part for part in others if part not in (*examples, *statuses)),
        options=tuple(_options(context)),
        commands=tuple(
            Entry(str(child.info_name), _paragraphs(child.command)[0].text) for child in below
        ),
        variables=tuple(_variables(context)),
        exit_status=" ".join(part.text.removeprefix(_EXIT_STATUS) for part in statuses),
        examples="\n".join(
            inspect.cleandoc(part.text.removeprefix(_EXAMPLES)) for part in examples
        ),
    )


def _paragraphs(command: click.Command) -> list[Paragraph]:
    text = inspect.cleandoc(command.help or "").partition("\f")[0]
    return [_paragraph(part) for part in text.split("\n\n") if part.strip()]


def _paragraph(text: str) -> Paragraph:
    text = text.strip("\n")
    if text.startswith(_VERBATIM):
        return Paragraph(text.removeprefix(_VERBATIM), is_verbatim=True)
    return Paragraph(" ".join(text.split()))


def _options(context: click.Context) -> Iterator[Entry]:
    for parameter in context.command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None and record[1]:  # an argument has its place in the usage alone
            yield Entry(*record)


def _variables(context: click.Context) -> Iterator[Entry]:
    """Environment variables by which options can be set."""
    for parameter in context.command.get_params(context):
        names = parameter.envvar or ()
        if names and parameter.get_help_record(context) is not None:
            first = names if isinstance(names, str) else next(iter(names))
            yield Entry(first, f"Sets {max(parameter.opts, key=len)}.")
