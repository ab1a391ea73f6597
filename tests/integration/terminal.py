"""Shells on a terminal of their own: keys are typed, and the edited line is asked of the shell."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import shutil
import struct
import subprocess
import sys
import termios
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

_SECONDS = 60.0
"""A machine that runs tests may be busy."""
_QUIET = 0.3
_ROWS, _COLUMNS = 50, 220
_ESCAPE = re.compile(
    r"\x1b(?:\[[0-9;?>=]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_=>]|\(.)"
)
TAB, ASK, CLEAR = "\t", "\x14", "\x15"
"""Ctrl-T has the shell write its line to a file; Ctrl-U clears it."""
_BASH = r"""
PS1='ready$ '
bind -x '"\C-t": printf %s "$READLINE_LINE" > "$LINE.new"; mv "$LINE.new" "$LINE"'
bind 'set bell-style none'
bind 'set page-completions off'
bind 'set completion-query-items 0'
bind 'set show-all-if-ambiguous on'
"""
_ZSH = r"""
PROMPT='ready$ '
autoload -Uz compinit && compinit -u -d "$HOME/.zcompdump"
setopt no_beep list_ambiguous no_list_beep
LISTMAX=10000
_ask() { print -rn -- "$BUFFER" > "$LINE.new"; mv "$LINE.new" "$LINE" }
zle -N _ask
bindkey -e
bindkey '^T' _ask
"""
_FISH = r"""
function fish_prompt; printf 'ready$ '; end
function fish_greeting; end
function _ask; commandline -b | string collect > $LINE.new; mv $LINE.new $LINE; end
bind \ct _ask
"""
_SETTINGS = {
    "bash": (".bashrc", _BASH),
    "zsh": (".zshrc", _ZSH),
    "fish": (".config/fish/config.fish", _FISH),
}

_DIRECTORIES = ("bin", ".config/fish", ".local/share/fish/generated_completions")
"""Without the last one, fish would read all manual pages first."""


class Terminal:
    """An interactive shell with the completion of vfiomgr, in a home and a directory of its own."""

    def __init__(self, shell: str, home: Path, extra: str = "") -> None:
        """Start it; `extra` are lines for its settings."""
        program = shutil.which(shell)
        assert program, f"{shell} is missing: tools/packages-dev.txt names it"
        self.shell = shell
        self.home = home
        self._line = home / "line"
        name, settings = _SETTINGS[shell]
        scripts = Path(sys.executable).parent
        source = subprocess.run(
            (scripts / "vfiomgr", "completion", shell), capture_output=True, text=True, check=True
        ).stdout
        path = f"{home}/bin:{scripts}:/usr/sbin:/usr/bin:/sbin:/bin"
        for directory in _DIRECTORIES:
            (home / directory).mkdir(parents=True, exist_ok=True)
        (home / f"completion.{shell}").write_text(source)
        (home / name).write_text(f"{settings}\n{extra}\nsource {home}/completion.{shell}\n")
        arguments = {
            "bash": ("--noprofile", "--rcfile", str(home / name), "-i"),
            "zsh": ("-i",),
            "fish": ("-i",),
        }[shell]
        environment = {
            "HOME": str(home),
            "ZDOTDIR": str(home),
            "PATH": path,
            "TERM": "xterm",
            "LANG": "C.UTF-8",
            "LINE": str(self._line),
        }
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", _ROWS, _COLUMNS, 0, 0))
        self._process = subprocess.Popen(
            ("/usr/bin/setsid", "--ctty", program, *arguments),
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment,
            cwd=home,
        )
        os.close(slave)
        self._slept = 0
        self._wait_for("ready$ ")

    def __enter__(self) -> Self:
        """The shell is ready."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Hang up, which ends it."""
        os.close(self._master)
        self._process.wait(_SECONDS)

    def complete(self, typed: str) -> str:
        """The line after what was typed and Tab."""
        self._send(CLEAR + typed)
        self._settle()
        self._send(TAB)
        self._settle()
        return self._line_now()

    def shown(self, typed: str) -> str:
        """What the terminal shows after what was typed and Tab, without escape sequences."""
        self._send(CLEAR + typed)
        self._settle()
        self._send(TAB)
        seen = ""
        end = time.monotonic() + _SECONDS
        while not self._has_child():
            seen += self._read(0.02)
            assert time.monotonic() < end, f"{self.shell} asks nobody"
        return _ESCAPE.sub("", seen + self._settle())

    def _line_now(self) -> str:
        """The line as the shell has it."""
        self._line.unlink(missing_ok=True)
        self._send(ASK)
        end = time.monotonic() + _SECONDS
        while not self._line.exists():
            self._read(0.05)
            assert time.monotonic() < end, f"{self.shell} does not answer"
        return self._line.read_text().removesuffix("\n")

    def run(self, command: str) -> str:
        """What a command prints."""
        self._send(f"{CLEAR}{command}; echo 'en''d'\r")
        return _ESCAPE.sub("", self._wait_for("\nend"))

    def _send(self, keys: str) -> None:
        self._slept = _times_slept(self._process.pid)
        os.write(self._master, keys.encode())

    def _read(self, seconds: float) -> str:
        if not select.select([self._master], [], [], seconds)[0]:
            return ""
        try:
            return os.read(self._master, 1 << 16).decode(errors="replace")
        except OSError:  # the shell has ended
            return ""

    def _wait_for(self, text: str) -> str:
        seen = ""
        end = time.monotonic() + _SECONDS
        while text not in _ESCAPE.sub("", seen).replace("\r", ""):
            seen += self._read(0.1)
            assert time.monotonic() < end, f"{self.shell} has only shown {seen!r}"
        return seen

    def _settle(self) -> str:
        """What is shown until the shell has read the keys, and it and its children rest."""
        seen = ""
        now = time.monotonic()
        quiet, end = now + _QUIET, now + _SECONDS
        while time.monotonic() < quiet:
            got = self._read(0.02)
            seen += got
            if got or self._is_busy() or _times_slept(self._process.pid) == self._slept:
                quiet = time.monotonic() + _QUIET
                assert quiet < end, f"{self.shell} does not rest"
        return seen

    def _is_busy(self) -> bool:
        """Whether the shell computes, or has a child, which looks for candidates."""
        return _computes(self._process.pid) or self._has_child()

    def _has_child(self) -> bool:
        return bool(_children(self._process.pid))


def _computes(pid: int) -> bool:
    """Whether a thread does not sleep: it computes, or waits for a processor."""
    states = []
    for thread in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(OSError):  # it has ended
            states.append(thread.read_text().rpartition(")")[2].split()[0])
    return any(state != "S" for state in states)


def _times_slept(pid: int) -> int:
    """How often a process has gone to sleep; unchanged until it wakes for what was typed."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.partition("\nvoluntary_ctxt_switches:")[2].split()[0])


def _children(pid: int) -> list[int]:
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return [int(word) for word in text.split()]
