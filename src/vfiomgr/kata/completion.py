"""Completion of handlers of Kata, and of runtimes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.cli.options import continuing, names_only
from vfiomgr.kata.explain.facts import read_handlers
from vfiomgr.kata.model import CONFIGURATIONS, DEFAULT_HANDLER
from vfiomgr.snapshot.session import session_of

if TYPE_CHECKING:
    import click

    from vfiomgr.cli.options import Items


def complete_runtime(context: click.Context, parameter: click.Parameter, incomplete: str) -> Items:
    """Runtimes that containerd or CRI-O is configured with."""
    known = read_handlers(session_of(context).files, None).handlers
    names = names_only(entry.name for entry in known)
    return continuing(context, parameter, incomplete, names)


def complete_handler(context: click.Context, parameter: click.Parameter, incomplete: str) -> Items:
    """Handlers of Kata: those that are configured, and that of vfiomgr."""
    files = session_of(context).files
    known = (entry.name for entry in read_handlers(files, None).handlers if entry.is_kata)
    names = names_only((DEFAULT_HANDLER, *files.children(CONFIGURATIONS), *known))
    return continuing(context, parameter, incomplete, names)


def complete_entry(context: click.Context, parameter: click.Parameter, incomplete: str) -> Items:
    """Handlers of Kata after --kata, otherwise runtimes."""
    complete = complete_handler if context.params.get("is_kata") else complete_runtime
    return complete(context, parameter, incomplete)
