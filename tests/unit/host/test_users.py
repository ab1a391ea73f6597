"""Processes that have device nodes open: their units, disks below volumes, what cannot be seen."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.unit.host_files import tree_of
from vfiomgr.host.users import read_users
from vfiomgr.model.pci import PciAddress

if TYPE_CHECKING:
    from pathlib import Path

    from vfiomgr.host.tree import HostTree

DISK = "sys/devices/pci0000:00/0000:03:00.0/nvme/nvme0/nvme0n1"
MACHINE = "0::/machine.slice/machine-qemu-3-win.scope/libvirt/emulator"
SESSION = "0::/user.slice/user-1000.slice/user@1000.service/app.slice/app-steam.scope"


def test_who_where_and_in_which_unit(tmp_path: Path) -> None:
    tree = tree_of(
        tmp_path,
        f"""
        proc/1/comm: systemd
        proc/1/fd/0 -> /dev/null
        proc/812/comm: qemu-system-x86
        proc/812/cgroup: {MACHINE}
        proc/812/fd/3 -> /dev/vfio/12
        proc/812/fd/4 -> /dev/vfio/12
        proc/813/comm: steam
        proc/813/cgroup: {SESSION}
        proc/813/fd/9 -> /dev/dri/renderD128
        proc/814/comm: bash
        proc/814/cgroup: 0::/
        proc/814/fd/9 -> /dev/nvidia0
        """,
    )
    assert [str(user) for user in read_users(tree) or ()] == [
        "qemu-system-x86 (PID 812, machine-qemu-3-win.scope)",
        "steam (PID 813, app-steam.scope)",
        "bash (PID 814)",
    ]


def disk_tree(root: Path, opened: str) -> HostTree:
    return tree_of(
        root,
        f"""
        {DISK}/nvme0n1p1/partition: 1
        sys/class/block/nvme0n1p1 -> ../../../{DISK}/nvme0n1p1
        sys/devices/virtual/block/dm-0/slaves/nvme0n1p1 -> ../../../../../../{DISK}/nvme0n1p1
        sys/class/block/dm-0 -> ../../devices/virtual/block/dm-0
        proc/77/comm: qemu-system-x86
        proc/77/fd/5 -> {opened}
        """,
    )


@pytest.mark.parametrize("opened", ["/dev/nvme0n1p1", "/dev/dm-0"])
def test_a_disk_that_is_open_names_the_controller_below_it(tmp_path: Path, opened: str) -> None:
    (user,) = read_users(disk_tree(tmp_path, opened)) or ()
    assert user.functions == (PciAddress.parse("0000:03:00.0"),)


def test_other_files_are_nobodys_business(tmp_path: Path) -> None:
    assert read_users(disk_tree(tmp_path, "/dev/sda")) == ()


def test_a_recording_tells_nothing(tmp_path: Path) -> None:
    assert read_users(tree_of(tmp_path, "sys/nothing: 1")) is None


def test_a_process_that_hides_its_files_makes_all_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = disk_tree(tmp_path, "/dev/dm-0")

    def deny(_path: str) -> list[str]:
        raise PermissionError

    monkeypatch.setattr("vfiomgr.host.users.os.listdir", deny)
    monkeypatch.setattr(type(tree), "children", lambda _self, path: ["77"] * (path == "/proc"))
    assert read_users(tree) is None
