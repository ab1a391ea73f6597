"""Command lines of ctr, nerdctl and Docker that run a container in Kata with devices.

docs/how-to and docs/install of Kata Containers; `ctr run --help`, `docker run --help`.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, Unpack

from vfiomgr.cli.keywords import Keywords, Option, fields_of
from vfiomgr.containers.oci import nodes as oci_nodes
from vfiomgr.containers.oci.nodes import NodeForm
from vfiomgr.diagnostic import refuse
from vfiomgr.documents.text import parse_json
from vfiomgr.errors import UsageError
from vfiomgr.guests.device import units_of as guest_devices
from vfiomgr.guests.model import HOST_FILE, DeviceRequest, GuestDevice
from vfiomgr.kata.explain import facts as gather
from vfiomgr.kata.explain.mediated import refuse_mediated
from vfiomgr.kata.facts import installation_of, kata_release, read_configuration, read_settings
from vfiomgr.kata.model import (
    CUDA_SAMPLE,
    DEFAULT_HANDLER,
    KataRelease,
    KataRuntime,
    KataVersion,
    handler_configuration,
    is_cdi_gpu,
    search_path,
)
from vfiomgr.passthrough.readiness_hints import tell_how_to_bind
from vfiomgr.paths import HostPath
from vfiomgr.units import Version
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.containers.runtimes.handlers import HandlerEntry
    from vfiomgr.kata.facts import KataSettings
    from vfiomgr.kata.model import KataInstallation, RuntimeName
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.source import HostSource


Tool = Literal["ctr", "nerdctl", "docker"]
SHIM = "io.containerd.kata.v2"
"""The name by which containerd finds containerd-shim-kata-v2 in its PATH."""
SHIM_PATH = "/opt/kata/bin/containerd-shim-kata-v2"
"""The directory of Kata's own packages."""
_OPT = "/opt/"
"""Shims below it are not in the PATH of a service."""
CONFIG_ANNOTATION = "io.katacontainers.config_path"
"""It overrides containerd's configuration and the environment (loadRuntimeConfig in create.go)."""
DOCKER_FILE = "/etc/docker/daemon.json"
_SINCE_DOCKER_26 = Version(3, 29)
_DOCKER_26_NEEDS = f"Kata {_SINCE_DOCKER_26.major}.{_SINCE_DOCKER_26.minor}"


class RunRequest(Value):
    """A container with devices."""

    tool: Tool
    name: str
    nodes: tuple[str, ...]
    image: str
    command: tuple[str, ...] = ()
    config: str | None = None
    """Kata's configuration; None for its default."""
    docker_runtime: str | None = None
    """The name of Kata in daemon.json; None without an entry."""
    release: KataRelease | None = None
    """None if unknown."""
    shim: str | None = None
    """The installed shim; None if none was found."""


