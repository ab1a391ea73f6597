"""Processes that have device nodes open: their units, disks below volumes, what cannot be seen."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, ClassVar

import pytest
from msgspec.structs import replace

from tests.unit.devices import host_of, pci_device, with_facts
from tests.unit.host_files import tree_of
from vfiomgr.host import bounded
from vfiomgr.host.tree import HostTree
from vfiomgr.pci.model import PciAddress
from vfiomgr.users.processes import (
    _numbers_of_others,
    read_holders,
    read_holders_by_name,
    read_users,
)

if TYPE_CHECKING:
    from pathlib import Path

    from vfiomgr.paths import HostPath
    from vfiomgr.users.model import UnknownUsers

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


def test_a_process_with_only_the_modeset_node_may_use_each_gpu_of_nvidia(tmp_path: Path) -> None:
    """A compositor keeps GPUs open by it; with a GPU's node as well, it uses that GPU."""
    tree = tree_of(
        tmp_path,
        """
        proc/1/fd/0 -> /dev/null
        proc/7/comm: kwin_wayland
        proc/7/fd/3 -> /dev/nvidia-modeset
        proc/8/comm: Xorg
        proc/8/fd/3 -> /dev/nvidia-modeset
        proc/8/fd/4 -> /dev/nvidia1
        sys/bus/pci/drivers/nvidia/bind:
        sys/bus/pci/drivers/nvidia/0000:01:00.0/driver: x
        sys/bus/pci/drivers/nvidia/0000:02:00.0/driver: x
        """,
    )
    gpus = tuple(map(PciAddress.parse, ("0000:01:00.0", "0000:02:00.0")))
    assert [(user.pid, user.node, user.functions) for user in read_users(tree) or ()] == [
        (7, "/dev/nvidia-modeset", gpus),
        (8, "/dev/nvidia1", ()),
    ]


def test_the_modeset_node_of_nvidia_is_known_by_its_number(tmp_path: Path) -> None:
    tree = tree_of(tmp_path, "proc/devices: 195 nvidia")
    assert _numbers_of_others(tree)["c195:254"] == "/dev/nvidia-modeset"


def test_a_mapping_holds_a_node_without_a_descriptor(tmp_path: Path) -> None:
    nodes = "rw-s 00000000 00:05 600"
    tree = tree_of(
        tmp_path,
        f"""
        proc/7/comm: cuda
        proc/7/fd/0 -> /dev/null
        proc/7/maps: 7f00-7f01 {nodes}    /dev/nvidia0\\n7f02-7f03 {nodes}   /dev/shm/x
        proc/8/comm: gone
        proc/8/fd/0 -> /dev/null
        proc/8/maps: 7f00-7f01 {nodes}    /dev/dri/card1 (deleted)\\n7f02-7f03 {nodes}
        proc/9/comm: both
        proc/9/fd/0 -> /dev/nvidia0
        proc/9/maps: 7f00-7f01 {nodes}    /dev/nvidia0
        proc/10/comm: kernel-thread
        proc/10/maps: 7f00-7f01 {nodes}    /dev/nvidia0
        """,
    )
    (tmp_path / "proc/10/fd").mkdir()
    assert [(user.pid, user.node) for user in read_users(tree) or ()] == [
        (7, "/dev/nvidia0"),
        (8, "/dev/dri/card1"),
        (9, "/dev/nvidia0"),
    ]


def test_a_node_whose_name_the_kernel_removed_is_still_held(tmp_path: Path) -> None:
    """Linux 6.12 removes the cdev of a device before it waits for the device's user."""
    tree = tree_of(
        tmp_path,
        """
        proc/7/comm: qemu
        proc/7/fd/0 -> /dev/vfio/devices/vfio3 (deleted)
        proc/7/fd/1 -> /home/a (deleted)
        """,
    )
    node = "/dev/vfio/devices/vfio3"
    for users in (read_users(tree), read_holders(tree, {node})):
        assert [(user.pid, user.node) for user in users or ()] == [(7, node)]


def test_nodes_of_infiniband_are_watched(tmp_path: Path) -> None:
    tree = tree_of(
        tmp_path,
        """
        proc/7/comm: ib_write_bw
        proc/7/fd/3 -> /dev/infiniband/uverbs0
        """,
    )
    assert [user.node for user in read_users(tree) or ()] == ["/dev/infiniband/uverbs0"]


