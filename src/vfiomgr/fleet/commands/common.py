"""What the commands of `vfiomgr fleet` have in common: the hosts of directories."""

from __future__ import annotations

import calendar
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from vfiomgr.cli.options import complete_file
from vfiomgr.cli.output import note
from vfiomgr.errors import UsageError
from vfiomgr.fleet.index import Index, files_in
from vfiomgr.fleet.model import Dated, Fleet, HostSummary, fleet_of
from vfiomgr.listing import first_of
from vfiomgr.snapshot.created import FORM, Created

if TYPE_CHECKING:
    from vfiomgr.snapshot.model import HostSnapshot

_D = TypeVar("_D", bound="Dated")
_NAMED = 5
"""Unreadable files that are named; JSON has all."""
_HOW = " (--format json lists all)"
_HOUR, _DAY = 3600, 86400


def directories() -> Callable[[Any], Any]:
    """The argument: directories with snapshots, or files."""
    return click.argument(
        "places", metavar="DIR...", nargs=-1, required=True, shell_complete=complete_file
    )


def summarized(host: HostSnapshot, created: Created, path: str) -> HostSummary:
    """The summary of a host."""
    from vfiomgr.fleet.summary import summarize  # noqa: PLC0415 - a complete index needs none

    return summarize(host, created, path)


def hosts_of(places: Iterable[str], on_note: Callable[[str], None] = note) -> Fleet[HostSummary]:
    """The hosts of directories."""
    return read_fleet(places, "summary", HostSummary, summarized, on_note=on_note)


def silent(_text: str) -> None:
    """Note nothing: what is read twice, or while a shell completes a word."""


def snapshots_in(places: Iterable[str]) -> list[str]:
    """The files of snapshots in directories.

    Raises:
        UsageError: a directory is missing, or none contains a snapshot.
    """
    files = files_in(places)
    if not files:
        message = f"no snapshots in {', '.join(places)} (files that end in .json or .json.gz)"
        raise UsageError(message, "create one on each host: vfiomgr snapshot > HOST.json")
    return files


def once(on_note: Callable[[str], None] = note) -> Callable[[str], None]:
    """The same for several reads, which passes each text on only once."""
    told: set[str] = set()

    def tell(text: str) -> None:
        if text not in told:
            told.add(text)
            on_note(text)

    return tell


def read_fleet(
    places: Iterable[str],
    kind: str,
    form: type[_D],
    derive: Any,  # noqa: ANN401 - the function of an `Index`
    *,
    on_note: Callable[[str], None] = note,
    of_what: str = "",
) -> Fleet[_D]:
    """What is derived from the snapshots of directories; what cannot be read is noted.

    Raises:
        UsageError: a directory is missing, or none contains a snapshot.
    """
    files = snapshots_in(places)
    known = Index(kind, form, derive, on_note, of_what=of_what)  # type: ignore[type-var]
    found: Fleet[_D] = fleet_of(known.of(files))
    shown, more = first_of([one.why for one in found.unreadable], _NAMED, _HOW)
    for text in (*shown, *more):
        on_note(f"unknown host: {text}")
    older = [f"{one.path} ({one.host})" for one in found.outdated]
    shown, more = first_of(older, _NAMED)
    if older:
        on_note(f"older snapshots, not used: {', '.join((*shown, *more))}")
    return found


def now() -> float:
    """Seconds since 1970."""
    return time.time()


def note_old(found: Iterable[tuple[str, str | None]]) -> None:
    """Note hosts, by name and time, whose snapshots are older than a day, or of unknown age."""
    old = [f"{name} ({age(time)})" for name, time in found if time is None or _seconds(time) > _DAY]
    shown, more = first_of(old, _NAMED)
    if old:
        named = ", ".join((*shown, *more))
        note(f"snapshots older than a day, or of unknown age: {named}; create them again")


def _seconds(created: str) -> float:
    return now() - calendar.timegm(time.strptime(created, FORM))


def age(created: str | None) -> str:
    """How old a snapshot is: `3 h`, `2 d`; a dash if unknown."""
    if created is None:
        return "-"
    seconds = _seconds(created)
    if seconds < _HOUR:
        return f"{max(0, round(seconds / 60))} min"
    return f"{round(seconds / _HOUR)} h" if seconds < 2 * _DAY else f"{round(seconds / _DAY)} d"
