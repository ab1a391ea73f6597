"""What a service is to run belongs to root alone, with all that leads to it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from vfiomgr.host.owners import weakness
from vfiomgr.host.tree import HostTree

if TYPE_CHECKING:
    from pathlib import Path

OWN = os.getuid()
PROGRAM = "/opt/tool/bin/python"
OTHER = 4711


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """/opt/tool/bin/python -> python3 -> ../lib/python3, and /usr/bin/tool -> it."""
    root = tmp_path / "root"
    for directory in ("opt/tool/bin", "opt/tool/lib", "usr/bin", "tmp"):
        (root / directory).mkdir(parents=True)
    (root / "opt/tool/lib/python3").write_text("")
    (root / "opt/tool/lib/python3").chmod(0o755)
    (root / "opt/tool/bin/python3").symlink_to("../lib/python3")
    (root / "opt/tool/bin/python").symlink_to("python3")
    (root / "usr/bin/tool").symlink_to(PROGRAM)
    (root / "tmp").chmod(0o1777)
    return root


def weak(root: Path, path: str) -> str | None:
    return weakness(HostTree(root), path, owner=OWN)


def test_what_root_alone_can_write_is_fine(root: Path) -> None:
    for path in (PROGRAM, "/usr/bin/tool", "/opt/tool/bin", "/opt/tool/lib/absent.zip"):
        assert weak(root, path) is None


@pytest.mark.parametrize("place", ["opt", "opt/tool", "opt/tool/bin", "opt/tool/lib"])
def test_a_directory_on_the_way_that_everyone_may_write_is_named(root: Path, place: str) -> None:
    (root / place).chmod(0o777)
    for path in (PROGRAM, "/usr/bin/tool"):
        assert weak(root, path) == f"/{place} is writable by everyone"


def test_a_group_but_roots_may_not_write_either(root: Path) -> None:
    place = root / "opt/tool/lib/python3"
    place.chmod(0o775)
    os.chown(place, OWN, OTHER)
    assert weak(root, PROGRAM) == f"/opt/tool/lib/python3 is writable by group {OTHER}"
    os.chown(place, OWN, 0)
    assert weak(root, PROGRAM) is None


@pytest.mark.parametrize("place", ["opt/tool", "opt/tool/lib/python3", "opt/tool/bin/python3"])
def test_nobody_else_owns_a_directory_a_file_or_a_link(root: Path, place: str) -> None:
    os.chown(root / place, OTHER, 0, follow_symlinks=False)
    assert weak(root, PROGRAM) == f"/{place} is owned by user {OTHER}, not by root"


def test_a_sticky_directory_is_fine_on_the_way_and_not_at_the_end(root: Path) -> None:
    (root / "tmp/tool").mkdir()
    (root / "tmp/tool").chmod(0o755)
    assert weak(root, "/tmp/tool") is None  # noqa: S108 - of the tree
    assert weak(root, "/tmp") == "/tmp is writable by everyone"  # noqa: S108
    os.chown(root / "tmp/tool", OTHER, 0)
    assert weak(root, "/tmp/tool") is not None  # noqa: S108


def test_links_in_a_circle_end(root: Path) -> None:
    (root / "opt/a").symlink_to("b")
    (root / "opt/b").symlink_to("a")
    assert weak(root, "/opt/a") is None
