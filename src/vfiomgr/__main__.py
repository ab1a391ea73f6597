"""The command vfiomgr, and `python -m vfiomgr`."""

from __future__ import annotations

import atexit
import os
import sys
from importlib import import_module

from vfiomgr.cli.garbage import collect_seldom

_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE", "PYTHONPLATLIBDIR", "PYTHONINSPECT")
"""Variables by which the caller can change which code runs."""
_TYPING = "typing_extensions"
_NO_PLUGINS = ("PYDANTIC_DISABLE_PLUGINS", "__all__")
"""Otherwise pydantic looks for them in each installed package, and runs their code."""


def start() -> None:
    """Run the command line; as root, isolated from the caller's Python environment.

    The process ends with it, at once, after the handlers of its end.
    """
    if _is_agent():
        _ignore_requests()
    if os.geteuid() == 0 and not sys.flags.isolated and _is_led() and not _needs_it():
        command = [sys.executable, "-I", "-m", "vfiomgr", *sys.argv[1:]]
        os.execv(sys.executable, command)  # noqa: S606 - the same command, isolated
    statuses: list[int] = []
    if not atexit._ncallbacks():  # noqa: SLF001 - what is registered first is called last
        atexit.register(_end_at_once, statuses)
    collect_seldom()
    os.environ.setdefault(*_NO_PLUGINS)
    _import_msgspec()
    try:
        import_module("vfiomgr.main.program").main()  # click is not imported before it is isolated
    except SystemExit as end:
        statuses += [end.code or 0] if isinstance(end.code, int | None) else []
        raise
    statuses.append(0)


def _is_agent() -> bool:
    """Whether the command is `node run`."""
    words = iter(sys.argv)
    return "node" in words and "run" in words  # in this order


def _ignore_requests() -> None:
    """Ignore SIGHUP until the agent handles it as a request for a scan."""
    import signal  # noqa: PLC0415 - slow, and other commands do not need it

    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def _import_msgspec() -> None:
    """Import msgspec without typing_extensions, which it can do without, and which takes 2 ms."""
    if _TYPING in sys.modules:
        return
    sys.modules[_TYPING] = None  # type: ignore[assignment]  # what looks for it does not find it
    try:
        import_module("msgspec")
    finally:
        del sys.modules[_TYPING]


def _end_at_once(statuses: list[int]) -> None:
    """End without freeing each object, which takes an eighth of a short command's time."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        return  # Python reports it
    if statuses:
        os._exit(statuses[0])


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
