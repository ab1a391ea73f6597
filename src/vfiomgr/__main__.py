"""The command vfiomgr, and `python -m vfiomgr`."""

from __future__ import annotations

import os
import sys
from importlib import import_module

_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE", "PYTHONPLATLIBDIR", "PYTHONINSPECT")
"""Those by which the caller decides what code is run."""


def start() -> None:
    """Run the command line; as root without what the caller's environment adds to Python."""
    if os.geteuid() == 0 and not sys.flags.isolated and _is_led() and not _needs_it():
        command = [sys.executable, "-I", "-m", "vfiomgr", *sys.argv[1:]]
        os.execv(sys.executable, command)  # noqa: S606 - the same command, isolated
    import_module("vfiomgr.cli.main").main()  # nothing of it is imported before it is isolated


def _is_led() -> bool:
    """Whether variables or a user's own packages have a part in what is imported."""
    return any(name in os.environ for name in _VARIABLES) or bool(_user_packages())


def _user_packages() -> str:
    """The directory of packages below the home of the caller, where Python looks in it."""
    import site  # noqa: PLC0415 - Python has it already, but for -S

    place = site.getusersitepackages() if site.ENABLE_USER_SITE else ""
    return place if place in sys.path else ""


def _needs_it() -> bool:
    """Whether vfiomgr itself comes from there, so that it is what root asked for."""
    own = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    places = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return own in {os.path.abspath(place) for place in (*places, _user_packages()) if place}


if __name__ == "__main__":
    start()
