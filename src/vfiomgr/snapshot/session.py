"""The host that the options of a command select."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from shlex import quote
from typing import Any

import click

from vfiomgr.cli.options import Options
from vfiomgr.cli.output import note
from vfiomgr.snapshot.source import HostSource


class Session(Options, HostSource):
    """The options of a command, and the host that they select."""

    @property
    def is_live(self) -> bool:
        """Whether the host is the running one, not a recording."""
        return self.snapshot is None and self.tree.is_live

    def command(self, words: str) -> str:
        """Another command for the same host, with its options as they were typed."""
        options = {"snapshot": str(self.snapshot), "root": self.root}
        typed = (f"--{n} {quote(value)}" for n, value in options.items() if n in self._typed)
        return " ".join(("vfiomgr", *typed, words))

    def on_note(self, text: str) -> None:
        """Print a note to stderr."""
        note(text)


def session_of(context: click.Context) -> Session:
    """The session of a running command, or of one whose arguments are being completed."""
    session = Session()
    vars(session).update(vars(context.find_object(Options) or Options()))
    return session


def pass_session(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a command that takes the session as its first argument."""

    def with_session(*arguments: object, **options: object) -> object:
        return command(session_of(click.get_current_context()), *arguments, **options)

    return update_wrapper(with_session, command)
