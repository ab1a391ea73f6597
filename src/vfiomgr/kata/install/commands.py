"""`vfiomgr runtime install` and `uninstall`, of Kata and of other OCI runtimes."""

from __future__ import annotations

from typing import Unpack

import click

from vfiomgr.cli.changes import host_of
from vfiomgr.cli.completion import complete_host_file
from vfiomgr.cli.container_completion import complete_entry
from vfiomgr.cli.options import FILES, RenamedOption, session_options
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
    PlaceOptions,
    adding,
    configure,
    locate,
    locate_entry,
    removing,
    require_name,
)
from vfiomgr.usage import forbid_alone

_former_handler = click.option(
    "--handler", "former_handler", metavar="NAME", hidden=True, shell_complete=complete_entry
)


@click.command("install")
@click.argument("name", required=False, shell_complete=complete_entry)
@click.option(
    "--path",
    cls=RenamedOption,
    former=("--runtime-path",),
    metavar="FILE",
    shell_complete=complete_host_file,
    help="Add this OCI runtime, which must be compatible with runc; with --kata, this shim.",
)
@click.option(
    "--kata",
    "is_kata",
    is_flag=True,
    help=f"Add a handler for Kata, to which a RuntimeClass refers.  [default: {DEFAULT_HANDLER}]",
)
@click.option(
    "--config",
    "config",
    metavar="FILE",
    shell_complete=complete_host_file,
    help="With --kata: use this configuration.  [default: its own, else Kata's for GPUs]",
)
@click.option(
    "--set-default",
    cls=RenamedOption,
    former=("--set-as-default",),
    is_flag=True,
    help="Make it the default runtime of containers.",
)
@click.option("--cdi", "enable_cdi", is_flag=True, help="Also enable CDI (implied by --kata).")
@_former_handler
@place_options
@session_options(*FILES)
@pass_session
def install(
    session: Session,
    *,
    name: str | None,
    path: str | None,
    is_kata: bool,
    config: str | None,
    set_default: bool,
    enable_cdi: bool,
    former_handler: str | None,
    **place: Unpack[PlaceOptions],
) -> None:
    """Install Kata or an OCI runtime in a container runtime.

    The container runtime is containerd, CRI-O, Docker, k3s or rke2. With --kata a handler NAME for
    Kata is added, otherwise an entry NAME for the OCI runtime at --path, with the options of runc.
    If possible, the container runtime checks the new files before they are written; if it would
    read other settings differently, nothing is written. Everything else in the files stays,
    including comments, and a backup copy is kept beside them. Nothing is restarted.

    \b
    Examples:
      vfiomgr runtime install --kata --dry-run
      vfiomgr runtime install --kata
      vfiomgr runtime install kata-gpu --kata --runtime crio
      vfiomgr runtime install --kata --config /etc/kata-containers/gpu.toml
      vfiomgr runtime install --kata --path /opt/kata/runtime-rs/bin/containerd-shim-kata-v2
      vfiomgr runtime install --kata --root /mnt/image --runtime containerd --containerd-version 2.1
      vfiomgr runtime install nvidia --path /usr/bin/nvidia-container-runtime --dry-run
      vfiomgr runtime install crun --path /usr/bin/crun --cdi --set-default
    """
    if is_kata:
        handler = former_handler or name or DEFAULT_HANDLER
        _install_kata(session, handler, config, path, set_default=set_default, place=place)
        return
    if name is None or path is None:
        message = "missing argument: NAME" if name is None else "missing option: --path FILE"
        raise UsageError(message, "e.g. vfiomgr runtime install crun --path /usr/bin/crun")
    if config is not None:
        forbid_alone("--config", "--kata", "other runtimes have no configuration here")
    undo = _uninstalling(session, name, place)
    change = configure(
        host_of(session), name, path, set_default=set_default, cdi=enable_cdi, undo=undo, **place
    )
    carry_out(session, change, undo)


def _install_kata(
    session: Session,
    handler: str,
    config: str | None,
    path: str | None,
    *,
    set_default: bool,
    place: PlaceOptions,
) -> None:
    """Add a handler for Kata."""
    _require_handler(handler)
    found = locate(session, **place)
    configuration = configuration_of(session, handler, config)
    request = RuntimeRequest(
        found.program,
        handler,
        shim_of(session, configuration, path),
        config_path=configuration,
        set_default=set_default,
        enable_cdi=True,
    )
    undo = _uninstalling(session, handler, place)
    carry_out(session, adding(host_of(session), found, request, undo), undo)


@click.command("uninstall")
@click.argument("name", required=False, shell_complete=complete_entry)
@click.option(
    "--kata", "is_kata", is_flag=True, help=f"A handler of Kata: {DEFAULT_HANDLER} or NAME."
)
@_former_handler
@place_options
@session_options(*FILES)
@pass_session
def uninstall(
    session: Session,
    *,
    name: str | None,
    is_kata: bool,
    former_handler: str | None,
    **place: Unpack[PlaceOptions],
) -> None:
    """Remove an entry that `runtime install` added.

    An entry that was edited since is refused. If nothing else was changed, the original files are
    restored exactly. A configuration that `kata config --output` wrote for the handler stays.

    \b
    Examples:
      vfiomgr runtime uninstall --kata --dry-run
      vfiomgr runtime uninstall kata-gpu --runtime crio
      vfiomgr runtime uninstall crun --runtime docker
    """
    entry = former_handler or name or (DEFAULT_HANDLER if is_kata else None)
    if entry is None:
        message = "missing argument: NAME"
        raise UsageError(message, "e.g. vfiomgr runtime uninstall crun")
    if is_kata:
        _require_handler(entry)
    require_name(entry)
    found = locate_entry(session, entry, **place)
    command = _uninstalling(session, entry, place)
    kind = True if is_kata else None
    carry_out(session, removing(host_of(session), found, entry, command, is_kata=kind))
    _tell_of_configuration(session, entry)


def _tell_of_configuration(session: Session, handler: str) -> None:
    """Note the file of `kata config --output`: it belongs to the user, who may have edited it."""
    path = handler_configuration(handler)
    if session.files.exists(path):
        here = session.files.locate(path)
        note(f"the configuration of {handler} stays: {path}; remove it with: rm {here}")


def _uninstalling(session: Session, name: str, place: PlaceOptions) -> str:
    chosen = at_place(session, place.get("program"), place.get("runtime_config"))
    return f"vfiomgr runtime uninstall {name}{chosen}"


def _require_handler(handler: str) -> None:
    """Check the name for a RuntimeClass: a DNS label (node.k8s.io/v1)."""
    if not is_label(handler):
        message = f"invalid handler name: {handler!r}"
        raise UsageError(message, "use lower-case letters, digits and -, e.g. kata-vfio")
