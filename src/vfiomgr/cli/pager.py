"""The pager of long tables: the user's, or a restricted `less` if privileges were gained.

A pager runs commands and opens files for the person at the terminal. If vfiomgr has privileges that
this person lacks (sudo), only `less` is used, since LESSSECURE denies it both (as in systemd's
src/shared/pager.c).
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress

from vfiomgr.host.programs import PROGRAM_PATH

_LESS = "less"
_OPTIONS = "FRX"
"""Options of less: quit if the text fits on one screen, show colours, do not clear the screen."""
_NOT_RUN = (126, 127)
"""Exit statuses of a shell that cannot run a command."""
GAINED = ("SUDO_COMMAND", "SUDO_GID", "SUDO_UID", "SUDO_USER", "PKEXEC_UID", "DOAS_USER")
"""Variables of sudo, run0, pkexec and doas."""
_KEPT = ("TERM", "LANG", "LC_ALL", "LC_CTYPE")
"""Variables that a restricted `less` keeps."""
LOGIN_USER = "/proc/self/loginuid"
"""The user who logged in, unchanged by su and sudo (fs/proc/base.c); -1 for services."""
_UNREADABLE = -1
_NOBODY = 0xFFFFFFFF


def page(text: str) -> bool:
    """Show a text in the pager of the user; False if no pager was started.

    VFIOMGR_PAGER takes precedence over PAGER. A shell runs it, as in git. `cat` or an empty value
    disables it. The user may quit the pager early.
    """
    found = _restricted(_wanted()) if has_gained_rights() else _of_user(_wanted())
    if found is None:
        return False
    command, variables = found
    pager = subprocess.Popen(command, stdin=subprocess.PIPE, env=variables)  # noqa: S603 - see above
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the pager
    try:
        with suppress(BrokenPipeError):
            pager.communicate(text.encode(sys.stdout.encoding, "backslashreplace"))
        return pager.wait() not in _NOT_RUN
    finally:
        signal.signal(signal.SIGINT, before)


def has_gained_rights() -> bool:
    """Whether this process has privileges that the person at the terminal may lack."""
    return (
        any(name in os.environ for name in GAINED)
        or os.getuid() != os.geteuid()
        or os.getgid() != os.getegid()
        or _login_user() not in (None, os.geteuid())
    )


def _login_user() -> int | None:
    """The user who logged in; None for services, or if the kernel does not record it."""
    try:
        with open(LOGIN_USER, encoding="ascii") as file:
            number = int(file.read(16))
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return _UNREADABLE
    return None if number == _NOBODY else number


def _wanted() -> str:
    """The command line of the pager; empty if it is disabled or not installed."""
    if os.environ.get("TERM", "dumb") == "dumb":
        return ""
    for name in ("VFIOMGR_PAGER", "PAGER"):
        if name in os.environ:
            return os.environ[name].strip()
    return _LESS if shutil.which(_LESS) else ""


def _of_user(wanted: str) -> tuple[list[str], dict[str, str]] | None:
    """The pager of the user, and its environment."""
    if wanted in ("", "cat"):
        return None
    return ["/bin/sh", "-c", wanted], {"LESS": _OPTIONS, "LV": "-c", **os.environ}


def _restricted(wanted: str) -> tuple[list[str], dict[str, str]] | None:
    """A `less` that cannot run commands or open files; None if the user chose another pager.

    BusyBox's `less` ignores LESSSECURE. LESSOPEN and LESSKEY name programs, so they are not passed.
    """
    path = shutil.which(_LESS, path=PROGRAM_PATH)
    is_less = os.path.basename(wanted.partition(" ")[0]) == _LESS
    if not is_less or path is None or os.path.basename(os.path.realpath(path)) != _LESS:
        return None
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    secure = {"LESS": _OPTIONS, "LESSSECURE": "1", "LESSHISTFILE": "-"}
    return [path], {**kept, "PATH": PROGRAM_PATH, **secure}
