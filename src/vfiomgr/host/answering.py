"""A small program that reads attributes for `host/bounded.py`, and imports nothing of vfiomgr.

Each line of the standard input has paths, separated by NUL; its answer is a line of
`host/bounded.py`.
"""

from __future__ import annotations

import os
import signal
import sys

_LIMIT = 4096


def value(path: bytes) -> bytes:
    """The text of an attribute after `=`; nothing if it cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            data = os.read(descriptor, _LIMIT)
        finally:
            os.close(descriptor)
    except OSError:
        return b""
    return b"=" + data.decode(errors="replace").rstrip("\n").encode("unicode_escape")


def main() -> None:
    """Answer until the standard input ends."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # as in bounded.py: the parent handles them
    for line in sys.stdin.buffer:
        answer = b"\t".join(map(value, line.removesuffix(b"\n").split(b"\0")))
        os.write(1, answer + b"\n")


if __name__ == "__main__":
    main()
