"""What is kept of the files of a directory, and when it is not used."""

from __future__ import annotations

import os
import sqlite3
from typing import TYPE_CHECKING

import pytest

from tests.unit.fleet.hosts import a_card, a_snapshot, write
from vfiomgr.errors import UsageError
from vfiomgr.fleet import index
from vfiomgr.fleet.index import Index, cache_directory, files_in
from vfiomgr.fleet.model import HostSummary, Unreadable, fleet_of
from vfiomgr.fleet.summary import summarize

if TYPE_CHECKING:
    from pathlib import Path

    from vfiomgr.fleet.model import Fleet
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.created import Created
    from vfiomgr.snapshot.model import HostSnapshot

HOUR = 3600 * 10**9


class Reader:
    """Reads a directory, an hour after its files changed, and counts what it derives."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        self.read: list[str] = []
        self.notes: list[str] = []
        self.later = HOUR
        monkeypatch.setenv("XDG_CACHE_HOME", str(directory.parent / "cache"))

    def __call__(self, kind: str = "summary") -> Fleet[HostSummary]:
        """The hosts, and which files were read for it."""
        self.read.clear()

        def derive(host: HostSnapshot, created: Created, path: str) -> HostSummary:
            self.read.append(os.path.basename(path))
            return summarize(host, created, path)

        newest = max(os.stat(file).st_ctime_ns for file in files_in([str(self.directory)]))
        later = newest + self.later
        known = Index(kind, HostSummary, derive, self.notes.append, now=lambda: later)
        return fleet_of(known.of(files_in([str(self.directory)])))


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reader:
    """A directory with two hosts."""
    directory = tmp_path / "hosts"
    directory.mkdir()
    for name in ("gpu1", "gpu2"):
        write(directory, name, a_snapshot(a_card(0)))
    return Reader(directory, monkeypatch)


def names(fleet: Fleet[HostSummary]) -> list[str]:
    return [host.name for host in fleet.hosts]


def test_a_file_is_read_once(reader: Reader) -> None:
    first = reader()
    assert sorted(reader.read) == ["gpu1.json.gz", "gpu2.json.gz"]
    assert reader() == first
    assert reader.read == []
    assert reader("another kind") == first
    assert len(reader.read) == 2


def test_only_a_file_that_changed_is_read_again(reader: Reader) -> None:
    reader()
    write(reader.directory, "gpu2", a_snapshot(a_card(0), a_card(1)))
    found = reader()
    assert reader.read == ["gpu2.json.gz"]
    assert [len(host.gpus) for host in found.hosts] == [1, 2]


def test_a_file_of_the_same_size_and_time_is_read_again(reader: Reader) -> None:
    reader()
    file = reader.directory / "gpu1.json.gz"
    before = file.stat()
    other = write(reader.directory, "gpu3", a_snapshot(a_card(1)))
    data = other.read_bytes()
    other.unlink()
    file.write_bytes(data.ljust(before.st_size, b"\0")[: before.st_size])
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    reader()
    assert reader.read == ["gpu1.json.gz"]


def test_a_file_that_just_changed_is_not_kept(reader: Reader) -> None:
    reader.later = 10**9
    reader()
    reader()
    assert len(reader.read) == 2


def test_what_is_gone_is_forgotten(reader: Reader) -> None:
    reader()
    (reader.directory / "gpu1.json.gz").unlink()
    assert names(reader()) == ["gpu2"]
    (file,) = (reader.directory.parent / "cache/vfiomgr/fleet").glob("*.sqlite")
    with sqlite3.connect(file) as database:
        assert database.execute("SELECT file FROM derived").fetchall() == [("gpu2.json.gz",)]
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("damage", [b"no database", b""])
def test_a_damaged_index_is_made_again(reader: Reader, damage: bytes) -> None:
    first = reader()
    (file,) = (reader.directory.parent / "cache/vfiomgr/fleet").glob("*.sqlite")
    file.write_bytes(damage)
    assert reader() == first
    assert len(reader.read) == 2
    reader()
    assert reader.read == []
    assert reader.notes == []


def test_a_damaged_page_is_made_again(reader: Reader) -> None:
    first = reader()
    (file,) = (reader.directory.parent / "cache/vfiomgr/fleet").glob("*.sqlite")
    page = 4096
    file.write_bytes(file.read_bytes()[:page] + b"\xff" * (file.stat().st_size - page))
    file.with_name(f"{file.name}-journal").write_bytes(b"old")
    assert reader() == first
    assert len(reader.read) == 2
    assert not file.with_name(f"{file.name}-journal").exists()
    reader()
    assert reader.read == []
    assert reader.notes == []


def test_a_damage_found_on_writing_removes_the_index(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = reader()
    (file,) = (reader.directory.parent / "cache/vfiomgr/fleet").glob("*.sqlite")
    opened = index._database

    def damaged(place: str) -> sqlite3.Connection:
        database = opened(place)
        database.execute(
            "CREATE TEMP TRIGGER damage BEFORE INSERT ON derived BEGIN SELECT RAISE(ABORT, ''); END"
        )
        return database

    monkeypatch.setattr(index, "_database", damaged)
    write(reader.directory, "gpu2", a_snapshot(a_card(0)))
    assert reader() == first
    assert not file.exists()


def test_a_locked_index_is_not_damaged(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "_WAIT", 0)
    first = reader()
    (file,) = (reader.directory.parent / "cache/vfiomgr/fleet").glob("*.sqlite")
    inode = file.stat().st_ino
    with sqlite3.connect(file) as other:
        other.execute("BEGIN EXCLUSIVE")
        assert reader() == first
    assert file.stat().st_ino == inode
    assert "cannot keep an index in" in reader.notes[0]
    reader()
    assert reader.read == []


def test_a_damaged_entry_is_derived_again(reader: Reader) -> None:
    first = reader()
    (file,) = (reader.directory.parent / "cache/vfiomgr/fleet").glob("*.sqlite")
    with sqlite3.connect(file) as database:
        database.execute("UPDATE derived SET value = x'00' WHERE file = 'gpu1.json.gz'")
    assert reader() == first
    assert reader.read == ["gpu1.json.gz"]


def test_the_index_of_another_user_is_not_used(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader()
    monkeypatch.setattr(os, "geteuid", lambda: 1 << 20)
    reader()
    assert len(reader.read) == 2
    assert "cannot keep an index in" in reader.notes[0]


def test_an_index_is_no_link(reader: Reader) -> None:
    reader()
    (file,) = (reader.directory.parent / "cache/vfiomgr/fleet").glob("*.sqlite")
    target = reader.directory.parent / "target"
    target.write_bytes(b"")
    file.unlink()
    file.symlink_to(target)
    reader()
    assert target.read_bytes() == b""
    assert "cannot keep an index in" in reader.notes[0]


def test_what_it_depends_on_besides_replaces_entries(reader: Reader) -> None:
    files = files_in([str(reader.directory)])
    newest = max(os.stat(file).st_ctime_ns for file in files)
    for text in ("a", "b"):
        note = reader.notes.append
        known = Index(
            "drift", HostSummary, summarize, note, now=lambda: newest + HOUR, of_what=text
        )
        assert len(dict(known.of(files))) == 2
    (file,) = (reader.directory.parent / "cache/vfiomgr/fleet").glob("*.sqlite")
    with sqlite3.connect(file) as database:
        assert database.execute("SELECT count(*) FROM derived").fetchall() == [(2,)]


def test_without_a_cache_directory_all_is_read(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = reader.directory.parent / "file"
    place.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(place))
    assert names(reader()) == ["gpu1", "gpu2"]
    assert reader.notes == [f"cannot keep an index in {place}/vfiomgr/fleet: all files are read"]


def test_an_unreadable_file_hides_no_other_host(reader: Reader) -> None:
    (reader.directory / "gpu0.json").write_text("{")
    (reader.directory / "gpu9.json").mkdir()
    found = reader()
    assert names(found) == ["gpu1", "gpu2"]
    assert [one.path for one in found.unreadable] == [
        str(reader.directory / "gpu0.json"),
        str(reader.directory / "gpu9.json"),
    ]
    assert "not JSON" in found.unreadable[0].why
    assert "Is a directory" in found.unreadable[1].why
    reader()
    assert reader.read == []


def test_an_error_of_a_rule_hides_no_other_host(reader: Reader) -> None:
    def fail(_host: HostSnapshot, _created: Created, path: str) -> HostSummary:
        raise KeyError(path)

    known = Index("x", HostSummary, fail, reader.notes.append)
    found = dict(known.of(files_in([str(reader.directory)])))
    assert all(isinstance(one, Unreadable) for one in found.values())
    assert "unexpected KeyError" in str(next(iter(found.values())))


def test_many_files_are_read_by_several_processes(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "_MANY", 2)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    known = Index("summary", HostSummary, summarize, reader.notes.append)
    assert names(fleet_of(known.of(files_in([str(reader.directory)])))) == ["gpu1", "gpu2"]


def test_the_newest_snapshot_of_a_host_counts(reader: Reader) -> None:
    old = write(reader.directory, "gpu1", a_snapshot(), "2026-11-28T08:00:00Z")
    old = old.rename(reader.directory / "z.json.gz")
    undated = write(reader.directory, "gpu1", a_snapshot(), None)
    undated = undated.rename(reader.directory / "a.json.gz")
    new = write(reader.directory, "gpu1", a_snapshot(a_card(0)))
    found = reader()
    assert [host.path for host in found.hosts] == [
        str(new),
        str(reader.directory / "gpu2.json.gz"),
    ]
    assert {one.path for one in found.outdated} == {str(old), str(undated)}


@pytest.mark.parametrize(
    ("older", "newer", "is_one"),
    [
        ((a_card(0),), (a_card(0), a_card(1)), True),
        ((a_card(0), a_card(1)), (a_card(0), a_card(2)), False),
        ((a_card(0, serial="1"), a_card(1, serial="2")), (a_card(0, serial="1"),), True),
        ((a_card(0, serial="1"), a_card(1)), (a_card(0, serial="9"), a_card(1)), False),
        ((a_card(0, serial="1"),), (a_card(0),), True),
    ],
)
def test_hosts_of_one_name_with_other_cards_are_two(
    reader: Reader, older: tuple[PciDevice, ...], newer: tuple[PciDevice, ...], *, is_one: bool
) -> None:
    old = write(reader.directory, "gpu1", a_snapshot(*older), "2026-11-28T08:00:00Z")
    old = old.rename(reader.directory / "z.json.gz")
    new = write(reader.directory, "gpu1", a_snapshot(*newer))
    found = reader()
    assert names(found) == (["gpu1", "gpu2"] if is_one else ["gpu2"])
    assert {one.path for one in found.unreadable} == (set() if is_one else {str(old), str(new)})


def test_files_and_directories_are_named(reader: Reader) -> None:
    (reader.directory / ".gpu3.json").write_text("")
    (reader.directory / "notes.txt").write_text("")
    first = str(reader.directory / "gpu1.json.gz")
    every = [first, str(reader.directory / "gpu2.json.gz")]
    assert files_in([str(reader.directory)]) == every
    assert files_in([first, str(reader.directory)]) == every
    with pytest.raises(UsageError, match="cannot read absent: No such file"):
        files_in(["absent"])


def test_the_cache_is_that_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/user")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory() == "/home/user/.cache/vfiomgr/fleet"
