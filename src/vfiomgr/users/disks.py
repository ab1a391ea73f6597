"""Uses of disks of PCI functions: file systems, swap, volumes, exports."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Collection, Iterable, Iterator
from functools import partial
from shlex import quote
from typing import TYPE_CHECKING, Final

from vfiomgr.expressions import expression
from vfiomgr.host import bounded
from vfiomgr.paths import HostPath
from vfiomgr.pci.model import PciAddress
from vfiomgr.users.model import HostUse, Report, UnknownUsers, warn
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree


BLOCK = HostPath("/sys/class/block")
NETWORK = HostPath("/sys/class/net")
_ADDRESS = expression(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_NVME_SUBSYSTEM = expression(r"/sys/devices/virtual/nvme-subsystem/[^/]+")
"""The subsystems above NVMe namespaces with several paths; their links lead to the controllers."""
_NVME = expression(r"nvme\d+")
_NODES = "/dev/"


def functions_below(tree: HostTree, device: HostPath) -> Iterator[PciAddress]:
    """The PCI functions below a block or network device, through bonds, LVM and RAID.

    All functions on its path count: a disk behind a VMD controller depends on both.
    """
    real = tree.resolve(device)
    yield from functions_on(real or "")
    for lower in (*_lower_devices(tree, device), *_nvme_paths(tree, real or "")):
        yield from functions_below(tree, lower)


def functions_on(path: str) -> Iterator[PciAddress]:
    """The PCI functions on a path of sysfs, the outermost first."""
    yield from map(PciAddress.parse, _ADDRESS.findall(path))


def _lower_devices(tree: HostTree, device: HostPath) -> Iterator[HostPath]:
    """The devices below a volume, a RAID, a loop device, a bond or a bridge."""
    for name in tree.children(device / "slaves"):
        yield device / "slaves" / name
    for name in tree.children(device):
        if name.startswith("lower_"):
            yield NETWORK / name.removeprefix("lower_")
    backing = tree.read(device / "loop/backing_file")
    if backing is not None and backing.startswith(_NODES):
        yield from block_device(tree, backing)


def _nvme_paths(tree: HostTree, real: str) -> Iterator[HostPath]:
    """The controllers of a namespace with several paths."""
    if subsystem := _NVME_SUBSYSTEM.match(real):
        paths = HostPath(subsystem[0])
        yield from (paths / name for name in tree.children(paths) if _NVME.fullmatch(name))


def block_device(tree: HostTree, node: str) -> Iterator[HostPath]:
    """The block device of a node below /dev; None if there is no such node."""
    real = tree.resolve(HostPath(node))
    if real is not None:
        yield BLOCK / real.removeprefix(_NODES).replace("/", "!")


def node_of(name: str) -> HostPath:
    """The kernel's node of the block device with this name in sysfs."""
    return HostPath(_NODES + name.replace("!", "/"))