def test_a_process_whose_mappings_are_locked_for_ever_keeps_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hanging(HostTree):
        can_hang = True

        def read_whole(self, path: HostPath) -> bytes | None:
            """As the real tree; the second process has its mappings locked."""
            if path == "/proc/12/maps":
                time.sleep(3600)
            return super().read_whole(path)

    for pid in (11, 12, 13):
        tree_of(
            tmp_path,
            f"""
            proc/{pid}/comm: p{pid}
            proc/{pid}/fd/0 -> /dev/null
            proc/{pid}/status: State:	D (disk sleep)
            proc/{pid}/maps: 7f00-7f01 rw-s 00000000 00:05 600    /dev/nvidia0
            """,
        )
    monkeypatch.setattr(bounded, "DEADLINE", 0.3)
    with pytest.warns(UserWarning, match="cannot read the mappings of process 12"):
        users = read_users(Hanging(tmp_path))
    assert [user.pid for user in users or ()] == [11, 13]


@pytest.mark.parametrize(("state", "times"), [("D (disk sleep)", 1), ("R (running)", 3)])
def test_a_process_that_is_late_is_asked_again_while_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, times: int
) -> None:
    root = tmp_path / "root"

    class Late(HostTree):
        can_hang = True

        def read_whole(self, path: HostPath) -> bytes | None:
            """As the real tree; the first readers of the second process wait."""
            asked = tmp_path / "asked"
            if path == "/proc/12/maps" and (not asked.exists() or asked.stat().st_size < times):
                with asked.open("a") as file:
                    file.write("x")
                time.sleep(3600)
            return super().read_whole(path)

    for pid in (11, 12):
        tree_of(
            root,
            f"""
            proc/{pid}/comm: p{pid}
            proc/{pid}/fd/0 -> /dev/null
            proc/{pid}/status: State:	{state}
            proc/{pid}/maps: 7f00-7f01 rw-s 00000000 00:05 600    /dev/nvidia0
            """,
        )
    monkeypatch.setattr(bounded, "DEADLINE", 0.3)
    assert [user.pid for user in read_users(Late(root)) or ()] == [11, 12]


def test_a_process_that_is_stuck_is_not_asked_again_because_another_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, asked = tmp_path / "root", tmp_path / "asked"

    class Silent(HostTree):
        can_hang = True

        def read_whole(self, path: HostPath) -> bytes | None:
            """As the real tree; mappings have no answer, and the questions are counted."""
            if path.endswith("/maps"):
                with asked.open("a") as file:
                    print(path, file=file)
                time.sleep(3600)
            return super().read_whole(path)

    for pid, state in ((11, "R (running)"), (12, "D (disk sleep)")):
        tree_of(
            root,
            f"""
            proc/{pid}/comm: p{pid}
            proc/{pid}/fd/0 -> /dev/null
            proc/{pid}/status: State:\t{state}
            """,
        )
    monkeypatch.setattr(bounded, "DEADLINE", 0.1)
    monkeypatch.setattr(bounded, "_LOOK", 0.05)
    with pytest.warns(UserWarning, match="cannot read the mappings of process 1"):
        assert read_users(Silent(root)) == ()
    questions = asked.read_text().split()
    assert (questions.count("/proc/11/maps"), questions.count("/proc/12/maps")) == (6, 2)


QEMU = "/usr/bin/qemu-system-x86_64"


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ("-name\0guest=win,debug-threads=on\0-S", "win"),
        ("-S\0-name\0debug-threads=on,guest=a,,b", "a,b"),
        ("-name\0sandbox-7f3e,debug-threads=on", "sandbox-7f3e"),
        ("--name\0plain", "plain"),
        ("-name\0debug-threads=on", None),
        ("-machine\0q35,name=x", None),
        ("-name", None),
        ("", None),
    ],
)
def test_a_guest_is_called_as_qemu_was_told(
    tmp_path: Path, arguments: str, name: str | None
) -> None:
    tree = tree_of(
        tmp_path,
        """
        proc/812/comm: qemu-system-x86
        proc/812/fd/3 -> /dev/vfio/12
        proc/813/comm: steam
        proc/813/fd/3 -> /dev/dri/card0
        """,
    )
    for pid in (812, 813):
        (tmp_path / f"proc/{pid}/cmdline").write_text(f"{QEMU}\0{arguments}\0")
    guest, other = read_users(tree) or ()
    assert (guest.pid, guest.guest) == (812, name)
    assert str(guest).startswith(f"guest {name} (qemu" if name else "qemu-system-x86 (PID")
    assert other.guest is None, "it has no node of VFIO"
    assert read_holders(tree, {"/dev/vfio/12"}) == (guest,)