class RunCommand(Value):
    """A command as its words, the commands to run before it, and notes."""

    words: tuple[str, ...]
    before: tuple[tuple[str, ...], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The command line, quoted for a shell."""
        return shlex.join(self.words)


def command_for(request: RunRequest) -> RunCommand:
    """The command for a tool.

    Raises:
        Refusal: this tool or this release of Kata does not support it.
    """
    _check_cdevs(request)
    match request.tool:
        case "ctr":
            return _ctr(request)
        case "nerdctl":
            return _nerdctl(request)
        case "docker":
            return _docker(request)


def _ctr(request: RunRequest) -> RunCommand:
    config = ("--runtime-config-path", request.config) if request.config else ()
    return RunCommand(
        (
            *("ctr", "run", "--rm", "--tty", "--runtime", _shim_name(request), *config),
            *(*_devices(request), request.image, request.name, *request.command),
        ),
        before=(("ctr", "image", "pull", request.image),),
        notes=(
            "ctr gives the container no network; add --cni if CNI is set up",
            *_shim_notes(request),
        ),
    )


def _nerdctl(request: RunRequest) -> RunCommand:
    config = ("--annotation", f"{CONFIG_ANNOTATION}={request.config}") if request.config else ()
    needs = ("the annotation needs nerdctl 2.0 or later",) if request.config else ()
    return RunCommand(
        (
            *("nerdctl", "run", "--rm", "--interactive", "--tty", "--name", request.name),
            *("--runtime", _shim_name(request), *config),
            *(*_devices(request), request.image, *request.command),
        ),
        notes=(*needs, *_shim_notes(request)),
    )


def _shim_name(request: RunRequest) -> str:
    """By name if it is in containerd's PATH or unknown, otherwise by path."""
    return request.shim if request.shim is not None and request.shim.startswith(_OPT) else SHIM


def _shim_notes(request: RunRequest) -> Iterator[str]:
    """https://github.com/containerd/containerd/pull/6206."""
    if _shim_name(request) != SHIM:
        yield (
            f"the shim is named by its path (containerd 1.6 and later), because {SHIM} in the "
            f"PATH of containerd would not find {request.shim}"
        )


def _docker(request: RunRequest) -> RunCommand:
    return RunCommand(
        (
            *("docker", "run", "--rm", "--interactive", "--tty", "--name", request.name),
            *("--runtime", request.docker_runtime or "kata"),
            *(*_devices(request), request.image, *request.command),
        ),
        notes=tuple(_docker_notes(request)),
    )


def _docker_notes(request: RunRequest) -> Iterator[str]:
    if request.docker_runtime is None:
        options = {"options": {"ConfigPath": request.config}} if request.config else {}
        entry = {"runtimes": {"kata": {"runtimeType": request.shim or SHIM_PATH, **options}}}
        yield f"needs Docker 23 or later, with this entry in {DOCKER_FILE}: {json.dumps(entry)}"
        command = "vfiomgr runtime install --kata --runtime docker"
        yield f"{command} writes such an entry, named kata-vfio"
    elif request.config:
        runtime = request.docker_runtime
        yield f"the configuration of {runtime} is set in {DOCKER_FILE}, not in the command"
    if request.release is None:
        yield f"Docker 26 and later need {_DOCKER_26_NEEDS} or later"
    elif request.release.version < _SINCE_DOCKER_26:
        yield (
            f"{request.release} has no network with Docker 26 and later, which need "
            f"{_DOCKER_26_NEEDS}: use Docker 25, or --with nerdctl"
        )


def _devices(request: RunRequest) -> Iterator[str]:
    for node in request.nodes:
        yield from ("--device", node)


def _check_cdevs(request: RunRequest) -> None:
    """Make sure that this Kata supports `/dev/vfio/devices/vfioN`."""
    release = request.release
    if release is None or not any("/devices/" in node for node in request.nodes):
        return
    if not release.takes_cdevs:
        message = (
            f"{release} does not support the VFIO character device (Go runtime 3.15, runtime-rs "
            "3.31)"
        )
        refuse("kata-no-cdevs", release, message, "use the group: --node group")


_PLAIN = "docker.io/library/ubuntu:24.04"


class KataRun(NamedTuple):
    """A command, and the facts that it was made from."""

    command: RunCommand
    devices: list[str]
    units: tuple[GuestDevice, ...]
    node: NodeForm
    waiting: tuple[PciDevice, ...]
    """Functions that are not available to guests yet."""
    runtime: RuntimeName | None
    config: str | None
    settings: KataSettings | None
    release: KataRelease | None = None
    """None if it is not known."""


class RunOptions(Keywords, total=False):
    """How a container is started; every option may be omitted."""

    tool: Annotated[
        Tool, Option("Use this tool to start the container.", flags=("--with",), default="ctr")
    ]
    version: KataVersion
    runtime: KataRuntime
    config: Annotated[
        str | None,
        Option(
            f"Use this Kata configuration.  [default: that of {DEFAULT_HANDLER}, if it exists]",
            metavar="FILE",
            complete=HOST_FILE,
        ),
    ]
    image: Annotated[
        str | None,
        Option(
            "Run this image.  [default: a CUDA sample for NVIDIA GPUs, else Ubuntu]",
            metavar="IMAGE",
        ),
    ]
    program: Annotated[
        str | None,
        Option(
            "Run this command in the container, quoted as in a shell.",
            flags=("--command",),
            metavar="TEXT",
        ),
    ]
    node: Annotated[
        NodeForm | None,
        Option(
            "Use /dev/vfio/N, or /dev/vfio/devices/vfioN (Linux 6.6; default on a kernel without "
            "VFIO groups)."
        ),
    ]
    only: Annotated[
        bool, Option("Leave the other functions of the slot out.", flags=("--function-only",))
    ]


def run_command(source: HostSource, *devices: str, **options: Unpack[RunOptions]) -> KataRun:
    """The command that starts a container in Kata with devices; `tell_of_run` prints its needs.

    `node` is by default `group`, and on a kernel without VFIO groups `cdev`.

    Raises:
        UsageError: an option is invalid.
        Refusal: a device cannot be assigned to a container, or the tool cannot start Kata.
    """
    fields = fields_of(RunOptions, options)
    tool, version, runtime = fields["tool"], fields.get("version"), fields.get("runtime")
    config, only = fields.get("config"), fields.get("only", False)
    installation = installation_of(source)
    is_known = bool(version or installation.version)
    release = kata_release(source, installation, version, runtime) if is_known else None
    entry = None if config or runtime else gather.installed_handler(source, DEFAULT_HANDLER)
    config = config or _handler_configuration(source, entry)
    wanted = release.runtime if release is not None else runtime
    settings = _configuration(source, wanted, config)
    host = source.scan_devices()
    units = guest_devices(host, [DeviceRequest(name, is_alone=only) for name in devices])
    for unit in units:
        refuse_mediated(host, unit.name)
    oci_nodes.refuse_noiommu(host, units)
    node = fields.get("node") or oci_nodes.usual_form(host)
    waiting = oci_nodes.waiting(host, units)
    if (node == "cdev" and waiting) or any(d.iommu_group is None for d in waiting):
        oci_nodes.refuse_unready(source.scan(), units)  # nobody knows the names of their nodes
    own = [path for unit in units for path in oci_nodes.device_nodes(unit, node)]
    has_gpu = any(is_cdi_gpu(function) for unit in units for function in unit.functions)
    found = command_for(
        RunRequest(
            tool=tool,
            # letters, digits, and single dots or hyphens between them
            name=f"kata-{re.sub('[^A-Za-z0-9.]+', '-', units[0].name)}",
            nodes=tuple(dict.fromkeys(own)),
            image=fields.get("image") or (CUDA_SAMPLE if has_gpu else _PLAIN),
            command=_words(fields.get("program")),
            config=config,
            docker_runtime=_docker_runtime(source) if tool == "docker" else None,
            release=release,
            shim=_shim(
                installation, entry, runtime or (settings and settings.stated_runtime) or wanted
            ),
        )
    )
    return KataRun(
        found,
        [unit.name for unit in units],
        units,
        node,
        waiting,
        wanted,
        config,
        settings,
        release,
    )


def tell_of_run(source: HostSource, ran: KataRun) -> None:
    """Note what else the command needs: a port, the driver, and the other devices of a group."""
    keys = "cold_plug_vfio" if ran.runtime == "rs" else "cold_plug_vfio or hot_plug_vfio"
    needed = f"a port for the device ({keys}); vfiomgr kata config prints it"
    has_keys = ran.release is None or ran.release.has_plug_keys
    if has_keys and ran.settings is None:
        source.on_note(f"{ran.config or 'the default configuration of Kata'} needs {needed}")
    elif has_keys and ran.settings is not None and not ran.settings.plugs_devices(ran.runtime):
        source.on_note(f"{ran.settings.path} lacks {needed}")
    if ran.node == "group":
        for line in oci_nodes.companion_notes(source.scan_devices(), ran.units):
            source.on_note(line)
    if ran.waiting:
        host = source.scan()
        tell_how_to_bind(source, host, [host.device(device.address) for device in ran.waiting])


def _configuration(
    source: HostSource, runtime: RuntimeName | None, config: str | None
) -> KataSettings | None:
    """The settings of Kata's configuration; None without a readable configuration."""
    usual = search_path(runtime) if runtime else (*search_path("rs"), *search_path("go"))
    places = usual if config is None else (HostPath(config),)
    known = (None if source.snapshot else read_configuration(source.tree, p) for p in places)
    file = next((file for file in known if file is not None), None)
    if file is None:
        return None
    return read_settings(file.path, file.text, file.drop_ins)


def _shim(
    installation: KataInstallation, entry: HandlerEntry | None, runtime: RuntimeName | None
) -> str | None:
    """The shim of a runtime; by default that of the handler, or the first installed one."""
    if entry is not None and entry.runtime_path:
        return entry.runtime_path
    shims = [shim for shim in installation.shims if runtime in (None, shim.runtime)]
    return next((shim.path for shim in (*shims, *installation.shims)), None)


def _words(program: str | None) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(program or ""))
    except ValueError as error:
        message = f"invalid command: --command {program}: {str(error).lower()}"
        raise UsageError(
            message, "quote it as in a shell, e.g. --command 'sh -c \"ls /dev\"'"
        ) from None


def _handler_configuration(source: HostSource, entry: HandlerEntry | None) -> str | None:
    """The configuration of vfiomgr's handler: named by an installed handler, or existing."""
    if entry is not None and entry.config_path:
        return entry.config_path
    path = handler_configuration(DEFAULT_HANDLER)
    is_there = source.snapshot is None and source.tree.exists(path)
    return str(path) if is_there else None


def _docker_runtime(source: HostSource) -> str | None:
    """The name in daemon.json of a runtime with Kata's shim; vfiomgr's handler first."""
    text = None if source.snapshot is not None else source.tree.read_text(HostPath(DOCKER_FILE))
    try:
        runtimes = parse_json(text or "{}").get("runtimes", {})
        found = [name for name, entry in runtimes.items() if "kata" in str(entry["runtimeType"])]
    except (ValueError, AttributeError, KeyError, TypeError):
        return None
    return DEFAULT_HANDLER if DEFAULT_HANDLER in found else next(iter(found), None)
