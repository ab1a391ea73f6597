"""The command vfiomgr, and `python -m vfiomgr`."""

from __future__ import annotations

import os
import sys
from importlib import import_module

_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE", "PYTHONPLATLIBDIR", "PYTHONINSPECT")
"""Variables by which the caller can change which code runs."""


def start() -> None:
    """Run the command line; as root, isolated from the caller's Python environment."""
    if os.geteuid() == 0 and not sys.flags.isolated and _is_led() and not _needs_it():
        command = [sys.executable, "-I", "-m", "vfiomgr", *sys.argv[1:]]
        os.execv(sys.executable, command)  # noqa: S606 - the same command, isolated
    import_module("vfiomgr.cli.main").main()  # nothing of it is imported before it is isolated


def _is_led() -> bool:
    """Whether variables or user packages affect what is imported."""
    return any(name in os.environ for name in _VARIABLES) or bool(_user_packages())


def _user_packages() -> str:
    """The user's package directory, if Python searches it."""
    import site  # noqa: PLC0415 - Python has it already, but for -S

    place = site.getusersitepackages() if site.ENABLE_USER_SITE else ""
    return place if place in sys.path else ""


def _needs_it() -> bool:
    """Whether vfiomgr itself is installed there, so that root asked for it."""
    own = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    places = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return own in {os.path.abspath(place) for place in (*places, _user_packages()) if place}


if __name__ == "__main__":
    start()