def test_the_name_of_a_guest_keeps_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hanging(HostTree):
        can_hang = True

        def read_whole(self, path: HostPath) -> bytes | None:
            """As the real tree; the memory of the process is locked."""
            if path == "/proc/12/cmdline":
                time.sleep(3600)
            return super().read_whole(path)

    tree_of(tmp_path, "proc/12/fd/0 -> /dev/vfio/3\nproc/12/comm: qemu-system-x86")
    monkeypatch.setattr(bounded, "DEADLINE", 0.3)
    (user,) = read_holders(Hanging(tmp_path), {"/dev/vfio/3"}) or ()
    assert (user.pid, user.guest) == (12, None)


def test_who_holds_certain_nodes_is_told_of_these_alone(tmp_path: Path) -> None:
    tree = tree_of(
        tmp_path,
        """
        proc/7/comm: qemu-system-x86
        proc/7/fd/3 -> /dev/vfio/12
        proc/7/fd/4 -> /dev/vfio/devices/vfio2
        proc/8/comm: other
        proc/8/fd/3 -> /dev/vfio/13
        """,
    )
    nodes = {"/dev/vfio/12", "/dev/vfio/devices/vfio2"}
    holders = read_holders(tree, nodes) or ()
    assert read_holders_by_name(tree, nodes) == holders
    assert [(user.pid, user.node) for user in holders] == [
        (7, "/dev/vfio/12"),
        (7, "/dev/vfio/devices/vfio2"),
    ]
    assert read_holders(tree, {"/dev/vfio/14"}) == ()
    assert read_holders(tree_of(tmp_path / "recorded", "sys/x: 1"), {"/dev/vfio/14"}) is None
    assert read_holders(tree_of(tmp_path / "recorded", "sys/x: 1"), set()) == ()


def test_who_holds_nodes_of_host_drivers_and_for_which_pod(tmp_path: Path) -> None:
    sandbox = "4f0e9a430e2f"
    tree = tree_of(
        tmp_path,
        f"""
        proc/7/comm: python3
        proc/7/fd/3 -> /dev/nvidia0
        proc/8/comm: qemu-system-x86
        proc/8/cmdline: qemu\0-name\0sandbox-{sandbox},debug-threads=on
        proc/8/fd/3 -> /dev/vfio/12
        run/containerd/io.containerd.runtime.v2.task/k8s.io/{sandbox}/config.json: {{"annotations": {{"io.kubernetes.cri.sandbox-namespace": "ml", "io.kubernetes.cri.sandbox-name": "a"}}}}
        """,  # noqa: E501 - a file of one line
    )
    first, second = read_holders(tree, {"/dev/nvidia0", "/dev/vfio/12"}) or ()
    assert (first.pid, first.pod) == (7, None)
    assert (second.pid, second.guest, second.pod) == (8, f"sandbox-{sandbox}", "ml/a")


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


class Machine(HostTree):
    """A tree whose descriptors lead to devices, as those of the machine do."""

    is_machine = True
    numbers: ClassVar = {"/proc/77/fd/5": "b259:1", "/proc/77/fd/6": "c240:0"}

    def device_of(self, path: HostPath) -> str | None:
        """By process and descriptor."""
        return self.numbers.get(path)


def test_a_disk_that_a_guest_has_by_another_name_is_known_by_its_number(tmp_path: Path) -> None:
    disk_tree(tmp_path, "/var/lib/storage")
    (tmp_path / DISK / "nvme0n1p1/dev").write_text("259:1\n")
    (user,) = read_users(Machine(tmp_path)) or ()
    assert (user.node, user.pid) == ("/dev/nvme0n1p1", 77)
    assert user.functions == (PciAddress.parse("0000:03:00.0"),)


