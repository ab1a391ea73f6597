"""Errors that real releases of libvirt made: see tests/integration/test_libvirt_errors.py."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

from vfiomgr.libvirt.client import errors as client_errors

_FILE = Path(__file__).with_suffix(".json")
VARY = frozenset(
    {
        "no_argument_of_qemu",
        "connection_closed",
        "ssh_without_a_word",
        "no_such_host",
        "memory_not_locked",
        "no_iommufd",
    }
)
"""Errors with more than one text: which one depends on who is first, or on the name server."""
_SAME = {"no_iommufd": "memory_not_locked"}
"""libvirt before 12.1 does not read `iommufd`."""


class Seen(NamedTuple):
    """An error as libvirt made it."""

    code: int
    text: str


SEEN: dict[str, dict[str, Seen]] = {
    release: {name: Seen(*seen) for name, seen in errors.items()}
    for release, errors in json.loads(_FILE.read_text()).items()
}
"""By release, and by the function of error_maker.py."""


def of(name: str) -> list[Seen]:
    """What each release said of a mistake."""
    names = {name, _SAME.get(name, name)}
    return [errors[known] for errors in SEEN.values() for known in names]


def row_of(seen: Seen) -> int | None:
    """The number of the first row that matches."""
    rows = enumerate(client_errors._ROWS)
    found = (n for n, row in rows if seen.code in row.codes and re.search(row.pattern, seen.text))
    return next(found, None)


def record(release: str, errors: dict[str, Seen]) -> None:
    """Keep the errors of a release."""
    kept = {**SEEN, release: errors}
    ordered = sorted(kept.items(), key=lambda item: [int(n) for n in item[0].split(".")])
    _FILE.write_text(json.dumps(dict(ordered), indent=1, ensure_ascii=False) + "\n")
