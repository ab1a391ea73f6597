from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from tests.unit.devices import host_of, pci_device
from tests.unit.host_files import tree_of
from vfiomgr.users.facet import UserFacts
from vfiomgr.users.uses import read_all_uses, read_host_uses

if TYPE_CHECKING:
    from pathlib import Path

    from vfiomgr.users.model import UnknownUsers

DISK = "sys/devices/pci0000:00/0000:03:00.0/nvme/nvme0/nvme0n1"


def test_a_mounted_partition_names_its_controller(tmp_path: Path) -> None:
    tree = tree_of(
        tmp_path,
        rf"""
        {DISK}/nvme0n1p2/partition: 2
        sys/class/block/nvme0n1p2 -> ../../../{DISK}/nvme0n1p2
        dev/nvme0n1p2: node
        proc/mounts: /dev/nvme0n1p2 /srv/a\040b ext4 rw 0 0\ntmpfs /run tmpfs rw 0 0
        """,
    )
    (use,) = read_host_uses(tree) or ()
    assert str(use.address) == "0000:03:00.0"
    assert (use.kind, use.what) == ("mounted-disk", "/dev/nvme0n1p2 on /srv/a b")


def test_a_mounted_logical_volume_names_the_controller_below_it(tmp_path: Path) -> None:
    tree = tree_of(
        tmp_path,
        rf"""
        {DISK}/size: 1
        sys/class/block/nvme0n1 -> ../../../{DISK}
        sys/devices/virtual/block/dm-0/slaves/nvme0n1 -> ../../../../../../{DISK}
        sys/class/block/dm-0 -> ../../devices/virtual/block/dm-0
        dev/dm-0: node
        dev/mapper/root -> ../dm-0
        proc/mounts: /dev/mapper/root / ext4 rw 0 0
        """,
    )
    (use,) = read_host_uses(tree) or ()
    assert str(use.address) == "0000:03:00.0"


def test_the_default_route_over_a_bridge_names_the_interface_below(tmp_path: Path) -> None:
    routes = (
        r"Iface Destination Gateway Flags RefCnt Use Metric Mask\n"
        r"br0 00000000 0101A8C0 3 0 0 0 00000000\n"
        r"eth0 0001A8C0 00000000 1 0 0 0 00FFFFFF"
    )
    nic = "sys/devices/pci0000:00/0000:05:00.0/net/eth0"
    tree = tree_of(
        tmp_path,
        f"""
        {nic}/address: 00
        sys/class/net/eth0 -> ../../../{nic}
        sys/devices/virtual/net/br0/lower_eth0 -> ../../../../../{nic}
        sys/class/net/br0 -> ../../devices/virtual/net/br0
        proc/net/route: {routes}
        """,
    )
    (use,) = read_host_uses(tree) or ()
    assert (str(use.address), use.kind, use.what) == ("0000:05:00.0", "default-route", "br0")


@pytest.mark.parametrize("own", ["mnt:[1]", None])
def test_a_mount_of_another_namespace_counts_for_those_who_decide(
    tmp_path: Path, own: str | None
) -> None:
    row = "50 40 259:2 / /mnt/a\\040b rw - ext4 /dev/elsewhere rw"
    tree = tree_of(
        tmp_path,
        rf"""
        {DISK}/nvme0n1p2/partition: 2
        sys/class/block/nvme0n1p2 -> ../../../{DISK}/nvme0n1p2
        sys/dev/block/259:2 -> ../../../{DISK}/nvme0n1p2
        proc/1/mounts: tmpfs /run tmpfs rw 0 0
        proc/70/ns/mnt -> mnt:[2]
        proc/71/ns/mnt -> mnt:[2]
        proc/71/comm: sh
        proc/71/root -> /
        proc/71/mountinfo: 49 1 0:40 / / rw shared:1 - overlay none rw\n{row}\nodd
        proc/72/ns/mnt -> mnt:[2]
        proc/72/root -> /
        proc/72/mountinfo: 51 1 259:2 / /twice rw - ext4 /dev/elsewhere rw
        """,
    )
    if own is not None:
        (tmp_path / "proc/1/ns").mkdir()
        (tmp_path / "proc/1/ns/mnt").symlink_to(own)
    assert read_host_uses(tree) == ()
    found = [(use.what, use.lift) for use in read_all_uses(tree, ()) or ()]
    said = "/dev/elsewhere on /mnt/a b in the mount namespace of sh (PID 71)"
    assert found == ([(said, "nsenter -t 71 -m umount '/mnt/a b'")] if own else [])


