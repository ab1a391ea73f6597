from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from vfiomgr.host.tree import HostTree
from vfiomgr.paths import HostPath

if TYPE_CHECKING:
    from pathlib import Path


def open_files() -> set[str]:
    """The descriptors of this process, without that of the look itself."""
    return {name for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")}


def test_files_that_are_closed_together_leave_those_of_others_open(tmp_path: Path) -> None:
    files = [HostPath(f"/{number}") for number in range(100)]
    for file in files:
        (tmp_path / file.name).write_text(f"{file.name}\n")
    tree = HostTree(tmp_path)
    before = open_files()
    with tree.closer.together():
        assert [tree.read(file) for file in files[:3]] == ["0", "1", "2"]
        others = [os.open(tmp_path / "0", os.O_RDONLY) for _ in range(3)]
        os.close(others.pop(1))  # a gap, which the next file fills
        assert [tree.read(file) for file in files[3:20]] == [file.name for file in files[3:20]]
        assert len(open_files() - before) == 20 + len(others)
        assert [tree.read(file) for file in files] == [file.name for file in files]
        assert len(open_files() - before) < 40
    assert open_files() - before == set(map(str, others))
    for descriptor in others:
        os.close(descriptor)


def test_threads_close_what_they_read_themselves(tmp_path: Path) -> None:
    tree, before = HostTree(tmp_path), open_files()
    (tmp_path / "file").write_text("text")
    (tmp_path / "kept").write_text("kept")
    kept = os.open(tmp_path / "kept", os.O_RDONLY)

    def read(_number: int) -> bool:
        with tree.closer.together():
            return all(tree.read(HostPath("/file")) == "text" for _ in range(100))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read, range(200)))
    assert os.pread(kept, 4, 0) == b"kept"
    os.close(kept)
    assert open_files() == before


def test_nothing_is_closed_where_nothing_was_read(tmp_path: Path) -> None:
    tree, before = HostTree(tmp_path), open_files()
    with tree.closer.together(), tree.closer.together():
        assert tree.read(HostPath("/absent")) is None
    assert open_files() == before
    (tmp_path / "file").write_text("text")
    assert tree.read(HostPath("/file")) == "text"
    assert open_files() == before
