"""A pager, as git has it: for output that is longer than the screen of a person."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

_PAGER = "less"
_LESS = "FRX"
"""Of less: end where all fits on one screen, show colours, leave the text on the screen."""
_NOT_RUN = (126, 127)
"""What a shell answers where it cannot run a command."""


def page(text: str) -> bool:
    """Show a text in the pager of the user; False where there is none, and nothing was shown.

    VFIOMGR_PAGER takes precedence over PAGER. A shell runs it, as git's. `cat` or an empty value
    disables it. Quitting the pager early is no error.
    """
    command = _command()
    if command in ("", "cat"):
        return False
    import signal  # noqa: PLC0415 - slow, and only a long table on a terminal needs it
    import subprocess  # noqa: PLC0415

    variables = {"LESS": _LESS, "LV": "-c", **os.environ}
    pager = subprocess.Popen(["/bin/sh", "-c", command], stdin=subprocess.PIPE, env=variables)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the pager
    try:
        with suppress(BrokenPipeError):
            pager.communicate(text.encode(sys.stdout.encoding, "backslashreplace"))
        return pager.wait() not in _NOT_RUN
    finally:
        signal.signal(signal.SIGINT, before)


def _command() -> str:
    """The command line of the pager; empty where none is wanted, or none is there."""
    if os.environ.get("TERM", "dumb") == "dumb":
        return ""
    for name in ("VFIOMGR_PAGER", "PAGER"):
        if name in os.environ:
            return os.environ[name].strip()
    import shutil  # noqa: PLC0415 - slow, and only a long table on a terminal needs it

    return _PAGER if shutil.which(_PAGER) else ""
