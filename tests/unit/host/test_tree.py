from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import signal
import socket
import stat
import tempfile
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.host_files import tree_of
from vfiomgr.errors import HostError, ProgramFailed, WriteFailed
from vfiomgr.host.inside import Inside
from vfiomgr.host.owners import NodeAccess
from vfiomgr.host.programs import PROGRAM_PATH
from vfiomgr.host.tree import HostTree
from vfiomgr.paths import STATE, HostPath

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_links_are_followed_within_the_root(tmp_path: Path) -> None:
    tree = tree_of(
        tmp_path,
        """
        sys/devices/pci0000:00/0000:04:00.0/vendor: 0x10de
        sys/bus/pci/devices/0000:04:00.0 -> ../../../devices/pci0000:00/0000:04:00.0
        """,
    )
    device = HostPath("/sys/bus/pci/devices/0000:04:00.0")
    assert tree.read(device / "vendor") == "0x10de"
    assert tree.resolve(device) == "/sys/devices/pci0000:00/0000:04:00.0"
    assert tree.link_name(device) == "0000:04:00.0"


_TARGETS = [
    "x",
    "y",
    "../a",
    "../b",
    "../a/x",
    "./z",
    "../../a/b",
    "y/..",
    "/a",
    "/",
    "/b/x",
    "../../../../..",
    "/../a/../b",
    "file",
    "/file/..",
    "file/.",
    "//a//b",
]
_OPENAT2 = 437
_RESOLVE_IN_ROOT = 0x10


class _How(ctypes.Structure):
    """What openat2(2) is asked for (struct open_how)."""

    _fields_ = (
        ("flags", ctypes.c_uint64),
        ("mode", ctypes.c_uint64),
        ("resolve", ctypes.c_uint64),
    )


def kernels_answer(root: str, path: str) -> str | None:
    """Where the kernel goes from a root; None where it finds nothing."""
    how = _How(os.O_PATH | os.O_CLOEXEC, 0, _RESOLVE_IN_ROOT)
    directory = os.open(root, os.O_PATH | os.O_DIRECTORY)
    try:
        call = ctypes.CDLL(None, use_errno=True).syscall
        found = call(_OPENAT2, directory, path.encode(), ctypes.byref(how), ctypes.sizeof(how))
        if found < 0:
            assert ctypes.get_errno() in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
            return None
        place = os.readlink(f"/proc/self/fd/{found}")
        os.close(found)
        return place.removeprefix(root)
    finally:
        os.close(directory)


