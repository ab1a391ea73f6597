"""`vfiomgr vgpu create` and `vfiomgr vgpu remove`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Unpack

import click

from vfiomgr.cli.options import CHANGING, allow_option, declared, flag, session_options
from vfiomgr.cli.output import note, say
from vfiomgr.engine.changes import plan_or_apply, print_outcome
from vfiomgr.snapshot.session import Session, pass_session
from vfiomgr.vgpu.completion import complete_parent, complete_vgpu
from vfiomgr.vgpu.named import CreateVgpu, RemoveVgpu, VgpuOptions, VgpuOutcome, created, removed

if TYPE_CHECKING:
    from vfiomgr.diagnostic import Override


def parent_option(text: str) -> Callable[[Any], Any]:
    """The option that names a parent of vGPUs; `text` is its help."""
    return click.option("--parent", metavar="DEVICE", shell_complete=complete_parent, help=text)


@click.command("create")
@click.argument("uuid", required=False)
@declared(VgpuOptions)
@session_options(*CHANGING)
@pass_session
def create(session: Session, **options: Unpack[VgpuOptions]) -> None:
    """Create vGPUs and print their names.

    The names are UUIDs, or addresses of virtual functions. Name the type, or describe it: the
    smallest matching type is used. Without --parent vfiomgr selects the GPU: --strategy pack
    prefers a GPU with vGPUs of this size, then the GPU that wastes the least memory, and keeps
    unused GPUs free. On a GPU in MIG mode, missing GPU instances are created.

    \b
    Examples:
      vfiomgr vgpu create --type A10-4Q
      vfiomgr vgpu create --type nvidia-754 --parent 0000:08:00.4
      vfiomgr vgpu create --framebuffer 6G --series Q --heads 2 --count 4
      vfiomgr vgpu create --type A100-1-5C --count 2 --dry-run
      vfiomgr vgpu create --parent mtty --type mtty-2 --dry-run
    """
    request = CreateVgpu(**options).request(session)
    outcome = plan_or_apply(session, request)
    if outcome is not None:
        _print_created(session, created(request, outcome))


def _print_created(session: Session, outcome: VgpuOutcome) -> None:
    """Print only the names on standard output, for scripts."""
    if session.format != "table":
        print_outcome(session, outcome, [], vgpus=outcome.names)
        return
    for text in (*outcome.plan.notes, *outcome.plan.already):
        note(text if outcome.is_changed else f"{text}: nothing to do")
    for name in outcome.names:
        say(name)


@click.command("remove")
@click.argument("name", nargs=-1, shell_complete=complete_vgpu)
@flag("--all", "every", text="Remove all vGPUs created by vfiomgr.")
@parent_option("With --all: only vGPUs of this device.")
@allow_option("in-use", text="Try even if a guest uses the vGPU (see --timeout).")
@session_options(*CHANGING)
@pass_session
def remove(
    session: Session,
    *,
    name: tuple[str, ...],
    every: bool,
    parent: str | None,
    allow: tuple[Override, ...],
) -> None:
    """Remove vGPUs by UUID or virtual function address.

    A vGPU that a guest uses is refused.

    \b
    Examples:
      vfiomgr vgpu remove f715f63c-0d00-4007-9c5a-b07b0c6c05de
      vfiomgr vgpu remove 0000:41:00.4
      vfiomgr vgpu remove --all --parent 0000:41:00.0
    """
    request = RemoveVgpu(*name, every=every, parent=parent, allow=allow)
    done = plan_or_apply(session, request)
    if done is not None:
        outcome = removed(done)
        lines = [f"removed {text}" for text in outcome.names]
        print_outcome(session, outcome, lines, vgpus=outcome.names)
