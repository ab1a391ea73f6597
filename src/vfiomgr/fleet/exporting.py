"""Writes the snapshots of a fleet for others, with the same replacements in all of them."""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from vfiomgr.errors import HostError, UsageError
from vfiomgr.host.durable import replacing
from vfiomgr.snapshot.document import load_dated, write_snapshot

if TYPE_CHECKING:
    from vfiomgr.snapshot.redaction import Redaction

_MODE = 0o644


def export(
    files: Iterable[tuple[str, str, str]], output: str, redaction: Redaction | None
) -> list[str]:
    """Write snapshots below an empty directory; the paths that were written.

    Each is a file, the subdirectory for it, and the name of its host. With a redaction, files are
    named like the replaced hosts.

    Raises:
        UsageError: the directory is not empty.
        HostError: it cannot be written.
    """
    written: list[str] = []
    try:
        os.makedirs(output, exist_ok=True)
        if os.listdir(output):
            message = f"not an empty directory: {output}"
            raise UsageError(message, "name another one with --output")
        for file, below, name in files:
            host, created = load_dated(file)
            text = write_snapshot(host, redaction, created)
            shown = name if redaction is None else redaction.host(name)
            ending = ".json.gz" if file.endswith(".gz") else ".json"
            directory = os.path.join(output, below)
            os.makedirs(directory, exist_ok=True)
            place = _unused(directory, shown.replace("/", "_"), ending)
            data = text.encode()
            _write(place, gzip.compress(data, mtime=0) if ending.endswith(".gz") else data)
            written.append(place)
    except OSError as error:
        message = f"cannot write {error.filename or output}: {error.strerror}"
        raise HostError(message, "name a directory that can be written with --output") from None
    return written


def _unused(directory: str, name: str, ending: str) -> str:
    """The path of a file of this name; with a number if another snapshot of the host has it."""
    number, place = 1, os.path.join(directory, name + ending)
    while os.path.exists(place):
        number += 1
        place = os.path.join(directory, f"{name}-{number}{ending}")
    return place


def _write(place: str, data: bytes) -> None:
    directory, name = os.path.split(place)
    descriptor = os.open(directory, os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with replacing(descriptor, name, _MODE, durable=False) as file:
            file.write(data)
    finally:
        os.close(descriptor)
