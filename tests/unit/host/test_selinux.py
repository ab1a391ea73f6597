"""What is read of SELinux: enforcement, booleans and the types of files."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests.unit.host_files import tree_of
from vfiomgr.host import selinux
from vfiomgr.paths import SCRIPT

if TYPE_CHECKING:
    from pathlib import Path

BOOLEAN = f"sys/fs/selinux/booleans/{selinux.HOOKS_BOOLEAN}"


@pytest.mark.parametrize(("enforce", "expected"), [("1", True), ("0", False)])
def test_a_permissive_system_has_labels_and_denies_nothing(
    tmp_path: Path, enforce: str, *, expected: bool
) -> None:
    tree = tree_of(tmp_path, f"sys/fs/selinux/enforce: {enforce}")
    assert selinux.is_enabled(tree)
    assert selinux.is_enforcing(tree) is expected


def test_a_system_without_selinux_has_neither(tmp_path: Path) -> None:
    tree = tree_of(tmp_path, "etc/hostname: one")
    assert not selinux.is_enabled(tree)
    assert not selinux.is_enforcing(tree)
    assert selinux.boolean(tree, selinux.HOOKS_BOOLEAN) is None


@pytest.mark.parametrize(
    ("text", "expected"), [("0 0", False), ("1 1", True), ("0 1", False), ("1 0", True), ("", None)]
)
def test_the_current_value_of_a_boolean_counts_not_the_pending_one(
    tmp_path: Path, text: str, *, expected: bool | None
) -> None:
    tree = tree_of(tmp_path, f"{BOOLEAN}: {text}")
    assert selinux.boolean(tree, selinux.HOOKS_BOOLEAN) is expected


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        (b"system_u:object_r:virt_hook_t:s0\0", "virt_hook_t"),
        (b"system_u:object_r:virt_etc_t:s0:c1,c2", "virt_etc_t"),
        (b"system_u:object_r:etc_t", "etc_t"),
        (b"unlabeled", None),
    ],
)
def test_the_type_is_the_third_part_of_a_label(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, label: bytes, expected: str | None
) -> None:
    asked: list[tuple[object, ...]] = []

    def read(path: str, name: str, *, follow_symlinks: bool) -> bytes:
        asked.append((path, name, follow_symlinks))
        return label

    monkeypatch.setattr(os, "getxattr", read)
    tree = tree_of(tmp_path, f"{SCRIPT.removeprefix('/')}: #!/bin/sh")
    assert selinux.type_of(tree, SCRIPT) == expected
    assert asked == [(f"{tree.root}{SCRIPT}", "security.selinux", False)]


def test_a_label_that_cannot_be_read_is_unknown(tmp_path: Path) -> None:
    assert selinux.type_of(tree_of(tmp_path, "etc/hostname: one"), SCRIPT) is None