def test_a_mount_that_the_host_has_too_is_named_once(tmp_path: Path) -> None:
    row = "50 40 259:2 / /srv rw shared:2 - ext4 /dev/nvme0n1p2 rw"
    tree = tree_of(
        tmp_path,
        rf"""
        {DISK}/nvme0n1p2/partition: 2
        sys/class/block/nvme0n1p2 -> ../../../{DISK}/nvme0n1p2
        sys/dev/block/259:2 -> ../../../{DISK}/nvme0n1p2
        dev/nvme0n1p2: node
        proc/1/mounts: /dev/nvme0n1p2 /srv ext4 rw 0 0
        proc/1/mountinfo: {row}
        proc/1/ns/mnt -> mnt:[1]
        proc/71/ns/mnt -> mnt:[2]
        proc/71/root -> /
        proc/71/mountinfo: {row}
        """,
    )
    (use,) = read_all_uses(tree, ()) or ()
    assert (use.what, use.lift) == ("/dev/nvme0n1p2 on /srv", "umount /srv")


def test_a_loop_device_names_the_disk_below_it(tmp_path: Path) -> None:
    tree = tree_of(
        tmp_path,
        rf"""
        {DISK}/size: 1
        sys/class/block/nvme0n1 -> ../../../{DISK}
        sys/devices/virtual/block/loop0/loop/backing_file: /dev/nvme0n1
        sys/class/block/loop0 -> ../../devices/virtual/block/loop0
        sys/devices/virtual/block/loop1/loop/backing_file: /srv/image
        sys/class/block/loop1 -> ../../devices/virtual/block/loop1
        dev/nvme0n1: node
        dev/loop0: node
        dev/loop1: node
        proc/mounts: /dev/loop0 /a ext4 rw 0 0
/dev/loop1 /b ext4 rw 0 0
        """,
    )
    (use,) = read_host_uses(tree) or ()
    assert (str(use.address), use.what) == ("0000:03:00.0", "/dev/loop0 on /a")


@pytest.mark.parametrize(("enabled", "count"), [("1", 1), ("0", 0)])
def test_a_disk_that_is_offered_over_the_network_is_used(
    tmp_path: Path, enabled: str, count: int
) -> None:
    namespace = "sys/kernel/config/nvmet/subsystems/nqn.lab/namespaces/1"
    tree = tree_of(
        tmp_path,
        f"""
        {DISK}/size: 1
        sys/class/block/nvme0n1 -> ../../../{DISK}
        {namespace}/device_path: /dev/nvme0n1
        {namespace}/enable: {enabled}
        dev/nvme0n1: node
        proc/mounts: tmpfs /run tmpfs rw 0 0
        """,
    )
    said = [(use.what, use.lift) for use in read_host_uses(tree) or ()]
    assert (
        said
        == [("/dev/nvme0n1 as NVMe-oF namespace 1 of nqn.lab", f"echo 0 > /{namespace}/enable")]
        * count
    )


def test_swap_counts_as_mounted(tmp_path: Path) -> None:
    tree = tree_of(
        tmp_path,
        rf"""
        {DISK}/nvme0n1p3/partition: 3
        sys/class/block/nvme0n1p3 -> ../../../{DISK}/nvme0n1p3
        dev/nvme0n1p3: node
        proc/swaps: Filename Type Size Used Priority\n/dev/nvme0n1p3 partition 1 0 -2
        """,
    )
    (use,) = read_host_uses(tree) or ()
    assert (use.kind, use.what) == ("mounted-disk", "/dev/nvme0n1p3 as swap")


