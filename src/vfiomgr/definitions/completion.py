"""Completion of defined vGPUs."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from vfiomgr.definitions.facts import read_definitions
from vfiomgr.snapshot.completion import complete_addresses, devices_of
from vfiomgr.snapshot.session import session_of
from vfiomgr.vgpu.completion import complete_vgpu

if TYPE_CHECKING:
    import click

    from vfiomgr.cli.options import Describe, Items


def complete_definition(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> Items:
    """Defined vGPUs: UUIDs, and addresses of virtual functions."""
    session = session_of(context)
    if session.snapshot is not None:
        defined = devices_of(session).defined
    else:
        defined = read_definitions(session.tree, ())
    names: dict[str, Describe | None] = {
        vgpu.uuid: partial(str, f"{vgpu.type_id} on {vgpu.parent}") for vgpu in defined.vgpus
    }
    for gpu in defined.gpus:
        names |= {str(one.address): partial(str, one) for one in gpu.vgpus}
    return complete_addresses(context, parameter, incomplete, names)


def complete_defined_or_active(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> Items:
    """Active and defined vGPUs."""
    active = complete_vgpu(context, parameter, incomplete)
    listed = {item.value for item in active}
    defined = complete_definition(context, parameter, incomplete)
    return [*active, *(item for item in defined if item.value not in listed)]
