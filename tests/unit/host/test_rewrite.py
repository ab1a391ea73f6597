from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

import pytest

from vfiomgr.errors import HostError
from vfiomgr.host.rewrite import read_own, rewrite, rewrite_own

if TYPE_CHECKING:
    from pathlib import Path

OLD, NEW = b"old\r\n", b"new\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file with a mode that no umask gives."""
    path = tmp_path / "guest.xml"
    path.write_bytes(OLD)
    path.chmod(0o604)
    return path


def names(path: Path) -> list[str]:
    return sorted(one.name for one in path.parent.iterdir())


def test_it_is_exchanged_and_keeps_its_mode(file: Path) -> None:
    before = file.stat().st_ino
    rewrite(str(file), OLD, NEW)
    assert (file.read_bytes(), stat.S_IMODE(file.stat().st_mode)) == (NEW, 0o604)
    assert file.stat().st_ino != before, "never half written: a new file has taken its name"
    assert names(file) == ["guest.xml"]


def test_it_keeps_its_owner(file: Path) -> None:
    owner = (64055, 64056) if os.geteuid() == 0 else (os.geteuid(), os.getegid())
    os.chown(file, *owner)
    file.chmod(0o4640)  # which a later change of the owner would take the first bit of
    rewrite(str(file), OLD, NEW)
    found = file.stat()
    assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (*owner, 0o4640)


