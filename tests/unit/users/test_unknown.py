"""What could name a user of a device and cannot be read becomes a fact, with its reason."""

from __future__ import annotations

import ctypes
import os
import signal
from errno import EACCES, ENAMETOOLONG, ENOENT, ENOMEM, EPERM, ESRCH
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.unit.devices import pci_device
from tests.unit.host_files import tree_of
from vfiomgr.host.tree import HostTree
from vfiomgr.pci.model import PciAddress
from vfiomgr.users.disks import read_disk_uses, read_mounts
from vfiomgr.users.processes import _UNNAMED, _is_unclear, read_holders, read_users
from vfiomgr.users.uses import read_network_uses
from vfiomgr.vgpu.facts import persistence_uses

if TYPE_CHECKING:
    from vfiomgr.paths import HostPath
    from vfiomgr.users.model import UnknownUsers

DISK = """
    sys/devices/pci0000:00/0000:03:00.0/block/sda/dev: 8:0
    sys/class/block/sda -> ../../devices/pci0000:00/0000:03:00.0/block/sda
    """
CONTROLLER = PciAddress.parse("0000:03:00.0")


class Hiding(HostTree):
    """A tree with files that exist and cannot be read."""

    hidden: tuple[str, ...] = ()

    def read_bytes(self, path: HostPath, limit: int = 4096) -> bytes | None:
        """As the real tree, but for those that are hidden."""
        return None if path.endswith(self.hidden) else super().read_bytes(path, limit)

    def read_whole(self, path: HostPath) -> bytes | None:
        """As the real tree, but for those that are hidden."""
        return None if path.endswith(self.hidden) else super().read_whole(path)


def hiding(root: Path, text: str, *hidden: str) -> Hiding:
    tree_of(root, text)
    tree = Hiding(root)
    tree.hidden = hidden
    return tree


@pytest.mark.parametrize("table", ["mounts", "mountinfo"])
def test_the_mounts_of_pid_1_that_cannot_be_read_are_not_those_of_this_process(
    tmp_path: Path, table: str
) -> None:
    tree = hiding(tmp_path, f"{DISK}\nproc/1/{table}: x\nproc/{table}: x", f"/proc/1/{table}")
    unknown: list[UnknownUsers] = []
    read_disk_uses(tree, unknown.append, everywhere=False)
    (found,) = unknown
    assert (found.kind, found.functions) == ("disks", (CONTROLLER,))
    assert found.why == f"cannot read /proc/1/{table}, which may name a disk"


def test_the_mounts_of_a_namespace_that_cannot_be_read_may_be_of_any_disk(tmp_path: Path) -> None:
    text = f"""{DISK}
    proc/1/ns/mnt -> mnt:[1]
    proc/7/ns/mnt -> mnt:[2]
    proc/7/mountinfo: x
    proc/8/ns/mnt -> mnt:[3]
    proc/8/mountinfo: x
    proc/9/ns/mnt -> mnt:[3]
    proc/9/root -> /
    proc/9/mountinfo: 70 1 8:0 / / rw - ext4 /dev/none rw
    """
    unknown: list[UnknownUsers] = []
    tree = hiding(tmp_path, text, "/proc/7/mountinfo", "/proc/8/mountinfo")
    read_disk_uses(tree, unknown.append, everywhere=True)
    assert [found.why for found in unknown] == [
        "cannot read /proc/7/mountinfo, which may name a disk"
    ]


def test_an_empty_table_of_mounts_is_one_of_a_process_with_another_root(tmp_path: Path) -> None:
    text = f"""{DISK}
    proc/1/ns/mnt -> mnt:[1]
    proc/7/ns/mnt -> mnt:[2]
    proc/7/comm: jail
    proc/8/ns/mnt -> mnt:[3]
    proc/9/ns/mnt -> mnt:[3]
    proc/9/root -> /
    proc/9/mountinfo: 70 1 8:0 / / rw - ext4 /dev/none rw
    """
    tree = tree_of(tmp_path, text)
    for pid in "78":
        (tmp_path / f"proc/{pid}/mountinfo").touch()
    unknown: list[UnknownUsers] = []
    read_disk_uses(tree, unknown.append, everywhere=True)
    (found,) = unknown
    assert (found.kind, found.functions) == ("disks", (CONTROLLER,))
    assert found.why == "cannot read the mounts around jail (PID 7), which runs in a chroot"
    assert found.lift == "end that process: kill 7"