class Containers(Machine):
    """Three GPUs and two disks; process 77 is in a container, process 78 in a service."""

    numbers: ClassVar = {
        "/proc/77/fd/5": "c226:129",
        "/proc/77/fd/6": "b8:16",
        "/proc/77/fd/7": "c195:255",
        "/proc/77/map_files/7f00-7f01": "c226:130",
    }

    def device_of(self, path: HostPath) -> str | None:
        """By process and descriptor; names on the host are those of the devices."""
        assert not path.startswith("/proc/78/fd/")
        return super().device_of(path)


@pytest.mark.parametrize("host", ["mnt:[1]", None])
def test_a_node_in_a_container_is_the_one_of_its_number_not_of_its_name(
    tmp_path: Path, host: str | None
) -> None:
    tree_of(
        tmp_path,
        """
        sys/class/drm/renderD128/dev: 226:128
        sys/class/drm/renderD129/dev: 226:129
        sys/class/drm/renderD130/dev: 226:130
        sys/devices/pci0000:00/0000:03:00.0/block/sda/dev: 8:0
        sys/devices/pci0000:00/0000:04:00.0/block/sdb/dev: 8:16
        sys/class/block/sda -> ../../devices/pci0000:00/0000:03:00.0/block/sda
        sys/class/block/sdb -> ../../devices/pci0000:00/0000:04:00.0/block/sdb
        proc/77/comm: ffmpeg
        proc/77/ns/mnt -> mnt:[2]
        proc/77/maps: 007f00-007f01 rw-s 00000000 00:05 600    /dev/dri/renderD128
        proc/77/fd/5 -> /dev/dri/renderD128
        proc/77/fd/6 -> /dev/sda
        proc/77/fd/7 -> /dev/nvidiactl
        """,
    )
    if host is not None:
        text = "proc/78/comm: steam\nproc/78/fd/5 -> /dev/dri/renderD128\n"
        tree_of(tmp_path, f"{text}proc/1/ns/mnt -> {host}\nproc/78/ns/mnt -> {host}")
    found = [(user.pid, user.node) for user in read_users(Containers(tmp_path)) or ()]
    named = ["/dev/dri/renderD129", "/dev/dri/renderD130", "/dev/nvidiactl", "/dev/sdb"]
    steam = [(78, "/dev/dri/renderD128")] if host else []
    assert sorted(found) == [*((77, node) for node in named), *steam]


def test_a_node_in_a_container_is_not_attributed_by_its_name(tmp_path: Path) -> None:
    class Renamed(Machine):
        numbers: ClassVar = {"/proc/77/fd/5": "c226:129"}

    tree_of(
        tmp_path,
        """
        sys/class/drm/renderD128/dev: 226:128
        sys/class/drm/renderD129/dev: 226:129
        proc/1/ns/mnt -> mnt:[1]
        proc/77/ns/mnt -> mnt:[2]
        proc/77/fd/5 -> /dev/dri/renderD128
        """,
    )
    assert [user.node for user in read_users(Renamed(tmp_path)) or ()] == ["/dev/dri/renderD129"]


def test_a_vfio_node_in_a_container_is_the_one_of_its_number(tmp_path: Path) -> None:
    class Renamed(Machine):
        numbers: ClassVar = {"/proc/77/fd/5": "c235:12"}

    tree_of(
        tmp_path,
        """
        sys/class/vfio/12/dev: 235:12
        proc/1/ns/mnt -> mnt:[1]
        proc/77/ns/mnt -> mnt:[2]
        proc/77/fd/5 -> /dev/gpu
        """,
    )
    (user,) = read_holders(Renamed(tmp_path), {"/dev/vfio/12"}) or ()
    assert (user.pid, user.node) == (77, "/dev/vfio/12")
    assert read_holders_by_name(Renamed(tmp_path), {"/dev/vfio/12"}) == ()


