"""What of a host, beside Kata's own files, decides how a device reaches a pod."""

from __future__ import annotations

import fnmatch
import re
from typing import TYPE_CHECKING

from vfiomgr.host.kata import runtime_at
from vfiomgr.model.path import HostPath

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.host.tree import HostTree
    from vfiomgr.model.kata import RuntimeName

CONTAINERD_DROP_INS = HostPath("/etc/containerd/conf.d")
CRIO_DROP_INS = HostPath("/etc/crio/crio.conf.d")
KUBELET = HostPath("/var/lib/kubelet/config.yaml")
_UNITS = tuple(
    HostPath(directory)
    for directory in ("/etc/systemd/system", "/run/systemd/system", "/usr/lib/systemd/system")
)
_SERVICES = {"containerd": ("containerd", "k3s", "rke2-server", "rke2-agent"), "crio": ("crio",)}
_SHIM_DIRECTORIES = tuple(
    HostPath(directory)
    for directory in ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin")
)
_MOST = 1 << 20
_SCRIPT = "#!"
_CONFIGURATION = re.compile(r"\bKATA_CONF_FILE=[\"']?([^\s\"'\x00]+)")
"""As a script exports it, or a unit's Environment= has it."""


def texts_below(
    tree: HostTree, directory: HostPath, pattern: str = "*"
) -> Iterator[tuple[str, str]]:
    """The files of a directory whose names fit, in the order of their names."""
    for name in sorted(tree.children(directory)):
        path = directory / name
        text = tree.read_text(path, _MOST) if fnmatch.fnmatchcase(name, pattern) else None
        if text is not None:
            yield path, text


def kata_conf_file(tree: HostTree, runtime: str, program: str) -> tuple[str, str] | None:
    """What KATA_CONF_FILE is for a shim, and where that is said: a script around it, or a unit.

    A program without a path is looked for where containerd would find it.
    """
    for path, text in (*_programs(tree, program), *_units(tree, runtime)):
        said = _CONFIGURATION.search(text)
        if said is not None:
            return said[1], path
    return None


def has_program(tree: HostTree, program: str) -> bool:
    """Whether a program is there: where its path says, or where containerd would find its name."""
    return any(tree.resolve(path) is not None for path in _places(program))


def runtime_of(tree: HostTree, program: str) -> RuntimeName | None:
    """Whose shim a program is; None for one that nobody knows."""
    found = (runtime_at(tree, path) for path in _places(program))
    return next((name for name in found if name is not None), None)


def _places(program: str) -> list[HostPath]:
    if program.startswith("/"):
        return [HostPath(program)]
    is_name = bool(program) and "/" not in program
    return [place / program for place in _SHIM_DIRECTORIES if is_name]


def _programs(tree: HostTree, program: str) -> Iterator[tuple[str, str]]:
    """The program, where it is a script."""
    for path in _places(program):
        text = tree.read_text(path, _MOST)
        if text is not None and text.startswith(_SCRIPT):
            yield path, text


def _units(tree: HostTree, runtime: str) -> Iterator[tuple[str, str]]:
    for service in _SERVICES[runtime]:
        for directory in _UNITS:
            yield from texts_below(tree, directory, f"{service}.service")
            yield from texts_below(tree, directory / f"{service}.service.d", "*.conf")