@pytest.mark.parametrize("has_other", [False, True])
def test_a_chroot_with_mounts_in_it_does_not_show_those_around_it(
    tmp_path: Path, *, has_other: bool
) -> None:
    text = f"""{DISK}
    sys/dev/block/8:0 -> ../../class/block/sda
    proc/1/ns/mnt -> mnt:[1]
    proc/7/ns/mnt -> mnt:[2]
    proc/7/comm: mock
    proc/7/root -> /var/lib/mock/root
    proc/7/mountinfo: 80 70 0:5 / /proc rw - proc proc rw
    """
    other = """
    proc/8/ns/mnt -> mnt:[2]
    proc/8/comm: sh
    proc/8/root -> /
    proc/8/mountinfo: 70 1 8:0 / /mnt rw - ext4 /dev/sda rw
    """
    unknown: list[UnknownUsers] = []
    tree = tree_of(tmp_path, text + other * has_other)
    uses = read_disk_uses(tree, unknown.append, everywhere=True)
    why = "cannot read the mounts around mock (PID 7), which runs in a chroot"
    assert [each.why for each in unknown] == ([] if has_other else [why])
    said = "/dev/sda on /mnt in the mount namespace of sh (PID 8)"
    assert [use.what for use in uses] == ([said] if has_other else [])


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: enters a mount namespace")
@pytest.mark.parametrize("has_mount", [False, True])
def test_the_mounts_around_a_process_with_another_root_are_read_in_its_namespace(
    tmp_path: Path, *, has_mount: bool
) -> None:
    class Machine(HostTree):
        """With a PID 1 in another namespace, which a container does not show."""

        def link(self, path: HostPath) -> str | None:
            """As the kernel, but for PID 1."""
            return "mnt:[1]" if path == "/proc/1/ns/mnt" else super().link(path)

        def children(self, path: HostPath) -> list[str]:
            """As the kernel, but with one process."""
            return [str(child)] if path == "/proc" else super().children(path)

    outside, inside = tmp_path / "outside", tmp_path / "jail/inside"
    for place in (outside, inside):
        place.mkdir(parents=True)
    ready, told = os.pipe()
    child = os.fork()
    if child == 0:
        kernel = ctypes.CDLL(None)
        failed = kernel.unshare(0x20000) or kernel.mount(None, b"/", None, 0x44000, None)
        for place in (outside, *([inside] if has_mount else [])):
            path = os.fsencode(place)
            failed = failed or kernel.mount(b"tmpfs", path, b"tmpfs", 0, None)
        os.chroot(inside.parent)
        os.chdir("/")
        os.write(told, b"n" if failed else b"y")
        signal.pause()
    try:
        assert os.read(ready, 1) == b"y", "this container permits no mount namespace"
        assert len(Path(f"/proc/{child}/mountinfo").read_bytes().splitlines()) == has_mount
        unknown: list[UnknownUsers] = []
        mounts = list(read_mounts(Machine("/"), unknown.append, everywhere=True))
        assert unknown == []
        assert str(outside) in {mount.where for mount in mounts if mount.pid == child}
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready)
        os.close(told)


@pytest.mark.parametrize("table", ["route", "ipv6_route", "if_inet6", "tcp"])
def test_a_table_of_the_network_that_cannot_be_read_is_reported(tmp_path: Path, table: str) -> None:
    unknown: list[UnknownUsers] = []
    tree = hiding(tmp_path, f"proc/1/net/{table}: x", f"/proc/1/net/{table}")
    assert tuple(read_network_uses(tree, (), unknown.append)) == ()
    assert [(each.kind, each.why) for each in unknown] == [
        ("network", f"cannot read /proc/1/net/{table}")
    ]
    assert tuple(read_network_uses(tree_of(tmp_path / "ipv4", "proc/1/x: 1"), ())) == ()


def test_a_kernel_that_does_not_answer_may_have_routes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Machine(HostTree):
        is_machine = True

    monkeypatch.setattr("vfiomgr.users.uses.ask_routing", lambda _: None)
    tree_of(tmp_path, "proc/self/ns/net -> net:[1]\nproc/1/ns/net -> net:[1]")
    unknown: list[UnknownUsers] = []
    assert tuple(read_network_uses(Machine(tmp_path), (), unknown.append)) == ()
    assert [each.why for each in unknown] == [
        "the kernel does not list addresses and routes (rtnetlink)"
    ]


