"""The command with which units, hooks and rules run vfiomgr: isolated, writable only by root."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import vfiomgr
from vfiomgr.diagnostic import refuse
from vfiomgr.host.owners import weakness
from vfiomgr.host.tree import HostTree
from vfiomgr.persistence.facts import has_systemd
from vfiomgr.persistence.model import require_plain

if TYPE_CHECKING:
    from vfiomgr.snapshot.source import HostSource

_MODULE = ("-I", "-m", "vfiomgr")
_ASK = "import json, sys, vfiomgr; print(json.dumps([vfiomgr.__file__, sys.prefix, sys.path]))"
_SECONDS = 30


def program_for_units(host: HostSource) -> str | None:
    """Return `own_program`; None without systemd, as no unit is written then."""
    return own_program() if has_systemd(host.files) else None


def own_program() -> str | None:
    """The command that runs this vfiomgr isolated; None if it is not installed.

    Raises:
        Refusal: users other than root could replace the program.

    """
    places = _isolated_places() if _is_command() else None
    if places is None:
        return None
    machine = HostTree("/")
    for place in (sys.executable, os.path.dirname(sys.executable), *places):
        why = weakness(machine, place)
        if why:
            message = f"cannot run {sys.executable} as a root service: {why}"
            remedy = "install vfiomgr in /opt/vfiomgr (see README.md), and run that command"
            refuse("program-not-trusted", sys.executable, message, remedy)
    return " ".join((require_plain(sys.executable), *_MODULE))


def _is_command() -> bool:
    """Whether it runs as the command vfiomgr, or already isolated."""
    name = sys.argv[0]
    is_named = os.path.basename(name) == "vfiomgr" and shutil.which(name) is not None
    return is_named or bool(sys.flags.isolated)


def _isolated_places() -> list[str] | None:
    """The directories that Python reads in isolated mode; None if vfiomgr cannot run that way."""
    command = [sys.executable, "-I", "-c", _ASK]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=_SECONDS, cwd="/"
        )
    except (OSError, subprocess.SubprocessError):
        return None
    file, prefix, searched = json.loads(answer.stdout)
    if file != vfiomgr.__file__:
        return None
    return [prefix, os.path.dirname(file), *searched]