def test_the_generic_nodes_of_a_controller_name_it(tmp_path: Path) -> None:
    controller = f"{DISK}/../ng0n1"
    tree = tree_of(
        tmp_path,
        f"""
        {DISK}/size: 1
        {controller}/dev: 240:0
        sys/class/nvme-generic/ng0n1 -> ../../../{controller}
        proc/77/comm: smartctl
        proc/77/fd/6 -> /dev/ng0n1
        """,
    )
    (user,) = read_users(tree) or ()
    assert user.functions == (PciAddress.parse("0000:03:00.0"),)
    (tmp_path / "proc/77/fd/6").unlink()
    (tmp_path / "proc/77/fd/6").symlink_to("/dev/other")
    (user,) = read_users(Machine(tmp_path)) or ()
    assert user.node == "/dev/ng0n1"


def test_a_daemon_with_the_clock_of_a_network_adapter_uses_it(tmp_path: Path) -> None:
    clock = "sys/devices/pci0000:00/0000:06:00.0/ptp/ptp0"
    own = "sys/devices/virtual/ptp/ptp1"
    tree = tree_of(
        tmp_path,
        f"""
        {clock}/dev: 248:0
        sys/class/ptp/ptp0 -> ../../../{clock}
        {own}/dev: 248:1
        sys/class/ptp/ptp1 -> ../../../{own}
        proc/77/comm: chronyd
        proc/77/fd/6 -> /dev/ptp0
        proc/78/comm: phc2sys
        proc/78/fd/6 -> /dev/ptp1
        """,
    )
    (user,) = read_users(tree) or ()
    assert (user.command, user.functions) == ("chronyd", (PciAddress.parse("0000:06:00.0"),))


def test_a_process_with_a_file_that_never_answers_may_use_any_device_with_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hanging(Machine):
        can_hang = True

        def device_of(self, path: HostPath) -> str | None:
            """As the machine; one process has a file on a server that is gone."""
            if path.startswith("/proc/76/"):
                time.sleep(3600)
            return super().device_of(path)

    disk_tree(tmp_path, "/var/lib/storage")
    tree_of(tmp_path, "proc/76/comm: cat\nproc/76/fd/3 -> /net/file\nsys/class/vfio/12/dev: 235:12")
    (tmp_path / DISK / "nvme0n1p1/dev").write_text("259:1\n")
    monkeypatch.setattr(bounded, "DEADLINE", 0.3)
    unknown: list[UnknownUsers] = []
    (user,) = read_users(Hanging(tmp_path), unknown.append) or ()
    assert user.pid == 77
    (found,) = unknown
    assert found.why == "process 76 has a file open that does not answer and may be a device"
    gpu = replace(pci_device(), nodes=("/dev/nvidia0",))
    disk = pci_device("0000:03:00.0")
    host = with_facts(host_of(gpu, disk), unknown_users=(found,))
    assert [host.unknown_users_of(device) for device in (gpu, disk)] == [(found,)] * 2
    holding: list[UnknownUsers] = []
    assert read_holders(Hanging(tmp_path), {"/dev/vfio/12"}, holding.append) == ()
    assert [(each.kind, each.why) for each in holding] == [("open-files", found.why)]


def test_files_on_servers_are_not_asked_what_they_are(tmp_path: Path) -> None:
    class Asked(Machine):
        def device_of(self, path: HostPath) -> str | None:
            """As the machine; nobody waits for a server."""
            assert not path.startswith("/proc/76/")
            return super().device_of(path)

    disk_tree(tmp_path, "/var/lib/storage")
    lines = "70 1 0:50 / / rw - nfs4 srv:/root rw\n80 70 0:60 / /net rw - nfs4 srv:/x rw\n"
    tree_of(tmp_path, "proc/76/comm: qemu\nproc/76/fd/3 -> /net/file\nproc/1/comm: init")
    (tmp_path / "proc/1/mountinfo").write_text(lines)
    (tmp_path / DISK / "nvme0n1p1/dev").write_text("259:1\n")
    (user,) = read_users(Asked(tmp_path)) or ()
    assert user.pid == 77


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

    monkeypatch.setattr("vfiomgr.users.processes.os.listdir", deny)
    monkeypatch.setattr(type(tree), "children", lambda _self, path: ["77"] * (path == "/proc"))
    assert read_users(tree) is None
    assert read_holders(tree, {"/dev/vfio/12"}) is None