@given(
    links=st.dictionaries(
        st.sampled_from([f"{a}{b}" for a in ("", "a/", "b/", "a/b/") for b in "xyz"]),
        st.sampled_from(_TARGETS),
    ),
    asked=st.sampled_from(["a", "a/x", "b/y", "a/b/z", "a/x/x", "a/b/x/y", "b/z/../x", "a/y/b/x"]),
)
def test_any_links_lead_where_the_kernel_goes_in_a_root(links: dict[str, str], asked: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        root = os.path.realpath(directory)
        os.makedirs(f"{root}/a/b")
        os.mkdir(f"{root}/b")
        for place in ("", "a/", "b/"):
            with open(f"{root}/{place}file", "w") as file:
                file.write(f"/{place}file")
        for name, target in links.items():
            os.symlink(target, f"{root}/{name}")
        tree, expected = HostTree(root), kernels_answer(root, asked)
        assert tree.resolve(HostPath(f"/{asked}")) == expected
        is_file = expected is not None and expected.endswith("file")
        assert tree.read(HostPath(f"/{asked}")) == (expected if is_file else None)


@pytest.mark.parametrize("target", ["/", "../../../../../../../.."])
def test_a_link_out_of_the_root_leads_to_the_root(tmp_path: Path, target: str) -> None:
    tree = tree_of(
        tmp_path / "root",
        f"""
        sys/trap -> {target}
        etc/name: inside
        """,
    )
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/name").write_text("outside")
    assert tree.read(HostPath("/sys/trap/etc/name")) == "inside"
    assert tree.read(HostPath("/sys/trap/etc/hostname")) is None
    assert tree.resolve(HostPath("/sys/trap")) == ""


def test_a_file_that_is_an_absolute_link_is_the_trees_own(tmp_path: Path) -> None:
    tree = tree_of(
        tmp_path / "root",
        """
        etc/os-release -> /usr/lib/os-release
        usr/lib/os-release: ID=inside
        etc/passwd -> /etc/shadow-of-the-machine
        """,
    )
    place = HostPath("/etc/os-release")
    assert tree.read(place) == "ID=inside"
    assert tree.read_text(place) == "ID=inside\n"
    assert tree.read_text(place, 2) == "ID"
    assert tree.read_whole(place) == b"ID=inside\n"
    assert tree.read_part(place, 3, 2) == b"in"
    assert tree.modified(place) == tree.modified(HostPath("/usr/lib/os-release"))
    assert tree.read(HostPath("/etc/passwd")) is None


def test_links_that_go_round_in_a_circle_read_as_absent(tmp_path: Path) -> None:
    tree = tree_of(
        tmp_path,
        """
        a -> b
        b -> a
        c/d -> ../c/d/e
        """,
    )
    for name in ("/a", "/a/file", "/c/d", "/c/d/e/f"):
        place = HostPath(name)
        assert tree.read(place) is None
        assert tree.children(place) == []
        assert tree.resolve(place) is None
        assert tree.modified(place) is None
    assert tree.exists(HostPath("/a"))
    assert not tree.exists(HostPath("/a/file"))


def test_a_path_of_thousands_of_parts_is_no_defect(tmp_path: Path) -> None:
    tree = tree_of(tmp_path, f"deep -> {'x/' * 2000}")
    assert tree.read(HostPath("/deep/file")) is None
    assert tree.resolve(HostPath("/" + "x/" * 5000)) is None


def read_in_each_way(tree: HostTree, place: HostPath) -> list[object]:
    readers = (tree.read, tree.read_bytes, tree.read_whole, tree.read_text)
    found: list[object] = [read(place) for read in readers]
    return [*found, tree.read_text(place, 10), tree.read_part(place, 0, 10) or None]


def test_a_pipe_in_a_foreign_tree_keeps_nobody_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    os.symlink("pipe", tmp_path / "link")
    writer = os.open(tmp_path / "pipe", os.O_RDWR | os.O_NONBLOCK)
    os.write(writer, b"trap")
    tree = HostTree(tmp_path)
    try:
        for name in ("/pipe", "/link"):
            assert read_in_each_way(tree, HostPath(name)) == [None] * 6
        assert os.read(writer, 4) == b"trap", "it was not read"
    finally:
        os.close(writer)


def test_nothing_but_regular_files_of_a_foreign_tree_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening a device can rewind a tape, or start a watchdog."""
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(tmp_path / "socket"))
    (tmp_path / "directory").mkdir()
    names = ["/socket", "/directory"]
    if os.geteuid() == 0:
        os.mknod(tmp_path / "device", 0o600 | stat.S_IFCHR, os.makedev(1, 7))
        names.append("/device")
    opened: list[object] = []
    monkeypatch.setattr("vfiomgr.host.tree.os.open", lambda path, *_: opened.append(path))
    tree = HostTree(tmp_path)
    for name in names:
        assert read_in_each_way(tree, HostPath(name)) == [None] * 6
    assert opened == []


@pytest.mark.parametrize("name", ["/a\0b", "/a\0/b", "/\ud800", "/\ud800/x"])
def test_a_name_that_no_file_can_have_reads_as_absent(tmp_path: Path, name: str) -> None:
    for tree in (HostTree(tmp_path), HostTree("/")):
        place = HostPath(name)
        assert read_in_each_way(tree, place) == [None] * 6
        assert tree.children(place) == []
        assert not tree.exists(place)
        assert tree.resolve(place) is None
        assert (tree.status(place), tree.access(place), tree.modified(place)) == (None, None, None)
        assert (tree.link(place), tree.device_number(place)) == (None, None)


def test_a_file_that_is_too_large_is_named(tmp_path: Path) -> None:
    with open(tmp_path / "large", "wb") as file:
        file.truncate((64 << 20) + 1)
    tree = HostTree(tmp_path)
    for read in (tree.read_whole, tree.read_text):
        with pytest.raises(HostError, match="cannot read /large: it is larger than 64 MiB"):
            read(HostPath("/large"))
    assert tree.read_text(HostPath("/large"), 5) == "\0" * 5


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../b", "a\0b"])
def test_a_name_cannot_leave_its_directory(name: str) -> None:
    with pytest.raises(ValueError, match="is not a name below"):
        HostPath("/sys") / name


def test_what_is_absent_reads_as_none(tmp_path: Path) -> None:
    tree = tree_of(tmp_path, "sys/a: 1")
    assert tree.read(HostPath("/sys/b")) is None
    assert tree.read(HostPath("/sys/a/b")) is None
    assert tree.link(HostPath("/sys/a")) is None
    assert tree.children(HostPath("/sys/b")) == []


@pytest.mark.parametrize(
    ("command", "limit", "words"),
    [
        (("sh", "-c", "echo said; echo why >&2; exit 3"), 60, "ended with 3: said why"),
        (("sleep", "60"), 0.2, "sleep 60 did not end within 0.2 seconds and was killed"),
        (
            ("/nonexistent/program",),
            60,
            "cannot run /nonexistent/program: No such file or directory",
        ),
    ],
)
def test_a_program_that_fails_is_told_with_its_words(
    tmp_path: Path, command: tuple[str, ...], limit: float, words: str
) -> None:
    with pytest.raises(HostError, match=words) as caught:
        HostTree(tmp_path).call(*command, limit=limit)
    assert caught.value.hint == "run it manually to see why"
    HostTree(tmp_path).call("true")


def test_a_program_outlives_whoever_waits_for_it(tmp_path: Path) -> None:
    """An initramfs tool goes on where the process that waits is killed at its deadline."""
    began, ended = tmp_path / "began", tmp_path / "ended"
    os.mkfifo(began)
    script = f"echo > {began}; cat {began} >&2; echo words && echo end > {ended}"
    waiting = os.fork()
    if waiting == 0:
        HostTree(tmp_path).call("sh", "-c", script)
        os._exit(0)
    began.read_text()
    os.kill(waiting, signal.SIGKILL)
    os.waitpid(waiting, 0)
    began.write_text("go on\n")
    deadline = time.monotonic() + 20
    while not ended.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_missing_attribute_is_not_created_by_a_write(tmp_path: Path) -> None:
    tree = tree_of(tmp_path, "sys/a: 1")
    with pytest.raises(WriteFailed) as caught:
        tree.write(HostPath("/sys/b"), "x")
    assert caught.value.errno == errno.ENOENT
    assert not (tmp_path / "sys/b").exists()


def test_the_empty_text_is_written_as_a_newline(tmp_path: Path) -> None:
    tree = tree_of(tmp_path, "sys/driver_override:")
    (tmp_path / "sys/driver_override").write_text("")
    tree.write(HostPath("/sys/driver_override"), "")
    assert (tmp_path / "sys/driver_override").read_text() == "\n"


def test_replace_leaves_no_temporary_file_and_lets_root_alone_write(tmp_path: Path) -> None:
    tree = tree_of(tmp_path, "sys/a: 1")
    state = HostPath("/var/lib/vfiomgr")
    tree.make_directory(state)
    tree.replace(state / "record", b"one")
    tree.replace(state / "record", b"two")
    assert os.listdir(tmp_path / "var/lib/vfiomgr") == ["record"]
    assert (tmp_path / "var/lib/vfiomgr/record").read_bytes() == b"two"
    assert (tmp_path / "var/lib/vfiomgr/record").stat().st_mode & 0o777 == 0o644
    assert (tmp_path / "var/lib/vfiomgr").stat().st_mode & 0o777 == 0o755


def test_a_recording_is_not_live(tmp_path: Path) -> None:
    assert not tree_of(tmp_path, "sys/a: 1").is_live


def test_a_text_keeps_the_ends_of_its_lines(tmp_path: Path) -> None:
    (tmp_path / "two").write_bytes(b"a\r\nb\r")
    assert HostTree(tmp_path).read_text(HostPath("/two")) == "a\r\nb\r"


def test_a_file_that_a_killed_process_of_this_number_left_is_in_nobodys_way(
    tmp_path: Path,
) -> None:
    (tmp_path / f".file.{os.getpid()}").write_text("half")
    HostTree(tmp_path).replace(HostPath("/file"), b"whole\n")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "whole\n"


DEAD = 1 << 24
"""A number that no process has."""


@pytest.mark.parametrize("change", ["replace", "remove"])
def test_a_write_removes_what_killed_runs_left_of_the_same_file(
    tmp_path: Path, change: str
) -> None:
    for name in (f".file.{DEAD}", f".file.{DEAD + 1}", f".other.{DEAD}", ".file.1", ".file.x"):
        (tmp_path / name).write_text("half")
    (tmp_path / f".file.{DEAD + 2}").symlink_to("/nowhere")
    tree = HostTree(tmp_path)
    tree.replace(HostPath("/file"), b"new") if change == "replace" else tree.remove(
        HostPath("/file")
    )
    left = {path.name for path in tmp_path.iterdir()} - {"file"}
    assert left == {f".other.{DEAD}", ".file.1", ".file.x", f".file.{DEAD + 2}"}


def test_a_temporary_file_of_a_run_in_another_pid_namespace_is_kept(tmp_path: Path) -> None:
    """Its process has no number here, and holds the lock."""
    temporary = tmp_path / f".file.{DEAD}"
    with temporary.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        HostTree(tmp_path).replace(HostPath("/file"), b"new")
        assert temporary.exists()
    HostTree(tmp_path).replace(HostPath("/file"), b"newer")
    assert not temporary.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_temporary_file_of_another_user_is_kept(tmp_path: Path) -> None:
    temporary = tmp_path / f".file.{DEAD}"
    temporary.write_text("mine")
    os.chown(temporary, 1234, 1234)
    HostTree(tmp_path).replace(HostPath("/file"), b"new")
    assert temporary.exists()


def test_any_write_in_a_directory_of_vfiomgr_removes_all_leftovers(tmp_path: Path) -> None:
    tree = HostTree(tmp_path)
    tree.make_directory(STATE / "origins")
    (tmp_path / f"var/lib/vfiomgr/origins/.gone.{DEAD}").write_text("half")
    tree.replace(STATE / "origins/record", b"new")
    assert tree.children(STATE / "origins") == ["record"]


WRITERS: dict[str, Callable[[HostTree, HostPath], object]] = {
    "replace": lambda tree, at: tree.replace(at / "file", b"new"),
    "write": lambda tree, at: tree.write(at / "file", "new"),
    "remove": lambda tree, at: tree.remove(at / "file"),
    "remove empty directory": lambda tree, at: tree.remove_empty_directory(at / "empty"),
    "make directory": lambda tree, at: tree.make_directory(at / "made"),
    "change access": lambda tree, at: tree.change_access(at / "file", NodeAccess(0, 0, 0o640)),
    "open": lambda tree, at: os.close(tree.open(at / "new", os.O_CREAT | os.O_WRONLY)),
}


@pytest.mark.parametrize("is_late", [False, True], ids=["before", "while resolved"])
@pytest.mark.parametrize("name", WRITERS)
def test_no_change_leaves_the_root_where_a_directory_is_exchanged_for_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, *, is_late: bool
) -> None:
    """After a scan has seen it, or even after the path was resolved again."""
    outside, etc = tmp_path / "outside", tmp_path / "root/etc"
    (outside / "empty").mkdir(parents=True)
    (etc / "udev/empty").mkdir(parents=True)
    for directory in (outside, etc / "udev"):
        (directory / "file").write_text("old")
        (directory / "file").chmod(0o600)
    before = pictured(outside)
    tree, at = HostTree(tmp_path / "root"), HostPath("/etc/udev")
    assert tree.read(at / "file") == "old"
    assert tree.children(at) == ["empty", "file"]

    def exchange() -> None:
        (etc / "udev").rename(etc / "was")
        (etc / "udev").symlink_to(outside)

    resolve = Inside.directory

    def exchanged(inside: Inside, path: str, *links: int) -> str:
        found = resolve(inside, path, *links)
        if (etc / "udev").is_dir() and not (etc / "udev").is_symlink():
            exchange()
        return found

    if is_late:
        monkeypatch.setattr(Inside, "directory", exchanged)
    else:
        exchange()
    with suppress(OSError, HostError):
        WRITERS[name](tree, at)
    assert (etc / "udev").is_symlink()
    assert pictured(outside) == before


def pictured(place: Path) -> dict[str, tuple[int, str]]:
    """The modes and texts of all files below a directory."""
    return {
        str(path): (path.stat().st_mode, path.read_text() if path.is_file() else "")
        for path in place.rglob("*")
    }


def test_owner_and_label_of_a_file_that_is_replaced_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("old\n")
    label = {"security.selinux": b"container_config_t"}
    kept: dict[str, bytes] = {}
    owners: list[tuple[int, int]] = []
    stat_of = os.stat

    def of_another(path: str | int, **options: Any) -> os.stat_result:
        found = list(stat_of(path, **options))
        found[4:6] = (12345, 54321) if str(path).startswith("/proc/self/fd/") else found[4:6]
        return os.stat_result(found)

    module = "vfiomgr.host.durable.os"
    monkeypatch.setattr(f"{module}.listxattr", lambda of: list(label if of != 0 else ()))
    monkeypatch.setattr(
        f"{module}.getxattr", lambda of, name: label[name] if isinstance(of, str) else b""
    )
    monkeypatch.setattr(f"{module}.setxattr", lambda _, name, value: kept.update({name: value}))
    monkeypatch.setattr(f"{module}.fchown", lambda _, uid, gid: owners.append((uid, gid)))
    monkeypatch.setattr(f"{module}.stat", of_another)
    HostTree(tmp_path).replace(HostPath("/file"), b"new\n", 0o640)
    assert (kept, owners) == (label, [(12345, 54321)])
    assert (tmp_path / "file").read_text() == "new\n"


def test_a_file_system_without_extended_attributes_keeps_nothing_from_being_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacking(_: object) -> list[str]:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    (tmp_path / "file").write_text("old\n")
    monkeypatch.setattr("vfiomgr.host.tree.os.listxattr", lacking)
    HostTree(tmp_path).replace(HostPath("/file"), b"new\n")
    assert (tmp_path / "file").read_text() == "new\n"


def test_programs_come_from_a_fixed_path_without_the_callers_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "modprobe"
    fake.write_text("#!/bin/sh\necho fake\n")
    fake.chmod(0o755)
    (tmp_path / "vfiomgr-no-such-program").symlink_to(fake)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("LC_ALL", "xx_XX")
    monkeypatch.setenv("CALLER", "1")
    tree = HostTree("/")
    assert tree.run(("vfiomgr-no-such-program",)) is None
    with pytest.raises(ProgramFailed, match="cannot run"):
        tree.call("vfiomgr-no-such-program")
    with pytest.raises(HostError) as refused:
        tree.load_module("vfiomgr-no-such-module")
    assert "fake" not in refused.value.message
    said = dict(line.split("=", 1) for line in (tree.run(("env",)) or "").splitlines())
    assert {"PATH": PROGRAM_PATH, "LC_ALL": "C"}.items() <= said.items()
    assert set(said) <= {"PATH", "LC_ALL", "PWD", "SHLVL", "_"}
    tree.call("sh", "-c", '[ -z "$CALLER" ] && [ "$LC_ALL" = C ]')
