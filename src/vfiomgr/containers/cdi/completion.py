"""Completion of CDI devices and their kinds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.cli.options import continuing, names_only
from vfiomgr.containers.cdi.document import read_file
from vfiomgr.containers.cdi.facts import read_cdi_files
from vfiomgr.snapshot.session import session_of

if TYPE_CHECKING:
    import click

    from vfiomgr.cli.options import Items


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