def test_every_controller_on_the_way_to_a_disk_counts(tmp_path: Path) -> None:
    disk = "sys/devices/pci0000:00/0000:00:0e.0/pci10000:00/10000:01:00.0/nvme/nvme0/nvme0n1"
    tree = tree_of(
        tmp_path,
        f"""
        {disk}/size: 1
        sys/class/block/nvme0n1 -> ../../../{disk}
        dev/nvme0n1: node
        proc/1/mounts: /dev/nvme0n1 /home ext4 rw 0 0
        proc/mounts: tmpfs /run tmpfs rw 0 0
        """,
    )
    uses = [str(use.address) for use in read_host_uses(tree) or ()]
    assert uses == ["0000:00:0e.0", "10000:01:00.0"]


def test_odd_tables_are_passed_over(tmp_path: Path) -> None:
    tree = tree_of(
        tmp_path,
        r"""
        dev/sda: node
        proc/mounts: /dev/sda/.. / ext4\nshort\n\n/dev/none /x ext4 rw 0 0
        proc/net/route: Iface Destination\neth0 00000000
        proc/net/ipv6_route: 00 00
        proc/swaps: Filename
        """,
    )
    assert read_host_uses(tree) == ()


def test_a_root_that_is_mounted_from_no_node_is_found_by_its_number(tmp_path: Path) -> None:
    tree = tree_of(
        tmp_path,
        rf"""
        {DISK}/nvme0n1p2/partition: 2
        sys/dev/block/259:2 -> ../../../{DISK}/nvme0n1p2
        proc/mounts: /dev/root / ext4 rw 0 0
        proc/mountinfo: 22 1 259:2 / / rw,relatime shared:1 - ext4 /dev/root rw
        """,
    )
    (use,) = read_host_uses(tree) or ()
    assert (str(use.address), use.what) == ("0000:03:00.0", "/dev/root on /")


def test_a_volume_is_named_as_its_tool_named_it(tmp_path: Path) -> None:
    volume = "sys/devices/virtual/block/dm-0"
    tree = tree_of(
        tmp_path,
        f"""
        {DISK}/holders/dm-0/size: 1
        sys/class/block/nvme0n1 -> ../../../{DISK}
        {volume}/dm/name: vg-root
        sys/class/block/dm-0 -> ../../devices/virtual/block/dm-0
        proc/mounts: tmpfs /run tmpfs rw 0 0
        """,
    )
    (use,) = read_host_uses(tree) or ()
    assert use.what == "/dev/nvme0n1 as part of dm-0 (vg-root)"


def test_a_part_of_a_volume_is_used_though_nothing_is_mounted(tmp_path: Path) -> None:
    tree = tree_of(
        tmp_path,
        f"""
        {DISK}/nvme0n1p3/holders/md127/size: 1
        sys/class/block/nvme0n1p3 -> ../../../{DISK}/nvme0n1p3
        proc/mounts: tmpfs /run tmpfs rw 0 0
        """,
    )
    (use,) = read_host_uses(tree) or ()
    assert (str(use.address), use.what) == ("0000:03:00.0", "/dev/nvme0n1p3 as part of md127")


def test_a_member_of_a_zfs_pool_is_used(tmp_path: Path) -> None:
    files = f"""
        {DISK}/dev: 259:0
        sys/class/block/nvme0n1 -> ../../../{DISK}
        run/udev/data/b259:0: S:disk/by-id/x\\nE:ID_FS_TYPE=zfs_member
        proc/mounts: tank / zfs rw 0 0
        """
    assert read_host_uses(tree_of(tmp_path / "unloaded", files)) == ()
    tree = tree_of(tmp_path / "loaded", files + "proc/spl/kstat/zfs/tank/state: ONLINE\n")
    (use,) = read_host_uses(tree) or ()
    assert use.what == "/dev/nvme0n1 as part of a ZFS pool"


