"""`vfiomgr kata run-command`."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

import click

from vfiomgr.cli.output import note, print_document, say_text
from vfiomgr.cli.session import Session, complete_address, session_options
from vfiomgr.containers.oci import plan as oci_plan
from vfiomgr.containers.oci.commands import tell_who_comes_along
from vfiomgr.documents.parsed import parse_json
from vfiomgr.errors import UsageError
from vfiomgr.kata.commands import release_options
from vfiomgr.kata.explain.facts import installed_handler
from vfiomgr.kata.explain.image import refuse_mediated
from vfiomgr.kata.facts import installation_of, kata_release, read_configuration
from vfiomgr.kata.model import (
    DEFAULT_HANDLER,
    RuntimeName,
    handler_configuration,
    is_cdi_gpu,
    search_path,
)
from vfiomgr.kata.run.command import DOCKER_FILE, RunRequest, Tool, run_command
from vfiomgr.kata.settings import read_settings
from vfiomgr.passthrough.readiness_hints import tell_how_to_bind
from vfiomgr.paths import HostPath
from vfiomgr.vgpu.guest_device import DeviceRequest, units_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vfiomgr.containers.oci.model import NodeForm
    from vfiomgr.containers.runtimes.handlers import HandlerEntry
    from vfiomgr.kata.model import KataInstallation
    from vfiomgr.kata.run.command import RunCommand
    from vfiomgr.kata.settings import KataSettings
    from vfiomgr.vgpu.guest_device import GuestDevice

_CUDA_SAMPLE = "nvcr.io/nvidia/k8s/cuda-sample:vectoradd-cuda12.5.0-ubuntu22.04"
_PLAIN = "docker.io/library/ubuntu:24.04"


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
    help="What starts the container.",
)
@release_options
@click.option(
    "--config",
    metavar="FILE",
    help=f"Kata's configuration.  [default: that of {DEFAULT_HANDLER}, where there is one]",
)
@click.option(
    "--image", metavar="IMAGE", help="[default: a CUDA sample for NVIDIA's GPUs, else Ubuntu]"
)
@click.option("--command", "program", metavar="TEXT", help="What runs in it, as a shell has it.")
@click.option(
    "--node",
    type=click.Choice(["group", "cdev"]),
    default="group",
    show_default=True,
    help="/dev/vfio/N, or /dev/vfio/devices/vfioN (Linux 6.6).",
)
@click.option("--only", is_flag=True, help="Leave the other functions of the slot out.")
@session_options()
@click.pass_obj
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
    """Print the command that starts a container in Kata with these devices.

    The command is on stdout, what is to be known of it on stderr. Nothing is started. Podman cannot
    start Kata: for it the answer is why, and what works instead, with exit status 4.

    \b
    Examples:
      vfiomgr kata run-command 0000:04:00.0
      vfiomgr kata run-command 04:00.0 --with docker --kata-version 4.1
      vfiomgr kata run-command 04:00.0 --with nerdctl --image ubuntu --command 'lspci -nn'
      vfiomgr kata run-command 04:00.0 05:00.0 --config /etc/kata-containers/configuration.toml
      vfiomgr kata run-command 04:00.0 --node cdev --only --runtime go --kata-version 3.20
    """
    installation = installation_of(session)
    is_known = bool(kata_version or installation.version)
    release = kata_release(session, installation, kata_version, runtime) if is_known else None
    entry = None if config or runtime else installed_handler(session, DEFAULT_HANDLER)
    config = config or _handler_configuration(session, entry)
    wanted = release.runtime if release is not None else runtime
    settings = _configuration(session, wanted, config)
    host = session.scan_devices()
    units = units_of(host, [DeviceRequest(name, is_alone=only) for name in devices])
    for unit in units:
        refuse_mediated(host, unit.name)
    oci_plan.refuse_noiommu(host, units)
    waiting = oci_plan.waiting(host, units)
    if node == "cdev" and waiting:
        oci_plan.refuse_unready(session.scan(), units)
    own = [path for unit in units for path in oci_plan.device_nodes(unit, node)]
    found = run_command(
        RunRequest(
            tool=tool,
            name=_container_name(units[0]),
            nodes=tuple(dict.fromkeys(own)),
            image=image or _usual_image(units),
            command=_words(program),
            config=config,
            docker_runtime=_docker_runtime(session) if tool == "docker" else None,
            release=release,
            shim=_shim(
                installation, entry, runtime or (settings and settings.stated_runtime) or wanted
            ),
        )
    )
    _print(session, found, [unit.name for unit in units])
    _tell_of_ports(wanted, config, settings)
    if node == "group":
        tell_who_comes_along(host, units)
    if waiting:
        around = session.scan()
        tell_how_to_bind(session, around, [around.device(device.address) for device in waiting])


def _print(session: Session, found: RunCommand, devices: Sequence[str]) -> None:
    if session.format == "table":
        say_text(f"{found.text}\n")
        for words in found.before:
            note(f"before it: {shlex.join(words)}")
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


def _configuration(
    session: Session, runtime: RuntimeName | None, config: str | None
) -> KataSettings | None:
    """What Kata's configuration says; None where there is none to read.

    Raises:
        InvalidDocument: it is no TOML.

    """
    usual = search_path(runtime) if runtime else (*search_path("rs"), *search_path("go"))
    places = usual if config is None else (HostPath(config),)
    known = (None if session.snapshot else read_configuration(session.tree, p) for p in places)
    file = next((file for file in known if file is not None), None)
    if file is None:
        return None
    return read_settings(file.path, file.text, file.drop_ins)


def _tell_of_ports(
    runtime: RuntimeName | None, config: str | None, settings: KataSettings | None
) -> None:
    """A guest has the device only where Kata's configuration has a port for it."""
    keys = "cold_plug_vfio" if runtime == "rs" else "cold_plug_vfio or hot_plug_vfio"
    needed = f"a port for the device ({keys}): vfiomgr kata config prints that"
    if settings is None:
        note(f"{config or 'the configuration that Kata finds by itself'} needs {needed}")
    elif not settings.plugs_devices(runtime):
        note(f"{settings.path} lacks {needed}")


