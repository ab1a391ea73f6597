"""Completion of what container runtimes and CDI specifications have."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.cli.candidates import continuing, names_only
from vfiomgr.cli.session import session_of
from vfiomgr.containers.cdi.document import read_file
from vfiomgr.containers.cdi.facts import read_cdi_files
from vfiomgr.kata.explain.facts import read_handlers
from vfiomgr.kata.model import CONFIGURATIONS, DEFAULT_HANDLER

if TYPE_CHECKING:
    import click

    from vfiomgr.cli.candidates import Items


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


def complete_cdi_device(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> Items:
    """CDI devices: VENDOR/CLASS=NAME, or as far as one is typed the name alone."""
    found = [
        (specification.qualified(device), device.name)
        for specification in map(read_file, read_cdi_files(session_of(context).files))
        for device in specification.devices
    ]
    return continuing(
        context, parameter, incomplete, names_only(whole for whole, _ in found)
    ) or continuing(context, parameter, incomplete, names_only(name for _, name in found))


def complete_cdi_kind(context: click.Context, parameter: click.Parameter, incomplete: str) -> Items:
    """Kinds of the CDI devices that there are."""
    kinds = (read_file(file).kind for file in read_cdi_files(session_of(context).files))
    return continuing(context, parameter, incomplete, names_only(filter(None, kinds)))
