"""Disks that somebody has for itself, and disks that do not answer."""

from __future__ import annotations

import errno
import os
import time
from typing import TYPE_CHECKING

import pytest

from tests.unit.host_files import tree_of
from vfiomgr.host import bounded
from vfiomgr.host.tree import HostTree
from vfiomgr.pci.model import PciAddress
from vfiomgr.users import disks
from vfiomgr.users.disks import node_of, read_claims

if TYPE_CHECKING:
    from pathlib import Path

    from vfiomgr.paths import HostPath

CONTROLLER = "sys/devices/pci0000:00/0000:03:00.0/ata1/block"
FILES = "\n".join(
    f"{CONTROLLER}/{name}/dev: {number}\nsys/class/block/{name} -> ../../../{CONTROLLER}/{name}"
    for name, number in (("sda", "8:0"), ("sda/sda1", "8:1"), ("sdb", "8:16"), ("sdc", "8:32"))
).replace("sys/class/block/sda/", "sys/class/block/")


class Asked(HostTree):
    """A tree whose kernel says which devices are claimed."""

    can_hang = False

    def __init__(self, root: Path, *claimed: str, dead: str = "") -> None:
        super().__init__(tree_of(root, FILES).root)
        self.claimed = list(claimed)
        self.dead = dead

    def is_claimed(self, path: HostPath, number: str) -> bool | None:
        """By node and number, each time anew."""
        assert number.startswith("8:")
        if path == self.dead:
            time.sleep(3600)
        return path in self.claimed


def test_a_claimed_partition_is_named_and_not_its_disk(tmp_path: Path) -> None:
    (use,) = read_claims(Asked(tmp_path, "/dev/sda", "/dev/sda1"), ())
    assert (str(use.address), use.kind) == ("0000:03:00.0", "mounted-disk")
    assert use.what.startswith("/dev/sda1, claimed by something")
    assert use.lift == "lsof /dev/sda1"


def test_a_claimed_disk_without_partitions_is_named(tmp_path: Path) -> None:
    (use,) = read_claims(Asked(tmp_path, "/dev/sdb"), ())
    assert use.what.startswith("/dev/sdb, claimed by something")


def test_disks_of_functions_with_known_uses_are_not_opened(tmp_path: Path) -> None:
    tree = Asked(tmp_path, dead="/dev/sdb")
    assert tuple(read_claims(tree, {PciAddress.parse("0000:03:00.0")})) == ()


def test_a_claim_of_a_moment_is_none(tmp_path: Path) -> None:
    class Passing(Asked):
        def is_claimed(self, path: HostPath, number: str) -> bool | None:
            """Claimed when it is looked at first: another vfiomgr looks as well."""
            found = super().is_claimed(path, number)
            self.claimed = []
            return found

    assert tuple(read_claims(Passing(tmp_path, "/dev/sdb"), ())) == ()


def test_a_dead_disk_keeps_nobody_waiting_and_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded, "DEADLINE", 0.3)
    monkeypatch.setattr(disks, "_PAUSES", (0.0,))
    tree = Asked(tmp_path, "/dev/sdc", dead="/dev/sdb")
    tree.can_hang = True
    said = [use.what for use in read_claims(tree, ())]
    assert said[0].startswith("/dev/sdb does not answer")
    assert said[1].startswith("/dev/sdc, claimed")


def test_root_hears_of_disks_that_cannot_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Container(Asked):
        is_machine = True

        def is_claimed(self, path: HostPath, number: str) -> bool | None:
            """Its /dev lacks a disk."""
            return None if path == "/dev/sdb" else super().is_claimed(path, number)

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.warns(UserWarning, match="cannot open /dev/sdb$"):
        assert tuple(read_claims(Container(tmp_path), ())) == ()


@pytest.mark.filterwarnings("error")
def test_a_path_of_a_disk_with_several_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Machine(Asked):
        is_machine = True

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    tree = Machine(tmp_path)
    path = tmp_path / CONTROLLER / "nvme0c0n1"
    path.mkdir()
    (path / "hidden").write_text("1\n")
    (tmp_path / "sys/class/block/nvme0c0n1").symlink_to(f"../../../{CONTROLLER}/nvme0c0n1")
    assert tuple(read_claims(tree, ())) == ()


def test_no_node_of_another_tree_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = tree_of(tmp_path, FILES + "\ndev/sda: 1")
    monkeypatch.setattr(os, "open", lambda *_: pytest.fail("a node was opened"))
    assert tree.is_claimed(node_of("sda"), "8:0") is None


@pytest.mark.parametrize(
    ("error", "answer"), [(errno.EBUSY, True), (errno.ENXIO, None), (None, False)]
)
def test_the_machine_is_asked_by_an_exclusive_open(
    monkeypatch: pytest.MonkeyPatch, *, error: int | None, answer: bool | None
) -> None:
    class Block:
        st_mode, st_rdev = 0o060600, os.makedev(8, 16)

    def open_exclusively(path: str, flags: int) -> int:
        assert (path, flags) == (
            "/dev/sdb",
            os.O_RDONLY | os.O_EXCL | os.O_NONBLOCK | os.O_CLOEXEC,
        )
        if error is not None:
            raise OSError(error, "")
        return 77

    tree = HostTree("/")
    monkeypatch.setattr(os, "stat", lambda _: Block)
    monkeypatch.setattr(os, "open", open_exclusively)
    monkeypatch.setattr(os, "close", lambda _: None)
    found = tree.is_claimed(node_of("sdb"), "8:16")
    assert tree.is_claimed(node_of("sdb"), "8:32") is None
    monkeypatch.undo()
    assert found is answer
