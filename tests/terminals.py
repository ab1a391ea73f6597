"""Real terminals of any size: what a program shows on a pty."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
import threading
from typing import TYPE_CHECKING, Self

from vfiomgr.cli.pager import GAINED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_STYLE = re.compile(r"\x1b\[[0-9;]*m")
_CHUNK = 1 << 16
_OF_USERS = ("COLUMNS", "LINES", "PAGER", "LESS", "VFIOMGR_PAGER", *GAINED)


class Terminal:
    """A terminal of a size, open in a block; `text` is what it showed in the end, without styles.

    `device` is the descriptor that programs write to.
    """

    def __init__(self, columns: int, lines: int = 50) -> None:
        self.text = ""
        self._screen, self.device = pty.openpty()
        size = struct.pack("HHHH", lines, columns, 0, 0)
        fcntl.ioctl(self.device, termios.TIOCSWINSZ, size)
        self._reader = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Self:
        """Read what is written."""
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Wait until everybody has closed it."""
        os.close(self.device)
        self._reader.join()
        os.close(self._screen)

    def _read(self) -> None:
        parts: list[bytes] = []
        while True:
            try:
                part = os.read(self._screen, _CHUNK)
            except OSError:  # nobody has the other side open
                break
            parts.append(part)
        self.text = _STYLE.sub("", b"".join(parts).decode().replace("\r\n", "\n"))


def shown_on_terminal(
    command: Sequence[str],
    *,
    columns: int,
    lines: int = 50,
    variables: Mapping[str, str] | None = None,
    has_keyboard: bool = True,
) -> tuple[int, str]:
    """The exit status of a program on a terminal of its own, and what it shows there."""
    environment = {key: value for key, value in os.environ.items() if key not in _OF_USERS}
    with Terminal(columns, lines) as screen:
        status = subprocess.run(
            command,
            stdin=screen.device if has_keyboard else subprocess.DEVNULL,
            stdout=screen.device,
            stderr=screen.device,
            env={**environment, "TERM": "xterm", **(variables or {})},
            timeout=60,
            check=False,
        ).returncode
    return status, screen.text
