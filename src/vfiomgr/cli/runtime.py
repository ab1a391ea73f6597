"""`vfiomgr runtime …`: plain OCI runtimes in the configuration of container runtimes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import click

from vfiomgr import api
from vfiomgr.cli.runtime_entry import (
    at_place,
    carry_out,
    place_of,
    place_of_entry,
    place_options,
    require_program,
)
from vfiomgr.cli.session import Session, session_options
from vfiomgr.errors import UsageError
from vfiomgr.model.path import HostPath
from vfiomgr.model.runtime import Wish

if TYPE_CHECKING:
    from vfiomgr.model.runtime import ProgramName

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@click.group("runtime")
@session_options()
def runtime() -> None:
    """OCI runtimes below containerd, CRI-O or Docker, e.g. one that adds devices.

    \b
    Examples:
      vfiomgr runtime configure nvidia --path /usr/bin/nvidia-container-runtime
      vfiomgr runtime unconfigure nvidia
    """


@runtime.command("configure")
@click.argument("name")
@click.option(
    "--path", metavar="FILE", required=True, help="The OCI runtime, which is called as runc is."
)
@click.option(
    "--set-as-default",
    "--set-default",
    "set_default",
    is_flag=True,
    help="Make it the runtime of containers that name none.",
)
@click.option("--cdi", "enable_cdi", is_flag=True, help="Have CDI on as well.")
@place_options
@session_options()
@click.pass_obj
def configure(
    session: Session,
    *,
    name: str,
    path: str,
    set_default: bool,
    enable_cdi: bool,
    program: ProgramName | None,
    runtime_config: str | None,
    containerd_version: str | None,
) -> None:
    """Give a container runtime an entry for the OCI runtime at FILE, with the options of runc.

    All else stays as it is, comments and the order of keys too; a copy lies beside. Nothing is
    restarted.

    \b
    Examples:
      vfiomgr runtime configure nvidia --path /usr/bin/nvidia-container-runtime --dry-run
      vfiomgr runtime configure crun --path /usr/bin/crun --for docker
      vfiomgr runtime configure crun --path /usr/bin/crun --cdi --set-as-default
    """
    _require_name(name)
    place = place_of(session, program, runtime_config, containerd_version)
    if not path.startswith("/"):
        message = f"--path {path} is no absolute path"
        raise UsageError(message, "e.g. --path /usr/bin/crun")
    require_program(session, HostPath(path), "install it first, or name where it is with --path")
    wish = Wish(place.program, name, path, set_default=set_default, enable_cdi=enable_cdi)
    undo = f"vfiomgr runtime unconfigure {name}{at_place(session, program, runtime_config)}"
    carry_out(session, lambda: api.prepare_entry(session.files, place, wish, undo), undo)


@runtime.command("unconfigure")
@click.argument("name")
@place_options
@session_options()
@click.pass_obj
def unconfigure(
    session: Session,
    *,
    name: str,
    program: ProgramName | None,
    runtime_config: str | None,
    containerd_version: str | None,
) -> None:
    """Take back what `runtime configure` wrote; what was edited since is refused.

    \b
    Examples:
      vfiomgr runtime unconfigure crun --for docker
    """
    _require_name(name)
    place = place_of_entry(session, name, program, runtime_config, containerd_version)
    command = f"vfiomgr runtime unconfigure {name}{at_place(session, program, runtime_config)}"
    carry_out(session, lambda: api.prepare_removal(session.files, place, name, command))


def _require_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        message = f"{name!r} is no name for a runtime"
        raise UsageError(message, "take letters, digits, - and _, e.g. nvidia")
