"""`vfiomgr kata install` and `uninstall`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from vfiomgr.cli.changes import host_of
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
    help="What a RuntimeClass names.",
)


@click.command("install")
@_handler_option
@click.option(
    "--config",
    "config",
    metavar="FILE",
    help="Kata's configuration for it.  [default: the handler's own, else Kata's for GPUs]",
)
@click.option(
    "--runtime-path",
    metavar="FILE",
    help="Kata's shim.  [default: the installed one that the configuration is for]",
)
@click.option("--set-default", is_flag=True, help="Make it the runtime of pods that name none.")
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
    """Give containerd, CRI-O, Docker, k3s or rke2 a handler for Kata with devices.

    Where the container runtime can be asked, it reads the files before they are written, and they
    are not if it would see anything else differently. All else in them stays as it is, comments
    too; a copy lies beside. Nothing is restarted.

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
    """Take back what `kata install` wrote, and nothing else; what was edited since is refused.

    Where nothing else was changed since, the files are as they were to the byte. A configuration
    that `kata config --output` wrote for the handler stays, and is named.

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
    carry_out(session, removing(host_of(session), place, handler, command))
    _tell_of_configuration(session, handler)


def _tell_of_configuration(session: Session, handler: str) -> None:
    """What `kata config --output` wrote is its user's, who may have edited it since."""
    path = handler_configuration(handler)
    if session.files.exists(path):
        here = session.files.locate(path)
        note(f"{path}, the configuration of {handler}, stays: remove it with: rm {here}")


def _uninstalling(handler: str) -> str:
    named = "" if handler == DEFAULT_HANDLER else f" --handler {handler}"
    return f"vfiomgr kata uninstall{named}"


def _require_handler(handler: str) -> None:
    """What a RuntimeClass may name: a label of DNS (node.k8s.io/v1)."""
    if not is_label(handler):
        message = f"--handler {handler!r}: no RuntimeClass can name that"
        raise UsageError(message, "take small letters, digits and -, e.g. --handler kata-vfio")
