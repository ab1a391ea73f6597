"""Real programs that are shown a host in a directory: of this machine, and of later Debians."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache
from typing import TYPE_CHECKING

from tests import debian
from tests.debian import Program
from vfiomgr.host.programs import ProgramAnswer
from vfiomgr.host.tree import HostTree

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

HERE = "installed"
"""The program of this machine, which tests/lab/packages.txt and tools/packages-dev.txt name."""
_SECONDS = 60.0
_DOCKER = "docker.io"
"""Depends on containerd: both are fetched together."""


@cache
def containerd(release: str) -> Program:
    """Containerd of a Debian release."""
    if release == HERE:
        path = shutil.which("containerd") or "containerd"
        version = run((path, "--version")).output.split()[2]
        return Program(release, "containerd", version, (path,))
    return debian.program(release, "containerd", "usr/bin/containerd", within=_DOCKER)


@cache
def dockerd(release: str) -> Program:
    """Docker of a Debian release."""
    return debian.program(release, _DOCKER, "usr/sbin/dockerd")


def ask(program: Program, *arguments: str) -> ProgramAnswer:
    """Run a program with arguments."""
    return run((*program.command, *arguments), program.directories)


def run(command: Sequence[str], directories: Iterable[str] = ()) -> ProgramAnswer:
    """Run a program in `/`, as services are; what it runs is looked for in directories first."""
    answer = subprocess.run(
        command,
        env=os.environ | {"PATH": os.pathsep.join((*directories, os.environ["PATH"]))},
        cwd="/",
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=_SECONDS,
    )
    return ProgramAnswer(answer.returncode, answer.stdout, answer.stderr)


class Machine(HostTree):
    """A host in a directory, which real programs are shown.

    A link in it leads from the directory's own path to itself: there, a path names the same file
    for the host and for a program of this machine.
    """

    def __init__(self, root: Path, *programs: Program) -> None:
        super().__init__(root)
        self._programs = {program.name: program for program in programs}
        itself = f"{self.root}{self.root}"
        if not os.path.lexists(itself):
            os.makedirs(os.path.dirname(itself), exist_ok=True)
            os.symlink(os.path.relpath(self.root, os.path.dirname(itself)), itself)

    @property
    def runs_programs(self) -> bool:
        """Its programs are shown files at their real places."""
        return True

    def ask(self, command: Sequence[str], seconds: float = _SECONDS) -> ProgramAnswer | None:
        """Have one of its programs run."""
        del seconds  # a machine that runs tests may be busy
        program = self._programs.get(command[0])
        if program is None:
            return None
        return ask(program, *command[1:])
