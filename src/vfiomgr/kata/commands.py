"""`vfiomgr kata …`, with `install`, `uninstall` and `run-command`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Unpack

import click

from vfiomgr.cli.options import FILES, READING, LazyGroup, declared, flag, session_options
from vfiomgr.cli.output import note, print_document, say_text
from vfiomgr.containers.runtimes.commands import at_place, carry_out, place_options
from vfiomgr.containers.runtimes.model import RuntimeRequest
from vfiomgr.containers.runtimes.named import (
    PlaceOptions,
    adding,
    configure,
    locate,
    locate_entry,
    removing,
    require_name,
)
from vfiomgr.engine.changes import host_of
from vfiomgr.errors import UsageError, forbid_alone
from vfiomgr.kata.command_lines import RunCommand, RunOptions, run_command, tell_of_run
from vfiomgr.kata.completion import complete_entry
from vfiomgr.kata.model import DEFAULT_HANDLER, handler_configuration
from vfiomgr.kata.named import configuration_of, require_handler, shim_of
from vfiomgr.snapshot.completion import complete_address, complete_host_file
from vfiomgr.snapshot.session import Session, pass_session

_COMMANDS = {
    "config": ("vfiomgr.kata.config_commands", "config"),
    "pod": ("vfiomgr.kata.pod_commands", "pod"),
    "run-command": ("vfiomgr.kata.commands", "command"),
}


@click.group("kata", cls=LazyGroup, table=_COMMANDS)
def kata() -> None:
    """Configure Kata, and write pods.

    `vfiomgr runtime install --kata` adds a handler for Kata to a container runtime.
    """


@click.command("install")
@click.argument("name", required=False, shell_complete=complete_entry)
@click.option(
    "--path",
    metavar="FILE",
    shell_complete=complete_host_file,
    help="Add this OCI runtime, which must be compatible with runc; with --kata, this shim.",
)
@flag(
    "--kata",
    "is_kata",
    text=f"Add a handler for Kata, to which a RuntimeClass refers.  [default: {DEFAULT_HANDLER}]",
)
@click.option(
    "--config",
    "config",
    metavar="FILE",
    shell_complete=complete_host_file,
    help="With --kata: use this configuration.  [default: its own, else Kata's for GPUs]",
)
@flag("--set-default", text="Make it the default runtime of containers.")
@flag("--cdi", "enable_cdi", text="Also enable CDI (implied by --kata).")
@place_options("the installed one")
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
        handler = name or DEFAULT_HANDLER
        _install_kata(session, handler, config, path, set_default=set_default, place=place)
        return
    if name is None or path is None:
        message = "missing argument: NAME" if name is None else "missing option: --path FILE"
        named = shlex.join(filter(None, (name, "--kata")))
        for_kata = f"for Kata: vfiomgr runtime install {named}"
        other = "for another runtime, e.g. vfiomgr runtime install crun --path /usr/bin/crun"
        raise UsageError(message, f"{for_kata}; {other}")
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
    require_handler(handler)
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
@flag("--kata", "is_kata", text=f"Remove a handler of Kata: NAME.  [default: {DEFAULT_HANDLER}]")
@place_options("the one with the entry")
@session_options(*FILES)
@pass_session
def uninstall(
    session: Session,
    *,
    name: str | None,
    is_kata: bool,
    **place: Unpack[PlaceOptions],
) -> None:
    """Remove a handler or a runtime that `runtime install` added.

    Without --runtime, the container runtime is the one in which vfiomgr recorded NAME. An entry
    that was edited since is refused. If nothing else was changed, the original files are restored
    exactly. A configuration that `kata config --output` wrote for the handler stays.

    \b
    Examples:
      vfiomgr runtime uninstall kata-vfio --dry-run
      vfiomgr runtime uninstall kata-gpu --runtime crio
      vfiomgr runtime uninstall crun --runtime docker
    """
    entry = name or (DEFAULT_HANDLER if is_kata else None)
    if entry is None:
        message = "missing argument: NAME"
        raise UsageError(message, f"e.g. vfiomgr runtime uninstall {DEFAULT_HANDLER}")
    if is_kata:
        require_handler(entry)
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
        here = shlex.quote(session.files.locate(path))
        note(f"the configuration of {handler} stays: {path}; remove it with: rm {here}")


def _uninstalling(session: Session, name: str, place: PlaceOptions) -> str:
    chosen = at_place(session, place.get("program"), place.get("runtime_config"))
    return f"vfiomgr runtime uninstall {shlex.quote(name)}{chosen}"


@click.command("run-command")
@click.argument(
    "devices", nargs=-1, required=True, metavar="ADDRESS...", shell_complete=complete_address
)
@declared(RunOptions)
@session_options(*READING)
@pass_session
def command(session: Session, *, devices: tuple[str, ...], **options: Unpack[RunOptions]) -> None:
    """Print a command that runs a Kata container with devices.

    The command is printed on stdout, notes on stderr. Nothing is started.

    \b
    Examples:
      vfiomgr kata run-command 0000:04:00.0
      vfiomgr kata run-command 04:00.0 --with docker --kata-version 4.1
      vfiomgr kata run-command 04:00.0 --with nerdctl --image ubuntu --command 'lspci -nn'
      vfiomgr kata run-command 04:00.0 05:00.0 --config /etc/kata-containers/configuration.toml
      vfiomgr kata run-command 04:00.0 --node cdev --kata-runtime go --kata-version 3.20
    """
    ran = run_command(session, *devices, **options)
    _print(session, ran.command, ran.devices)
    tell_of_run(session, ran)


def _print(session: Session, found: RunCommand, devices: Sequence[str]) -> None:
    if session.format == "table":
        say_text(f"{found.text}\n")
        for words in found.before:
            note(f"run first: {shlex.join(words)}")
        for line in found.notes:
            note(line)
        return
    body = {
        "devices": devices,
        "command": found.words,
        "text": found.text,
        "before": found.before,
        "notes": found.notes,
    }
    print_document("KataRunCommand", body, session.format)