def test_a_disk_with_several_paths_names_the_controllers_below_it(tmp_path: Path) -> None:
    subsystem = "sys/devices/virtual/nvme-subsystem/nvme-subsys0"
    controller = "sys/devices/pci0000:00/0000:03:00.0/nvme/nvme0"
    tree = tree_of(
        tmp_path,
        f"""
        {controller}/cntlid: 1
        {subsystem}/nvme0 -> ../../../../../{controller}
        {subsystem}/nvme0n1/size: 1
        sys/class/block/nvme0n1 -> ../../../{subsystem}/nvme0n1
        dev/nvme0n1: node
        proc/mounts: /dev/nvme0n1 / ext4 rw 0 0
        """,
    )
    (use,) = read_host_uses(tree) or ()
    assert str(use.address) == "0000:03:00.0"


def test_every_member_of_a_btrfs_is_used(tmp_path: Path) -> None:
    tree = tree_of(
        tmp_path,
        f"""
        {DISK}/size: 1
        sys/class/block/nvme0n1 -> ../../../{DISK}
        sys/fs/btrfs/0a1b/devices/nvme0n1 -> ../../../../{DISK}
        proc/mounts: tmpfs /run tmpfs rw 0 0
        """,
    )
    (use,) = read_host_uses(tree) or ()
    assert use.what == "/dev/nvme0n1 as part of btrfs 0a1b"


USB = "/devices/pci0000:00/0000:00:14.0/usb1/1-3/1-3:1.0/input/input2"
KEYS = 'N: Name="Board"\nS: Sysfs={}\nH: Handlers=sysrq kbd leds event2\n'
BUTTON = (
    'N: Name="Power Button"\nS: Sysfs=/devices/LNXPWRBN:00/input/input0\nH: Handlers=kbd event0\n'
)
PS2 = "/devices/platform/i8042/serio0/input/input3"


@pytest.mark.parametrize(
    ("places", "users"),
    [
        ((USB,), ["0000:00:14.0"]),
        ((USB, USB.replace("1-3", "1-4")), ["0000:00:14.0"]),
        ((USB, PS2), []),
        ((USB, USB.replace("0000:00:14.0", "0000:05:00.3")), []),
        ((PS2,), []),
        ((), []),
    ],
)
def test_the_only_keyboard_is_a_use_of_its_controller(
    tmp_path: Path, places: tuple[str, ...], users: list[str]
) -> None:
    tree = tree_of(tmp_path, "proc/mounts: tmpfs /run tmpfs rw 0 0\n")
    (tmp_path / "proc/bus/input").mkdir(parents=True)
    listed = "\n".join((BUTTON, *(KEYS.format(place) for place in places)))
    (tmp_path / "proc/bus/input/devices").write_text(listed)
    uses = [use for use in read_host_uses(tree) or () if use.kind == "keyboard"]
    assert [str(use.address) for use in uses] == users
    assert all(use.what == "Board, the only keyboard" for use in uses)


POINTS = 'N: Name="Mouse"\nS: Sysfs={}\nH: Handlers=mouse0 event5\n'
OF_A_PROGRAM = POINTS.format("/devices/virtual/input/input9")
BLUETOOTH = "/devices/virtual/misc/uhid/0005:046D:B023.0004/input/input8"


@pytest.mark.parametrize(
    ("places", "users"),
    [
        ((USB,), ["0000:00:14.0"]),
        ((USB, PS2), []),
        ((USB, BLUETOOTH), []),
        ((USB, USB.replace("0000:00:14.0", "0000:05:00.3")), []),
        ((PS2,), []),
        ((), []),
    ],
)
def test_the_only_mouse_is_a_use_of_its_controller(
    tmp_path: Path, places: tuple[str, ...], users: list[str]
) -> None:
    tree = tree_of(tmp_path, "proc/mounts: tmpfs /run tmpfs rw 0 0\n")
    (tmp_path / "proc/bus/input").mkdir(parents=True)
    both = (KEYS.format(USB), KEYS.format(PS2), OF_A_PROGRAM)
    listed = "\n".join((BUTTON, *both, *(POINTS.format(place) for place in places)))
    (tmp_path / "proc/bus/input/devices").write_text(listed)
    uses = read_host_uses(tree) or ()
    assert [(str(use.address), use.kind, use.what) for use in uses] == [
        (user, "mouse", "Mouse, the only mouse") for user in users
    ]


