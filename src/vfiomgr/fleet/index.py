"""What was derived from each file, kept in the user's cache directory: SQLite, a file a directory.

An entry is used if the file has the same size, inode, and times of its change as before. A file
that changed less than two seconds before it was read is read again the next time: its times could
be the same after another change (Documentation/filesystems/multigrain-ts.rst).
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec

from vfiomgr import __version__
from vfiomgr.errors import UsageError, VfiomgrError
from vfiomgr.fleet.model import Unreadable
from vfiomgr.snapshot.document import load_dated
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.snapshot.created import Created
    from vfiomgr.snapshot.model import HostSnapshot

    _Known = dict[str, tuple[str, bytes]]
    Derive = Callable[[HostSnapshot, Created, str], Value]

_ENDINGS = (".json", ".json.gz")
_LAYOUT = 3
"""The version of the tables and of what is kept in them."""
_TABLES = """\
CREATE TABLE IF NOT EXISTS derived (
    kind TEXT, file TEXT, stamp TEXT, value BLOB, PRIMARY KEY (kind, file)
)
"""
_FRESH = 2_000_000_000
"""Nanoseconds."""
_WAIT = 5.0
"""Seconds for another process that writes."""
_MANY = 64
"""Files that are worth a process for each processor."""
_CHUNK = 16
_D = TypeVar("_D", bound=Value)


def files_in(places: Iterable[str]) -> list[str]:
    """The files of snapshots: those named, and those of a directory that end in .json or .json.gz.

    Raises:
        UsageError: a place does not exist, or cannot be read.
    """
    found: list[str] = []
    for place in places:
        try:
            names = sorted(os.listdir(place)) if os.path.isdir(place) else None
            os.stat(place)
        except OSError as error:
            message = f"cannot read {place}: {error.strerror}"
            remedy = "name directories with outputs of vfiomgr snapshot, which you can read"
            raise UsageError(message, remedy) from None
        if names is None:
            found.append(place)
        else:
            kept = (n for n in names if n.endswith(_ENDINGS) and not n.startswith("."))
            found += [os.path.join(place, name) for name in kept]
    return list(dict.fromkeys(found))


class Index(Generic[_D]):
    """What `derive` makes of snapshots, by file; `kind` names it among others of a directory.

    `of_what` is what it depends on besides: an entry for another one is replaced. Without a
    writable cache directory, all files are read each time, which is noted.
    """

    def __init__(  # noqa: PLR0913 - all but the first have defaults, or are functions
        self,
        kind: str,
        form: type[_D],
        derive: Callable[[HostSnapshot, Created, str], _D],
        on_note: Callable[[str], None],
        *,
        now: Callable[[], int] = time.time_ns,
        of_what: str = "",
    ) -> None:
        self._kind = kind
        self._made_by = f"{__version__} {of_what}"
        self._read = msgspec.msgpack.Decoder(form).decode
        self._derive = derive
        self._note = on_note
        self._now = now

    def of(self, files: Sequence[str]) -> Iterator[tuple[str, _D | Unreadable]]:
        """Each file, with what is derived from it."""
        by_directory: dict[str, list[str]] = {}
        for file in files:
            by_directory.setdefault(os.path.dirname(file), []).append(os.path.basename(file))
        for directory, names in by_directory.items():
            database, known = self._opened(directory)
            with closing(database):
                yield from self._in_directory(database, known, directory, names)

    def _in_directory(
        self, database: sqlite3.Connection, known: _Known, directory: str, names: list[str]
    ) -> Iterator[tuple[str, _D | Unreadable]]:
        paths = {name: os.path.join(directory, name) for name in names}
        stamps = {name: self._stamp(path) for name, path in paths.items()}
        stale = [n for n in names if not stamps[n] or known.get(n, ("",))[0] != stamps[n]]
        found = _derived(self._derive, [paths[name] for name in stale])
        fresh = dict(zip(stale, found, strict=True))
        settled = self._now() - _FRESH
        kept = [
            (self._kind, name, stamps[name], value)
            for name, value in fresh.items()
            if isinstance(value, bytes)
            and stamps[name] == self._stamp(paths[name])
            and int(stamps[name].partition(" ")[0]) < settled
        ]
        others = known.keys() - stamps.keys()
        absent = (n for n in others if not os.path.lexists(os.path.join(directory, n)))
        try:
            with suppress(sqlite3.OperationalError), database:  # another run writes, or no space
                gone = [(self._kind, name) for name in absent]
                database.executemany("DELETE FROM derived WHERE kind = ? AND file = ?", gone)
                database.executemany("INSERT OR REPLACE INTO derived VALUES (?, ?, ?, ?)", kept)
        except sqlite3.DatabaseError:
            _remove(_place(directory))
        for name, path in paths.items():
            yield path, self._value(path, fresh[name] if name in fresh else known[name][1])

    def _value(self, path: str, kept: bytes | Unreadable) -> _D | Unreadable:
        try:
            return kept if isinstance(kept, Unreadable) else self._read(kept)
        except msgspec.MsgspecError:  # the entry is damaged
            found = _derived_from(self._derive, path)
            return found if isinstance(found, Unreadable) else self._read(found)

    def _stamp(self, file: str) -> str:
        """What changes with the content of a file and what is derived; empty without a file."""
        try:
            found = os.stat(file)
        except OSError:
            return ""
        times = f"{found.st_ctime_ns} {found.st_mtime_ns}"
        return f"{times} {found.st_size} {found.st_ino} {self._made_by}"

    def _opened(self, directory: str) -> tuple[sqlite3.Connection, _Known]:
        """The database and its entries; in memory if another process keeps the file locked."""
        cache, place = cache_directory(), _place(directory)
        with suppress(OSError, sqlite3.OperationalError):
            os.makedirs(cache, mode=0o700, exist_ok=True)
            if os.stat(cache).st_uid == os.geteuid():  # not the one of the user before sudo
                try:
                    return self._entries(place)
                except sqlite3.OperationalError:
                    raise
                except sqlite3.DatabaseError:  # it is damaged
                    _remove(place)
                    return self._entries(place)
        self._note(f"cannot keep an index in {cache}: all files are read")
        return _database(":memory:"), {}

    def _entries(self, place: str) -> tuple[sqlite3.Connection, _Known]:
        query = "SELECT file, stamp, value FROM derived WHERE kind = ?"
        database = _of_user(place)
        try:
            return database, {n: (s, v) for n, s, v in database.execute(query, (self._kind,))}
        except sqlite3.Error:
            database.close()
            raise


def cache_directory() -> str:
    """Where indexes are kept (XDG Base Directory Specification)."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(cache, "vfiomgr", "fleet")


