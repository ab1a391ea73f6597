"""`vfiomgr kata run-command`."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import click

from vfiomgr.cli.completion import complete_address, complete_host_file
from vfiomgr.cli.options import READING, function_only_option, session_options
from vfiomgr.cli.output import note, print_document, say_text
from vfiomgr.cli.session import Session, pass_session
from vfiomgr.kata.command_lines import run_command, tell_of_run
from vfiomgr.kata.commands import release_options
from vfiomgr.kata.model import DEFAULT_HANDLER, RuntimeName

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vfiomgr.containers.oci.model import NodeForm
    from vfiomgr.kata.run.command import RunCommand, Tool


@click.command("run-command")
@click.argument(
    "devices", nargs=-1, required=True, metavar="ADDRESS...", shell_complete=complete_address
)
@click.option(
    "--with",
    "tool",
    type=click.Choice(["ctr", "nerdctl", "docker", "podman"]),
    default="ctr",
    show_default=True,
    help="Use this tool to start the container.",
)
@release_options("--runtime")
@click.option(
    "--config",
    metavar="FILE",
    shell_complete=complete_host_file,
    help=f"Use this Kata configuration.  [default: that of {DEFAULT_HANDLER}, if it exists]",
)
@click.option(
    "--image",
    metavar="IMAGE",
    help="Run this image.  [default: a CUDA sample for NVIDIA GPUs, else Ubuntu]",
)
@click.option(
    "--command",
    "program",
    metavar="TEXT",
    help="Run this command in the container, quoted as in a shell.",
)
@click.option(
    "--node",
    type=click.Choice(["group", "cdev"]),
    default="group",
    show_default=True,
    help="Use /dev/vfio/N or /dev/vfio/devices/vfioN (Linux 6.6).",
)
@function_only_option("Leave the other functions of the slot out.")
@session_options(*READING)
@pass_session
def command(
    session: Session,
    *,
    devices: tuple[str, ...],
    tool: Tool,
    kata_version: str | None,
    runtime: RuntimeName | None,
    config: str | None,
    image: str | None,
    program: str | None,
    node: NodeForm,
    only: bool,
) -> None:
    """Print a command that runs a Kata container with devices.

    The command is printed on stdout, notes on stderr. Nothing is started. Podman cannot start Kata:
    with it the exit status is 4, and the message says what works instead.

    \b
    Examples:
      vfiomgr kata run-command 0000:04:00.0
      vfiomgr kata run-command 04:00.0 --with docker --kata-version 4.1
      vfiomgr kata run-command 04:00.0 --with nerdctl --image ubuntu --command 'lspci -nn'
      vfiomgr kata run-command 04:00.0 05:00.0 --config /etc/kata-containers/configuration.toml
      vfiomgr kata run-command 04:00.0 --node cdev --kata-runtime go --kata-version 3.20
    """
    ran = run_command(
        session,
        *devices,
        tool=tool,
        version=kata_version,
        runtime=runtime,
        config=config,
        image=image,
        program=program,
        node=node,
        only=only,
    )
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
