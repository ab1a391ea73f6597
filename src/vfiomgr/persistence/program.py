"""How a unit, a hook or a rule runs this vfiomgr: isolated, from where only root may write."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import vfiomgr
from vfiomgr.diagnostic import refuse
from vfiomgr.host.tree import HostTree
from vfiomgr.host.trust import weakness
from vfiomgr.persistence.facts import has_systemd
from vfiomgr.persistence.model import require_plain

if TYPE_CHECKING:
    from vfiomgr.snapshot.source import HostSource

_MODULE = ("-I", "-m", "vfiomgr")
_ASK = "import json, sys, vfiomgr; print(json.dumps([vfiomgr.__file__, sys.prefix, sys.path]))"
_SECONDS = 30


def program_for_units(host: HostSource) -> str | None:
    """As `own_program`; None where no systemd runs the host, so that no unit is written."""
    return own_program() if has_systemd(host.files) else None


def own_program() -> str | None:
    """The words that run this vfiomgr isolated; None where it is not installed.

    Raises:
        Refusal: others than root could have the service run something else.

    """
    places = _isolated_places() if _is_command() else None
    if places is None:
        return None
    machine = HostTree("/")
    for place in (sys.executable, os.path.dirname(sys.executable), *places):
        why = weakness(machine, place)
        if why:
            message = f"cannot have root run {sys.executable} by itself: {why}"
            remedy = "install vfiomgr into /opt/vfiomgr as README.md says, and run that command"
            refuse("program-not-trusted", sys.executable, message, remedy)
    return " ".join((require_plain(sys.executable), *_MODULE))


def _is_command() -> bool:
    """Whether it runs as the command vfiomgr, or isolated already."""
    name = sys.argv[0]
    is_named = os.path.basename(name) == "vfiomgr" and shutil.which(name) is not None
    return is_named or bool(sys.flags.isolated)


def _isolated_places() -> list[str] | None:
    """Directories that Python reads when it runs this vfiomgr isolated; None where it cannot."""
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