def _place(directory: str) -> str:
    digest = sha256(os.path.abspath(directory).encode()).hexdigest()[:16]
    return os.path.join(cache_directory(), f"{digest}.sqlite")


def _of_user(place: str) -> sqlite3.Connection:
    """The database in a file, which only the user can read."""
    os.close(os.open(place, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    return _database(place)


def _remove(place: str) -> None:
    """Remove a damaged database, and first its journal, which SQLite would apply to the next."""
    for file in (f"{place}-journal", place):
        with suppress(FileNotFoundError):
            os.unlink(file)


def _database(place: str) -> sqlite3.Connection:
    database = sqlite3.connect(place, timeout=_WAIT)
    database.text_factory = partial(str, encoding="utf-8", errors="replace")
    try:
        if database.execute("PRAGMA user_version").fetchone() != (_LAYOUT,):
            database.execute("DROP TABLE IF EXISTS derived")
            database.execute(f"PRAGMA user_version = {_LAYOUT}")
        database.execute(_TABLES)
    except sqlite3.Error:
        database.close()
        raise
    return database


def _derived(derive: Derive, files: Sequence[str]) -> Iterable[bytes | Unreadable]:
    """What is derived from each file, on all processors if there are many files."""
    one = partial(_derived_from, derive)
    if len(files) < _MANY or (os.cpu_count() or 1) < 2:  # noqa: PLR2004 - processors
        return map(one, files)
    from concurrent.futures import ProcessPoolExecutor  # noqa: PLC0415 - slow to import

    with ProcessPoolExecutor() as pool:
        return list(pool.map(one, files, chunksize=_CHUNK))


def _derived_from(derive: Derive, file: str) -> bytes | Unreadable:
    try:
        return msgspec.msgpack.encode(derive(*load_dated(file), file))
    except VfiomgrError as error:
        return Unreadable(file, error.message)
    except Exception as error:  # noqa: BLE001 - one damaged file may not hide the other hosts
        return Unreadable(file, f"unexpected {type(error).__name__}: {error}")