PROC = HostPath("/proc")
_TABLES = (PROC / "1", PROC)
_READABLE = (
    "run as root of the host; in a container, in the host's PID namespace, with CAP_SYS_PTRACE"
)
_CLONE_NEWNS = 0x20000
_OCTAL = expression(r"\\([0-7]{3})")
_NUMBER, _MOUNT_POINT, _SEPARATOR = 2, 4, "-"
"""Columns of mountinfo (proc(5)); after the optional fields and a separator: type and source."""
_REMOTE = frozenset({"nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "afs", "9p", "fuse"})
"""Types of remote file systems, up to a dot; one of FUSE may be of any server."""


class Mount(Value):
    """A mounted file system; `holder` is a process if only its namespace has the mount."""

    source: str
    where: str
    number: str | None
    """major:minor of its device; some file systems have a number without a device."""
    pid: int | None = None
    holder: str = ""

    @property
    def what(self) -> str:
        """`/dev/sda1 on /srv`, or with `in the mount namespace of sh (PID 7)`."""
        place = f" in the mount namespace of {self.holder} (PID {self.pid})" if self.pid else ""
        return f"{self.source} on {self.where}{place}"

    @property
    def lift(self) -> str:
        """The command that unmounts it; empty for the root of a file tree."""
        if self.where == "/":
            return ""
        entering = f"nsenter -t {self.pid} -m " if self.pid else ""
        return f"{entering}umount {shlex.quote(self.where)}"


def host_lines(tree: HostTree, name: str) -> list[str]:
    """The lines of the host's table: that of PID 1, also inside a container."""
    texts = (tree.read_text(place / name) for place in _TABLES)
    return next((text for text in texts if text is not None), "").splitlines()


def unread_tables(tree: HostTree, *names: str) -> list[str]:
    """The tables of PID 1 that exist and cannot be read; those of other processes may differ."""
    own = (PROC / "1" / name for name in names)
    return [path for path in own if tree.exists(path) and tree.read_bytes(path, 1) is None]


def remote_places(tree: HostTree) -> tuple[str, ...]:
    """Mount points, with a trailing slash, whose server may never answer; not `/`."""
    found = []
    for line in host_lines(tree, "mountinfo"):
        fields, _, others = line.partition(f" {_SEPARATOR} ")
        row, kind = fields.split(), others.partition(" ")[0]
        if len(row) > _MOUNT_POINT and kind.partition(".")[0] in _REMOTE:
            found.append(f"{_unescape(row[_MOUNT_POINT]).rstrip('/')}/")
    return tuple(place for place in found if place != "/")


def read_mounts(tree: HostTree, report: Report = warn, *, everywhere: bool) -> Iterator[Mount]:
    """The host's own mounts; `everywhere` adds devices mounted only in other namespaces.

    A device can be mounted in a separate namespace (containers, `unshare -m`, services with
    PrivateMounts): PID 1 does not show it, but the kernel uses it.
    """
    own = tuple(_own_mounts(tree))
    yield from own
    if everywhere:
        seen = {mount.number for mount in own}
        for mount in _other_mounts(tree, report):
            if mount.number not in seen:
                seen.add(mount.number)
                yield mount


def _own_mounts(tree: HostTree) -> Iterator[Mount]:
    rows = (line.split() for line in host_lines(tree, "mountinfo"))
    numbers = {_unescape(r[_MOUNT_POINT]): r[_NUMBER] for r in rows if len(r) > _MOUNT_POINT}
    for line in host_lines(tree, "mounts"):
        source, _, rest = line.partition(" ")
        where = _unescape(rest.partition(" ")[0])
        yield Mount(source, where, numbers.get(where))


def _other_mounts(tree: HostTree, report: Report) -> Iterator[Mount]:
    """The mounts of all other namespaces, one table for each namespace.

    The table of a process in a chroot lacks the mounts outside it, and is empty if there are none
    in it: if all processes of a namespace have such a root, a child enters it. The root of a
    container is that of its namespace, `/` also from outside.
    """
    unread: dict[str, str] = {}
    empty: dict[str, str] = {}
    seen = {tree.link(PROC / "1/ns/mnt")}
    if None in seen:
        return  # a recording, or a user who may not see it
    for pid in filter(str.isdecimal, tree.children(PROC)):
        namespace = tree.link(PROC / pid / "ns/mnt")
        if namespace is None or namespace in seen:
            continue
        table = tree.read_text(PROC / pid / "mountinfo")
        if table and tree.link(PROC / pid / "root") == "/":
            seen.add(namespace)
            yield from _mounts_of(table, int(pid), tree.read(PROC / pid / "comm") or "?")
        elif tree.link(PROC / pid / "ns/mnt") == namespace:  # it has not ended meanwhile
            if table is None:
                unread[namespace] = PROC / pid / "mountinfo"
            else:
                empty[namespace] = pid
    for namespace, pid in empty.items():
        if namespace not in seen:
            yield from _mounts_inside(tree, pid, namespace, report)
    tables = [path for namespace, path in unread.items() if namespace not in seen | empty.keys()]
    _report_unread(tree, tables, report)


def _mounts_inside(tree: HostTree, pid: str, namespace: str, report: Report) -> Iterator[Mount]:
    """The mounts of a namespace that a child enters."""
    place, command = PROC / pid / "ns/mnt", tree.read(PROC / pid / "comm") or "?"
    table: str | None = None
    if tree.is_machine and tree.can_hang:  # the child is forked for a tree that can hang
        questions = {pid: partial(_table_at, tree.locate(place))}
        (table,) = bounded.ask(tree, questions).get(pid, (None,))
    if table:
        yield from _mounts_of(table, int(pid), command)
    elif tree.link(place) == namespace:  # it has not ended meanwhile
        why = f"cannot read the mounts around {command} (PID {pid}), which runs in a chroot"
        _report_disks(tree, why, f"end that process: kill {pid}", report)


def _table_at(place: str) -> Iterator[str | None]:
    """Enter a mount namespace, in which /proc may be absent, and read its table."""
    try:
        own = os.open("/proc/self", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        bounded.enter_namespace(place, _CLONE_NEWNS)
        table = os.open("mountinfo", os.O_RDONLY | os.O_CLOEXEC, dir_fd=own)
        with open(table, encoding="utf-8", errors="replace") as file:
            yield file.read()
    except OSError:
        yield None


def _report_unread(tree: HostTree, tables: Iterable[str], report: Report) -> None:
    """Report unreadable tables, which may name any disk."""
    for path in tables:
        _report_disks(tree, f"cannot read {path}, which may name a disk", _READABLE, report)


def _report_disks(tree: HostTree, why: str, remedy: str, report: Report) -> None:
    functions = tuple(sorted({a for found in disks_below(tree).values() for a in found}))
    report(UnknownUsers("disks", why, remedy, functions))


def _mounts_of(table: str, pid: int, command: str) -> Iterator[Mount]:
    for line in table.splitlines():
        fields, _, others = line.partition(f" {_SEPARATOR} ")
        row, (_, source, *_) = fields.split(), (*others.split(), "", "")
        if len(row) > _MOUNT_POINT and source:
            yield Mount(source, _unescape(row[_MOUNT_POINT]), row[_NUMBER], pid, command)


def _unescape(field: str) -> str:
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), field)


_ZFS = PROC / "spl/kstat/zfs"
_BTRFS = HostPath("/sys/fs/btrfs")
_BLOCK_NUMBERS = HostPath("/sys/dev/block")
_EXPORTS = HostPath("/sys/kernel/config/nvmet/subsystems")
_KIND: Final = "mounted-disk"


def read_disk_uses(
    tree: HostTree, report: Report = warn, *, everywhere: bool
) -> tuple[HostUse, ...]:
    """The uses of disks; `everywhere` reads the mount namespaces of all processes, as root."""
    _report_unread(tree, unread_tables(tree, "mounts", "mountinfo"), report)
    direct = (*_mounted(tree, report, everywhere=everywhere), *_swaps(tree), *_exported(tree))
    uses = tuple(dict.fromkeys(direct))
    used = {use.address for use in uses}
    volumes = dict.fromkeys(use for use in _volume_uses(tree) if use.address not in used)
    return (*uses, *volumes)


def _mounted(tree: HostTree, report: Report, *, everywhere: bool) -> Iterator[HostUse]:
    for mount in read_mounts(tree, report, everywhere=everywhere):
        for device in _mounted_device(tree, mount):
            for address in functions_below(tree, device):
                yield HostUse(address, _KIND, mount.what, mount.lift)


def _mounted_device(tree: HostTree, mount: Mount) -> Iterator[HostPath]:
    """The block device of a mount.

    Its node in another namespace may be another device here, so its number is tried first there.
    """
    number = None if mount.number is None else _BLOCK_NUMBERS / mount.number
    has_number = number is not None and tree.exists(number)
    if mount.pid is not None and number is not None and has_number:
        yield number
    elif mount.source.startswith("/dev/"):
        found = tuple(block_device(tree, mount.source))
        yield from found or ([number] if number is not None else [])


def _swaps(tree: HostTree) -> Iterator[HostUse]:
    for line in (tree.read_text(PROC / "swaps") or "").splitlines()[1:]:
        for source in line.split()[:1]:
            for device in block_device(tree, source) if source.startswith("/dev/") else ():
                for address in functions_below(tree, device):
                    yield HostUse(address, _KIND, f"{source} as swap", f"swapoff {quote(source)}")


def _exported(tree: HostTree) -> Iterator[HostUse]:
    """Disks that this kernel exports over NVMe-oF, without a claim (nvmet)."""
    for subsystem in tree.children(_EXPORTS):
        namespaces = _EXPORTS / subsystem / "namespaces"
        for number in tree.children(namespaces):
            source = tree.read(namespaces / number / "device_path") or ""
            enable = namespaces / number / "enable"
            if not source.startswith("/dev/") or tree.read(enable) != "1":
                continue
            what = f"{source} as NVMe-oF namespace {number} of {subsystem}"
            for device in block_device(tree, source):
                for address in functions_below(tree, device):
                    yield HostUse(address, _KIND, what, f"echo 0 > {quote(enable)}")


def _volume_uses(tree: HostTree) -> Iterator[HostUse]:
    """Disks and partitions that belong to a volume, a RAID or a pool, mounted or not."""
    for pool in tree.children(_BTRFS):
        for name in tree.children(_BTRFS / pool / "devices"):
            for address in functions_below(tree, BLOCK / name):
                yield HostUse(address, _KIND, f"/dev/{name} as part of btrfs {pool}")
    has_zfs = bool(tree.children(_ZFS))
    for name in tree.children(BLOCK):
        holders = tree.children(BLOCK / name / "holders")
        whole = [f"part of {_named(tree, holder)}" for holder in holders]
        if has_zfs and _is_zfs_member(tree, name):
            whole.append("part of a ZFS pool")
        for address in functions_below(tree, BLOCK / name) if whole else ():
            yield HostUse(address, _KIND, f"{node_of(name)} as {', '.join(whole)}")


def _named(tree: HostTree, holder: str) -> str:
    """A volume with its own name: `dm-0 (vg-root)`."""
    name = tree.read(BLOCK / holder / "dm/name")
    return f"{holder} ({name})" if name else holder


def _is_zfs_member(tree: HostTree, name: str) -> bool:
    """According to udev; the kernel module of ZFS does not show holders."""
    number = tree.read(BLOCK / name / "dev") or ""
    known = tree.read_text(HostPath("/run/udev/data") / f"b{number}") or ""
    return "E:ID_FS_TYPE=zfs_member" in known.splitlines()


def disks_below(tree: HostTree) -> dict[str, tuple[PciAddress, ...]]:
    """The names of all block devices above PCI functions, with these functions."""
    found = {name: tuple(functions_below(tree, BLOCK / name)) for name in tree.children(BLOCK)}
    return {name: addresses for name, addresses in found.items() if addresses}


_PAUSES = (0.0, 0.02, 0.1)
"""Seconds before each attempt: another vfiomgr that looks has a claim too, for microseconds."""
_CLAIMED, _FREE = "claimed", "free"


class _Answers(Value):
    """The kernel's answers about disks, by name."""

    claimed: frozenset[str]
    silent: frozenset[str]
    unopened: frozenset[str]


def read_claims(
    tree: HostTree, known: Collection[PciAddress], report: Report = warn
) -> Iterator[HostUse]:
    """Disks and partitions that are claimed or do not answer, of functions that are not `known`.

    Those with known users are not opened: an open with O_EXCL makes a concurrent mount fail.
    """
    disks = {
        name: functions
        for name, functions in disks_below(tree).items()
        if not set(functions) <= set(known) and not _is_hidden(tree, name)
    }
    answers = _ask(tree, disks)
    if answers.unopened and tree.is_machine and os.geteuid() == 0:
        nodes = ", ".join(sorted(map(node_of, answers.unopened)))
        why = f"cannot test whether disks are in use: cannot open {nodes}"
        functions = sorted({a for name in answers.unopened for a in disks[name]} - {*known})
        report(UnknownUsers("disks", why, "run with the host's /dev", tuple(functions)))
    for name, addresses in disks.items():
        what = _what(name, tree.children(BLOCK / name), answers)
        for address in addresses if what else ():
            if address not in known:
                yield HostUse(address, "mounted-disk", what, f"lsof {quote(node_of(name))}")


def _is_hidden(tree: HostTree, name: str) -> bool:
    """Whether it has no node: a path of an NVMe disk with several paths (GENHD_FL_HIDDEN)."""
    return tree.read(BLOCK / name / "hidden") == "1"


def _what(name: str, parts: Collection[str], answers: _Answers) -> str:
    """The description of a disk; empty if a partition of it has the claim."""
    if not answers.claimed.isdisjoint(parts):
        return ""
    if name in answers.claimed:
        return f"{node_of(name)}, claimed by something without a visible mount, volume or swap"
    if name in answers.silent:
        return f"{node_of(name)} does not answer; whether it is in use is unknown"
    return ""


def _ask(tree: HostTree, names: Iterable[str]) -> _Answers:
    """Which disks are claimed in every attempt, and which do not answer."""
    left = frozenset(names)
    silent, unopened = frozenset[str](), frozenset[str]()
    for pause in _PAUSES:
        if not left:
            break
        if pause:
            time.sleep(pause)
        answers = bounded.ask_each(tree, {n: partial(_look, tree, n) for n in sorted(left)})
        silent |= left - answers.keys()
        unopened |= {name for name, found in answers.items() if found == (None,)}
        left = frozenset(name for name, found in answers.items() if found == (_CLAIMED,))
    return _Answers(left, silent, unopened)


def _look(tree: HostTree, name: str) -> tuple[str | None]:
    number = tree.read(BLOCK / name / "dev")
    is_claimed = None if number is None else tree.is_claimed(node_of(name), number)
    return (None if is_claimed is None else _CLAIMED if is_claimed else _FREE,)