def test_what_cannot_keep_its_owner_is_not_written(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("vfiomgr.host.rewrite.os.fchmod", refuse)
    with pytest.raises(HostError, match=r"cannot write .*: Operation not permitted") as caught:
        rewrite(str(file), OLD, NEW)
    assert "use another file" in caught.value.hint
    assert (file.read_bytes(), names(file)) == (OLD, ["guest.xml"])


def test_a_missing_directory_is_named(file: Path) -> None:
    absent = file.parent / "no such"
    with pytest.raises(HostError, match=r"cannot write .*: No such file or directory") as caught:
        rewrite(str(absent / "guest.xml"), OLD, NEW)
    assert caught.value.hint == f"create its directory: mkdir -p '{absent}'"


def test_extended_attributes_go_along(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_to: dict[str, bytes] = {}
    label = {"security.selinux": b"svirt_image_t"}
    old, new = {**label, "user.note": b"mine"}, label

    def held(of: int) -> dict[str, bytes]:
        return old if os.readlink(f"/proc/self/fd/{of}") == str(file) else new

    os_module = "vfiomgr.host.rewrite.os"
    monkeypatch.setattr(f"{os_module}.listxattr", lambda of: list(held(of)))
    monkeypatch.setattr(f"{os_module}.getxattr", lambda of, name: held(of)[name])
    monkeypatch.setattr(
        f"{os_module}.setxattr", lambda _, name, value: set_to.update({name: value})
    )
    rewrite(str(file), OLD, NEW)
    assert set_to == {"user.note": b"mine"}, "what is there already needs no right to be set"


def test_a_file_that_was_changed_meanwhile_is_left_alone(file: Path) -> None:
    with pytest.raises(HostError, match="changed by something else"):
        rewrite(str(file), b"something else", NEW)
    assert (file.read_bytes(), names(file)) == (OLD, ["guest.xml"])


def test_a_link_stays_one(file: Path) -> None:
    link = file.parent / "link.xml"
    link.symlink_to("guest.xml")
    rewrite(str(link), OLD, NEW)
    assert (link.is_symlink(), file.read_bytes()) == (True, NEW)


def test_a_new_file_has_the_mode_of_any_new_file(tmp_path: Path) -> None:
    other, path = tmp_path / "other", tmp_path / "new.xml"
    other.touch()
    rewrite(str(path), None, NEW)
    assert (path.read_bytes(), path.stat().st_mode) == (NEW, other.stat().st_mode)


def test_what_is_no_regular_file_is_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"  # and no device of the machine, which a defect would replace
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        rewrite(str(pipe), None, NEW)
        assert os.read(reader, 100) == NEW
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_the_rest_of_a_killed_process_is_no_obstacle(file: Path) -> None:
    (file.parent / f".guest.xml.{os.getpid()}").write_bytes(b"half")
    rewrite(str(file), OLD, NEW)
    assert (file.read_bytes(), names(file)) == (NEW, ["guest.xml"])


def test_a_place_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="No such file or directory"):
        rewrite(str(tmp_path / "none" / "guest.xml"), None, NEW)


USER, OTHER = 64055, 64056


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A directory that another user than the caller has, with a file of his."""
    if os.geteuid() != 0:
        pytest.skip("only root can make files of other users")
    home = tmp_path / "home"
    home.mkdir()
    (home / "config.json").write_bytes(OLD)
    (tmp_path / "secret").write_bytes(OLD)
    (tmp_path / "others").mkdir()
    (tmp_path / "others/config.json").write_bytes(OLD)
    for place, owner in ((home, USER), (home / "config.json", USER), (tmp_path / "others", OTHER)):
        os.chown(place, owner, owner)
    os.chown(tmp_path / "others/config.json", OTHER, OTHER)
    return home


def link(place: Path, target: str, owner: int) -> Path:
    place.unlink(missing_ok=True)
    place.symlink_to(target)
    os.lchown(place, owner, owner)
    return place


@pytest.mark.parametrize("target", ["{0}/secret", "../secret", "../others/config.json", "../new"])
def test_a_link_of_another_user_leads_nowhere_but_to_his_own_files(home: Path, target: str) -> None:
    root = home.parent
    place = link(home / "config.json", target.format(root), USER)
    with pytest.raises(HostError, match=f"is a symbolic link of user {USER}, to a file of another"):
        rewrite(str(place), None, NEW)
    assert (root / "secret").read_bytes() == OLD
    assert (root / "others/config.json").read_bytes() == OLD
    assert not (root / "new").exists()


def test_a_directory_that_is_such_a_link_leads_nowhere_either(home: Path) -> None:
    place = link(home / "vms", "../others", USER) / "config.json"
    for change in (rewrite, rewrite_own):
        with pytest.raises(HostError, match=f"{home}/vms is a symbolic link of user {USER}"):
            change(str(place), OLD, NEW)
    with pytest.raises(HostError, match="symbolic link of user"):
        read_own(str(place), 100)
    assert place.read_bytes() == OLD


def test_links_of_a_user_among_his_files_and_links_of_root_are_followed(home: Path) -> None:
    file = home / "config.json"
    rewrite(str(link(home / "mine.xml", str(file), USER)), OLD, NEW)
    assert file.read_bytes() == NEW
    rewrite(str(link(home.parent / "roots.xml", "home/mine.xml", 0)), NEW, OLD)
    assert (file.read_bytes(), file.stat().st_uid) == (OLD, USER)


def test_a_file_that_is_a_link_is_never_ones_own(home: Path) -> None:
    place = link(home / "link.json", "config.json", USER)
    for call in (lambda: read_own(str(place), 9), lambda: rewrite_own(str(place), OLD, NEW)):
        with pytest.raises(HostError, match=r"it is a symbolic link to config\.json") as refused:
            call()
        assert refused.value.hint == f"if this file is meant, name it directly: {home}/config.json"
    assert (home / "config.json").read_bytes() == OLD


def test_a_file_of_a_third_user_is_not_ones_own(home: Path) -> None:
    file = home / "config.json"
    os.chown(file, OTHER, OTHER)
    for call in (lambda: read_own(str(file), 9), lambda: rewrite_own(str(file), OLD, NEW)):
        with pytest.raises(HostError, match=f"owned by user {OTHER}, its directory by user {USER}"):
            call()
    os.chown(file, 0, 0)
    rewrite_own(str(file), OLD, NEW)
    assert (file.read_bytes(), file.stat().st_uid) == (NEW, 0)


def test_a_file_with_a_second_name_is_not_ones_own(home: Path) -> None:
    file = home / "config.json"
    file.unlink()
    os.link(home.parent / "secret", file)
    for call in (lambda: read_own(str(file), 9), lambda: rewrite_own(str(file), OLD, NEW)):
        with pytest.raises(HostError, match=r"2 names \(hard links\)"):
            call()
    assert (home.parent / "secret").read_bytes() == OLD


def test_a_directory_that_is_exchanged_meanwhile_changes_nothing(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory that was checked is the one that is written in, whatever its name is by now."""
    fsync = os.fsync
    moved = home.parent / "moved"

    def exchange(descriptor: int) -> None:
        monkeypatch.setattr("vfiomgr.host.rewrite.os.fsync", fsync)
        home.rename(moved)
        home.symlink_to("others")
        fsync(descriptor)

    monkeypatch.setattr("vfiomgr.host.rewrite.os.fsync", exchange)
    rewrite_own(str(home / "config.json"), OLD, NEW)
    assert (moved / "config.json").read_bytes() == NEW
    assert (home.parent / "others/config.json").read_bytes() == OLD


def test_what_a_file_is_called_from_its_own_directory(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (file.parent / "below").mkdir()
    monkeypatch.chdir(file.parent / "below")
    for n, name in enumerate(("../guest.xml", ".././guest.xml", f"{file.parent}//guest.xml")):
        rewrite(name, None, b"%d" % n)
        assert file.read_bytes() == b"%d" % n
    for name in (".", "..", "/", "../below"):
        with pytest.raises(HostError, match="Is a directory"):
            rewrite(name, None, NEW)


def test_links_in_a_circle_end(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(HostError, match="Too many levels of symbolic links"):
        rewrite(str(tmp_path / "a"), None, NEW)


def test_directories_are_made_where_that_is_asked_for(tmp_path: Path) -> None:
    place = tmp_path / "config.d/more/10.toml"
    with pytest.raises(HostError, match="No such file"):
        rewrite(str(place), None, NEW)
    rewrite(str(place), None, NEW, makes_parents=True)
    assert place.read_bytes() == NEW


def test_no_descriptor_is_left_open(home: Path) -> None:
    file, before = home / "config.json", os.listdir("/proc/self/fd")
    rewrite_own(str(file), OLD, NEW)
    link(home / "config.json", "../secret", USER)
    with pytest.raises(HostError):
        rewrite(str(file), None, NEW)
    with pytest.raises(HostError):
        rewrite(str(home / "none/x"), None, NEW)
    assert os.listdir("/proc/self/fd") == before