def test_inputs_that_cannot_be_read_are_unknown_users(tmp_path: Path) -> None:
    tree = tree_of(tmp_path, "proc/mounts: tmpfs /run tmpfs rw 0 0\n")
    unknown: list[UnknownUsers] = []
    assert read_host_uses(tree, unknown.append) == ()
    assert not unknown  # a kernel without inputs
    (tmp_path / "proc/bus/input/devices").mkdir(parents=True)  # which cannot be read
    assert read_host_uses(tree, unknown.append) == ()
    (one,) = unknown
    usb, disk = (replace(pci_device(), class_code=code) for code in ("0c0330", "010802"))
    there = replace(host_of(usb), users=UserFacts(None, unknown=(one,)))
    assert one.kind == "input"
    assert there.unknown_users_of(usb) == (one,)
    assert there.unknown_users_of(disk) == ()


FUNCTION = "sys/devices/pci0000:00/0000:00:1c.0/0000:05:00.0"
SERVED = "0000:05:00.0"
MEI = "0000:00:16.0"


def _link(kind: str, place: str) -> str:
    """A device of a class, below the device of `place`."""
    name = place.rpartition("/")[2]
    return f"sys/class/{kind}/{name} -> ../../../{place}\n{place}/device -> ../..\n"


TTY = _link("tty", f"{FUNCTION}/tty/ttyS4")
CONSOLE_IS = "proc/cmdline: root=/dev/sda1 console=tty0 console=ttyS4,115200n8\n"
WATCHDOG = _link("watchdog", f"{FUNCTION}/iTCO_wdt/watchdog/watchdog0")
TPM = "sys/devices/platform/MSFT0101:00"
OF_PLATFORM = (
    f"{_link('tpm', f'{TPM}/tpm/tpm0')}sys/bus/pci/drivers/mei_me/{MEI} -> ../../../../devices/x\n"
    f"sys/bus/pci/drivers/mei_me/bind: 1\n"
)


@pytest.mark.parametrize(
    ("files", "uses"),
    [
        (TTY + CONSOLE_IS, [(SERVED, "console", "ttyS4")]),
        (TTY + "sys/class/tty/console/active: tty0 ttyS4\n", [(SERVED, "console", "ttyS4")]),
        (TTY + CONSOLE_IS + "sys/class/tty/console/active: tty0\n", []),
        (TTY + "proc/cmdline: quiet netconsole=ttyS4 console=ttyS0\n", []),
        (TTY, []),
        (WATCHDOG, []),
        (
            WATCHDOG + f"{FUNCTION}/iTCO_wdt/watchdog/watchdog0/state: active\n",
            [(SERVED, "watchdog", "watchdog0")],
        ),
        (WATCHDOG + f"{FUNCTION}/iTCO_wdt/watchdog/watchdog0/state: inactive\n", []),
        (_link("watchdog", "sys/devices/platform/sp5100-tco/watchdog/watchdog0"), []),
        (_link("tpm", f"{FUNCTION}/tpm/tpm0"), [(SERVED, "tpm", "tpm0")]),
        (
            OF_PLATFORM + f"{TPM}/driver -> ../../../bus/platform/drivers/tpm_crb\n",
            [(MEI, "tpm", "tpm0 of the firmware")],
        ),
        (OF_PLATFORM + f"{TPM}/driver -> ../../../bus/platform/drivers/tpm_tis\n", []),
        (OF_PLATFORM, []),
    ],
)
def test_what_serves_the_host_is_a_use_of_its_function(
    tmp_path: Path, files: str, uses: list[tuple[str, str, str]]
) -> None:
    tree = tree_of(tmp_path, f"proc/mounts: tmpfs /run tmpfs rw 0 0\n{files}")
    found = read_host_uses(tree) or ()
    assert [(str(use.address), use.kind, use.what) for use in found] == uses
