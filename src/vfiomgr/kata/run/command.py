"""The command that starts a container in Kata with devices of the host, for each tool that can.

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
"""containerd looks for containerd-shim-kata-v2 in its PATH by this name."""
SHIM_PATH = "/opt/kata/bin/containerd-shim-kata-v2"
"""Where Kata's own packages put it."""
_OPT = "/opt/"
"""Below it no PATH of a service leads."""
CONFIG_ANNOTATION = "io.katacontainers.config_path"
"""Goes before what containerd and the environment say (loadRuntimeConfig in create.go)."""
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
    """Kata's configuration; None for the one that Kata finds by itself."""
    docker_runtime: str | None = None
    """What daemon.json calls Kata; None where it does not have it."""
    release: KataRelease | None = None
    """None where nobody knows it."""
    shim: str | None = None
    """The installed shim; None where none was found."""


class RunCommand(Value):
    """A command as its words, what is to be run before it, and what to know of it."""

    words: tuple[str, ...]
    before: tuple[tuple[str, ...], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """As a shell takes it."""
        return shlex.join(self.words)


def command_for(request: RunRequest) -> RunCommand:
    """The command for a tool.

    Raises:
        Refusal: it cannot be done with this tool, or with this release of Kata.

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
            "ctr gives the container no network; --cni does, where CNI is set up",
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
    """By name where containerd finds it in its PATH, or where nothing is known of it."""
    return request.shim if request.shim is not None and request.shim.startswith(_OPT) else SHIM


def _shim_notes(request: RunRequest) -> Iterator[str]:
    """https://github.com/containerd/containerd/pull/6206."""
    if _shim(request) != SHIM:
        yield (
            f"the shim is named by its path, as containerd takes it since 1.6: it would look for "
            f"{SHIM} in its PATH, where {request.shim} is not"
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
        yield f"Docker 23 or later, with this in {DOCKER_FILE}: {json.dumps(entry)}"
        yield "vfiomgr kata install --runtime docker writes such an entry, with the name kata-vfio"
    elif request.config:
        runtime = request.docker_runtime
        yield f"{DOCKER_FILE} says which configuration {runtime} has, not the command"
    if request.release is None:
        yield f"Docker 26 and later need Kata {_short(_SINCE_DOCKER_26)} or later"
    elif request.release.version < _SINCE_DOCKER_26:
        yield (
            f"{request.release} has no network with Docker 26 and later, which need Kata "
            f"{_short(_SINCE_DOCKER_26)}: take Docker 25, or --with nerdctl"
        )


def _devices(request: RunRequest) -> Iterator[str]:
    for node in request.nodes:
        yield from ("--device", node)


def _check_cdevs(request: RunRequest) -> None:
    """Whether this Kata takes `/dev/vfio/devices/vfioN`.

    Raises:
        Refusal: it came later.

    """
    release = request.release
    if release is None or not any("/devices/" in node for node in request.nodes):
        return
    if not release.takes_cdevs:
        message = f"{release} takes no cdev: that came with 3.15 in Go, with 3.31 as runtime-rs"
        refuse("kata-no-cdevs", release, message, "take the group: --node group")


def _no_podman(request: RunRequest) -> Refusal:
    """Podman runs OCI runtimes by their command line, which Kata has not had since 2.0."""
    devices = shlex.join(_devices(request))
    found = blocker(
        "kata-podman",
        "podman",
        "Podman starts no containers in Kata: it calls runtimes by the OCI command line (create, "
        "start), and Kata since 2.0 is a shim of containerd without one "
        "(kata-containers/kata-containers#722)",
        "--with nerdctl prints a command with options like Podman's, --with ctr one for containerd "
        f"alone; without Kata, podman run {devices} {request.image} gives the nodes to a container "
        "on this kernel",
    )
    return refusal([found])


def _short(version: Version) -> str:
    return f"{version.major}.{version.minor}"
