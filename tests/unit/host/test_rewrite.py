from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

import pytest

from vfiomgr.errors import HostError
from vfiomgr.host.rewrite import rewrite

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
    with pytest.raises(HostError, match="cannot be written: Operation not permitted") as caught:
        rewrite(str(file), OLD, NEW)
    assert "name another file" in caught.value.hint
    assert (file.read_bytes(), names(file)) == (OLD, ["guest.xml"])


def test_extended_attributes_go_along(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_to: dict[str, bytes] = {}
    label = {"security.selinux": b"svirt_image_t"}
    old, new = {**label, "user.note": b"mine"}, label

    def held(of: str | int) -> dict[str, bytes]:
        return old if isinstance(of, str) else new

    os_module = "vfiomgr.host.rewrite.os"
    monkeypatch.setattr(f"{os_module}.listxattr", lambda of: list(held(of)))
    monkeypatch.setattr(f"{os_module}.getxattr", lambda of, name: held(of)[name])
    monkeypatch.setattr(
        f"{os_module}.setxattr", lambda _, name, value: set_to.update({name: value})
    )
    rewrite(str(file), OLD, NEW)
    assert set_to == {"user.note": b"mine"}, "what is there already needs no right to be set"


def test_a_file_that_was_changed_meanwhile_is_left_alone(file: Path) -> None:
    with pytest.raises(HostError, match="changed meanwhile"):
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
