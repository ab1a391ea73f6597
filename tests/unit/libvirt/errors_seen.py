"""Errors that real releases of libvirt made: see tests/integration/test_libvirt_errors.py."""

from __future__ import annotations

import json
from pathlib import Path

from msgspec import structs

from vfiomgr.libvirt.client import errors as client_errors
from vfiomgr.libvirt.client.errors import ReportedError

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


SEEN: dict[str, dict[str, ReportedError]] = {
    release: {name: ReportedError(**seen) for name, seen in errors.items()}
    for release, errors in json.loads(_FILE.read_text()).items()
}
"""By release, and by the function of error_maker.py."""


def of(name: str) -> list[ReportedError]:
    """What each release said of a mistake."""
    names = {name, _SAME.get(name, name)}
    return [errors[known] for errors in SEEN.values() for known in names]


def row_of(seen: ReportedError) -> int | None:
    """The number of the first row that matches."""
    rows = enumerate(client_errors.causes())
    return next((number for number, row in rows if row.match(seen)), None)


def record(release: str, errors: dict[str, ReportedError]) -> None:
    """Keep the errors of a release."""
    kept = {**SEEN, release: errors}
    ordered = sorted(kept.items(), key=lambda item: [int(n) for n in item[0].split(".")])
    document = {
        release: {name: structs.asdict(seen) for name, seen in errors.items()}
        for release, errors in ordered
    }
    _FILE.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
