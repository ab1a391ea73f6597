"""Files as texts: those that users name, and the templates of this package."""

from __future__ import annotations

import os
import sys

from vfiomgr.errors import InvalidDocument, UsageError
from vfiomgr.value import Value

STANDARD_INPUT = "-"
_MOST_BYTES = 16 << 20
"""Larger than any layout, plan, pod or specification."""


def source_of(path: str) -> str:
    """The name of a file in errors."""
    return "<stdin>" if path == STANDARD_INPUT else path


def text_of(path: str, what: str) -> str:
    """The text of a file named by a user.

    Raises:
        UsageError: it cannot be read.
        InvalidDocument: the file is not text, or is too long.

    """
    source = source_of(path)
    try:
        data = _read(path)
        if len(data) > _MOST_BYTES:
            message = f"cannot read {what} {source}: it is larger than {_MOST_BYTES >> 20} MiB"
            raise InvalidDocument(message, "check whether it is the right file")
        return data.decode()
    except OSError as error:
        message = f"cannot read {what} {source}: {error.strerror}"
        raise UsageError(message, "use an existing, readable file, or - for a pipe") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        message = f"{source}: not UTF-8 text in line {line}"
        raise InvalidDocument(message, "save it as UTF-8") from None


def _read(path: str) -> bytes:
    if path == STANDARD_INPUT:
        return sys.stdin.buffer.read(_MOST_BYTES + 1)
    with open(path, "rb") as file:
        return file.read(_MOST_BYTES + 1)


class TextFile(Value):
    """A small configuration file of the host."""

    path: str
    text: str


_PACKAGE = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
_PLACES = (os.path.join(_PACKAGE, "data"), os.path.dirname(os.path.dirname(_PACKAGE)))


def resource_directory(name: str) -> str:
    """The directory `templates` or `kata`.

    Raises:
        FileNotFoundError: the installation is incomplete.

    """
    for place in _PLACES:
        directory = os.path.join(place, name)
        if os.path.isdir(directory):
            return directory
    message = f"{name}/ is missing from this installation of vfiomgr"
    raise FileNotFoundError(message)
