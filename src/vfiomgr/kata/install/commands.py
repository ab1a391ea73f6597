"""`vfiomgr kata install` and `uninstall`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from vfiomgr.cli.changes import host_of
from vfiomgr.cli.completion import complete_host_file
from vfiomgr.cli.container_completion import complete_handler
from vfiomgr.cli.options import FILES, session_options
from vfiomgr.cli.output import note
from vfiomgr.cli.session import Session, pass_session
from vfiomgr.containers.runtimes.commands import (
    at_place,
    carry_out,
    place_options,
)
from vfiomgr.containers.runtimes.model import RuntimeRequest
from vfiomgr.errors import UsageError
from vfiomgr.kata.handlers import configuration_of, shim_of
from vfiomgr.kata.manifests.model import is_label
from vfiomgr.kata.model import DEFAULT_HANDLER, handler_configuration
from vfiomgr.runtimes import (
    adding,
    locate,
    locate_entry,
    removing,
)

if TYPE_CHECKING:
    from vfiomgr.containers.runtimes.model import ProgramName


_handler_option = click.option(
    "--handler",
    default=DEFAULT_HANDLER,
    show_default=True,
    metavar="NAME",
    shell_complete=complete_handler,
    help="Use this name, to which a RuntimeClass refers.",
)


@click.command("install")
@_handler_option
@click.option(
    "--config",
    "config",
    metavar="FILE",
    shell_complete=complete_host_file,
    help="Use this Kata configuration.  [default: its own, else Kata's for GPUs]",
)
@click.option(
    "--runtime-path",
    metavar="FILE",
    shell_complete=complete_host_file,
    help="Use this Kata shim.  [default: the one for the configuration]",
)
@click.option("--set-default", is_flag=True, help="Make it the default runtime.")
@place_options
@session_options(*FILES)
@pass_session
def install(
    session: Session,
    *,
    handler: str,
    config: str | None,
    runtime_path: str | None,
    set_default: bool,
    program: ProgramName | None,
    runtime_config: str | None,
    containerd_version: str | None,
) -> None:
    """Install a Kata handler in a container runtime.

    The container runtime is containerd, CRI-O, Docker, k3s or rke2. If possible, it checks the new
    files before they are written; if it would read other settings differently, nothing is written.
    Everything else in the files stays, including comments, and a backup copy is kept beside them.
    Nothing is restarted.

    \b
    Examples:
      vfiomgr kata install --dry-run
      vfiomgr kata install
      vfiomgr kata install --handler kata-gpu --runtime crio
      vfiomgr kata install --config /etc/kata-containers/gpu.toml
      vfiomgr kata install --runtime-path /opt/kata/runtime-rs/bin/containerd-shim-kata-v2
      vfiomgr kata install --root /mnt/image --runtime containerd --containerd-version 2.1
    """
    _require_handler(handler)
    place = locate(
        session,
        program=program,
        runtime_config=runtime_config,
        containerd_version=containerd_version,
    )
    configuration = configuration_of(session, handler, config)
    request = RuntimeRequest(
        place.program,
        handler,
        shim_of(session, configuration, runtime_path),
        config_path=configuration,
        set_default=set_default,
        enable_cdi=True,
    )
    undo = _uninstalling(handler) + at_place(session, program, runtime_config)
    carry_out(session, adding(host_of(session), place, request, undo), undo)


@click.command("uninstall")
@_handler_option
@place_options
@session_options(*FILES)
@pass_session
def uninstall(
    session: Session,
    *,
    handler: str,
    program: ProgramName | None,
    runtime_config: str | None,
    containerd_version: str | None,
) -> None:
    """Remove a Kata handler that `kata install` added.

    An entry that was edited since is refused. If nothing else was changed, the original files are
    restored exactly. A configuration that `kata config --output` wrote for the handler stays.

    \b
    Examples:
      vfiomgr kata uninstall --dry-run
      vfiomgr kata uninstall --handler kata-gpu --runtime crio
    """
    _require_handler(handler)
    place = locate_entry(
        session,
        handler,
        program=program,
        runtime_config=runtime_config,
        containerd_version=containerd_version,
    )
    command = _uninstalling(handler) + at_place(session, program, runtime_config)
    carry_out(session, removing(host_of(session), place, handler, command, is_kata=True))
    _tell_of_configuration(session, handler)


def _tell_of_configuration(session: Session, handler: str) -> None:
    """Note the file of `kata config --output`: it belongs to the user, who may have edited it."""
    path = handler_configuration(handler)
    if session.files.exists(path):
        here = session.files.locate(path)
        note(f"the configuration of {handler} stays: {path}; remove it with: rm {here}")


def _uninstalling(handler: str) -> str:
    named = "" if handler == DEFAULT_HANDLER else f" --handler {handler}"
    return f"vfiomgr kata uninstall{named}"


def _require_handler(handler: str) -> None:
    """Check the name for a RuntimeClass: a DNS label (node.k8s.io/v1)."""
    if not is_label(handler):
        message = f"invalid handler name: --handler {handler!r}"
        raise UsageError(message, "use lower-case letters, digits and -, e.g. --handler kata-vfio")
