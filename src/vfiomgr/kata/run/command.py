"""The command that starts a container in Kata with host devices, for each supported tool.

docs/how-to and docs/install of Kata Containers; `ctr run --help`, `docker run --help`.
"""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Literal

from vfiomgr.diagnostic import blocker, refusal, refuse
from vfiomgr.kata.model import KataRelease
from vfiomgr.value import Value
from vfiomgr.version import Version

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.errors import Refusal


Tool = Literal["ctr", "nerdctl", "docker", "podman"]
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
        case "podman":
            raise _no_podman(request)


def _ctr(request: RunRequest) -> RunCommand:
    config = ("--runtime-config-path", request.config) if request.config else ()
    return RunCommand(
        (
            *("ctr", "run", "--rm", "--tty", "--runtime", _shim(request), *config),
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
            *(
                "--runtime",
                _shim(request),
                *config,
                *_devices(request),
                request.image,
                *request.command,
            ),
        ),
        notes=(*needs, *_shim_notes(request)),
    )


def _shim(request: RunRequest) -> str:
    """By name if it is in containerd's PATH or unknown, otherwise by path."""
    return request.shim if request.shim is not None and request.shim.startswith(_OPT) else SHIM


def _shim_notes(request: RunRequest) -> Iterator[str]:
    """https://github.com/containerd/containerd/pull/6206."""
    if _shim(request) != SHIM:
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
        yield f"Docker 26 and later need Kata {_short(_SINCE_DOCKER_26)} or later"
    elif request.release.version < _SINCE_DOCKER_26:
        yield (
            f"{request.release} has no network with Docker 26 and later, which need Kata "
            f"{_short(_SINCE_DOCKER_26)}: use Docker 25, or --with nerdctl"
        )


def _devices(request: RunRequest) -> Iterator[str]:
    for node in request.nodes:
        yield from ("--device", node)


def _check_cdevs(request: RunRequest) -> None:
    """Make sure that this Kata supports `/dev/vfio/devices/vfioN`.

    Raises:
        Refusal: a later release introduced it.

    """
    release = request.release
    if release is None or not any("/devices/" in node for node in request.nodes):
        return
    if not release.takes_cdevs:
        message = (
            f"{release} does not support the VFIO character device (Go runtime 3.15, runtime-rs "
            "3.31)"
        )
        refuse("kata-no-cdevs", release, message, "use the group: --node group")


def _no_podman(request: RunRequest) -> Refusal:
    """Refuse Podman: it runs OCI runtimes by their command line, which Kata lacks since 2.0."""
    devices = shlex.join(_devices(request))
    found = blocker(
        "kata-podman",
        "podman",
        "Podman cannot start Kata: it calls runtimes with the OCI command line (create, start), "
        "which Kata since 2.0, a containerd shim, does not have "
        "(kata-containers/kata-containers#722)",
        "use --with nerdctl (options like Podman's) or --with ctr (containerd only); without "
        f"Kata, podman run {devices} {request.image} gives the device nodes to a container on "
        "this kernel",
    )
    return refusal([found])


def _short(version: Version) -> str:
    return f"{version.major}.{version.minor}"