@pytest.mark.parametrize(
    ("number", "is_known"),
    [
        (EACCES, False),
        (EPERM, False),
        (ENOMEM, False),
        (ENOENT, True),
        (ESRCH, True),
        (ENAMETOOLONG, True),
    ],
)
def test_an_open_file_that_is_not_shown_makes_all_users_unknown_unless_it_is_closed_or_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, *, is_known: bool
) -> None:
    """A descriptor that was closed may be open again when it is looked for."""
    tree = tree_of(tmp_path, "proc/7/fd/0 -> /dev/vfio/3\nproc/7/fd/1 -> /dev/vfio/4")
    nodes = frozenset({"/dev/vfio/3", "/dev/vfio/4"})
    assert [user.node for user in read_users(tree) or ()] == sorted(nodes)
    readlink = os.readlink

    def failing(path: str, **options: int) -> str:
        if path.endswith("/fd/1"):
            raise OSError(number, os.strerror(number))
        return readlink(path, **options)

    monkeypatch.setattr("os.readlink", failing)
    for found in (read_users(tree), read_holders(tree, nodes)):
        assert (found and [user.node for user in found]) == (["/dev/vfio/3"] if is_known else None)


def test_a_file_whose_path_is_too_long_to_be_shown_may_be_a_disk() -> None:
    assert _is_unclear(_UNNAMED, frozenset({"/dev/sda"}), ("/srv/",), is_host=True)


@pytest.mark.parametrize(
    ("numbers", "node"),
    [
        ("sys/class/drm/card9/dev: 1:5", "/dev/dri/card9"),
        ("sys/class/vfio/11/dev: 1:5", "/dev/vfio/11"),
        ("sys/class/infiniband_mad/umad9/dev: 1:5", "/dev/infiniband/umad9"),
        ("sys/class/uio/uio3/dev: 1:5", "/dev/uio3"),
        ("sys/class/i2c-dev/i2c-4/dev: 1:5", "/dev/i2c-4"),
        ("proc/devices: Character devices:\\n  1 nvidia-frontend", "/dev/nvidia5"),
        ("proc/devices: 1 nvidia-uvm", None),
    ],
)
def test_a_node_that_is_open_under_another_name_is_known_by_its_number(
    tmp_path: Path, numbers: str, node: str | None
) -> None:
    """NVIDIA's driver container has /run/nvidia/driver/dev/nvidia0."""

    class Machine(HostTree):
        is_machine = True

    with open("/dev/zero", "rb") as file:
        link = f"proc/{os.getpid()}/fd/{file.fileno()} -> /run/nvidia/driver/dev/renamed"
        tree_of(tmp_path, f"{link}\n{numbers}")
        found = read_users(Machine(tmp_path))
    assert [user.node for user in found or ()] == ([node] if node else [])


def test_users_are_unknown_where_proc_hides_the_processes_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the option hidepid does: /proc/1 is not shown."""
    monkeypatch.setattr(
        "vfiomgr.users.processes._FIRST_NAMESPACE", os.stat("/proc/self/ns/pid").st_ino
    )
    machine = HostTree("/")
    exists = machine.exists
    monkeypatch.setattr(machine, "exists", lambda path: path != "/proc/1" and exists(path))
    assert read_users(machine) is None


@pytest.mark.parametrize("is_installed", [False, True])
def test_a_program_that_does_not_answer_leaves_the_persistence_mode_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_installed: bool
) -> None:
    class Machine(HostTree):
        is_machine = True

    gpu = pci_device()
    assert gpu.driver == "nvidia"
    program = "/usr/bin/nvidia-smi" if is_installed else None
    monkeypatch.setattr("shutil.which", lambda _name, path: path and program)
    unknown: list[UnknownUsers] = []
    assert tuple(persistence_uses(Machine(tmp_path), (gpu,), unknown.append)) == ()
    found = [(each.kind, each.functions) for each in unknown]
    assert found == ([("persistence-mode", (gpu.address,))] if is_installed else [])


def test_of_an_own_namespace_that_cannot_be_examined_the_processes_are_unknown(
    tmp_path: Path,
) -> None:
    tree = tree_of(tmp_path, "proc/1/x: 1")
    assert read_users(tree) == ()
    (tmp_path / "proc/self").write_text("no directory")
    assert read_users(tree) is None