def _shim(
    installation: KataInstallation, entry: HandlerEntry | None, runtime: RuntimeName | None
) -> str | None:
    """The shim of a runtime; where none is told that of the handler, or the first that is there."""
    if entry is not None and entry.runtime_path:
        return entry.runtime_path
    shims = [shim for shim in installation.shims if runtime in (None, shim.runtime)]
    return next((shim.path for shim in (*shims, *installation.shims)), None)


def _words(program: str | None) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(program or ""))
    except ValueError as error:
        message = f"--command {program}: {str(error).lower()}"
        raise UsageError(
            message, "quote it as in a shell, e.g. --command 'sh -c \"ls /dev\"'"
        ) from None


def _container_name(unit: GuestDevice) -> str:
    """As containerd takes it: letters, digits, and single dots or hyphens between them."""
    return f"kata-{re.sub('[^A-Za-z0-9.]+', '-', unit.name)}"


def _usual_image(units: Sequence[GuestDevice]) -> str:
    """What shows that it works."""
    functions = (function for unit in units for function in unit.functions)
    return _CUDA_SAMPLE if any(map(is_cdi_gpu, functions)) else _PLAIN


def _handler_configuration(session: Session, entry: HandlerEntry | None) -> str | None:
    """The configuration of vfiomgr's handler: what is installed names it, or it is there."""
    if entry is not None and entry.config_path:
        return entry.config_path
    path = handler_configuration(DEFAULT_HANDLER)
    is_there = session.snapshot is None and session.tree.exists(path)
    return str(path) if is_there else None


def _docker_runtime(session: Session) -> str | None:
    """What daemon.json calls a runtime that is Kata's shim; vfiomgr's handler before others."""
    text = None if session.snapshot is not None else session.tree.read_text(HostPath(DOCKER_FILE))
    try:
        runtimes = parse_json(text or "{}").get("runtimes", {})
        found = [name for name, entry in runtimes.items() if "kata" in str(entry["runtimeType"])]
    except (ValueError, AttributeError, KeyError, TypeError):
        return None
    return DEFAULT_HANDLER if DEFAULT_HANDLER in found else next(iter(found), None)
