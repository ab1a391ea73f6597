"""The files that the domain of a desktop needs on its host: shared memory, input nodes, accounts.

Only of a running host: a recording has no nodes, and other owners.
"""

from __future__ import annotations

import stat
from collections.abc import Iterable
from typing import TYPE_CHECKING

from msgspec import field

from vfiomgr.errors import UsageError
from vfiomgr.expressions import expression
from vfiomgr.host.owners import find_owner
from vfiomgr.host.text import configuration_files, settings_of, text_of
from vfiomgr.libvirt.preflight.apparmor import readable
from vfiomgr.paths import HostPath
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree

QEMU_CONF = "/etc/libvirt/qemu.conf"
_SETTING = expression(r"(?ms)^[ \t]*(\w+)[ \t]*=[ \t]*(\[[^\]]*\]|\"[^\"]*\"|[^\s#]+)")
"""A setting of libvirt: a word, a string, or a list over several lines."""
_TEXT = expression(r'"([^"]*)"')
_USERS = ("libvirt-qemu", "qemu")
"""The accounts that Debian and Fedora build into libvirt."""
KVMFR_SIZES = "/sys/module/kvmfr/parameters/static_size_mb"
_FOR_ALL = 0o006
_FOR_GROUP = 0o060
_FOR_USER = 0o600
_MEMBERS = 3


class FileState(Value):
    """The properties of a file that decide whether QEMU can use it."""

    is_node: bool
    """Whether it is a character device."""
    size_bytes: int
    uid: int
    gid: int
    mode: int


class QemuAccount(Value):
    """The account that libvirt starts QEMU with."""

    name: str
    uid: int
    groups: frozenset[int]

    def may_use(self, file: FileState) -> bool:
        """Whether it may read and write a file, by owner and mode; root may always."""
        if self.uid == file.uid:
            needed = _FOR_USER
        else:
            needed = _FOR_GROUP if file.gid in self.groups else _FOR_ALL
        return not self.uid or file.mode & needed == needed


class DesktopFiles(Value):
    """What the rules use of these files."""

    files: dict[str, FileState] = field(default_factory=dict)
    """The existing ones among those that domains name, by path."""
    account: QemuAccount | None = None
    """None if unknown."""
    device_acl: frozenset[str] | None = None
    """`cgroup_device_acl`; None if libvirt does not confine QEMU to its nodes, or unknown."""
    sizes_mib: tuple[int, ...] = ()
    """The sizes of the nodes of kvmfr, by number; empty if unknown."""
    kept: frozenset[str] = frozenset()
    """Files that systemd-tmpfiles creates when the host starts."""
    denied: frozenset[str] = frozenset()
    """Files that AppArmor does not let QEMU read."""


def read_desktop(tree: HostTree, paths: Iterable[str]) -> DesktopFiles:
    """Read the state of these files, and what decides whether QEMU may open them."""
    named = sorted(set(paths))
    if not named:
        return DesktopFiles()
    settings = _settings(tree)
    rules = readable(tree)
    states = {path: _state(tree, path) for path in named}
    return DesktopFiles(
        {path: state for path, state in states.items() if state is not None},
        _account(tree, settings),
        _device_acl(settings),
        _sizes(tree),
        frozenset(_kept(tree)),
        frozenset(path for path in named if rules is not None and not rules.fullmatch(path)),
    )


def _settings(tree: HostTree) -> dict[str, str] | None:
    """The settings of libvirt's QEMU driver; None if the file cannot be read."""
    text = text_of(tree, QEMU_CONF)
    return None if text is None else dict(_SETTING.findall(text))


def _state(tree: HostTree, path: str) -> FileState | None:
    found = tree.status(tree.followed(HostPath(path)))
    if found is None:
        return None
    mode = found.st_mode
    return FileState(
        stat.S_ISCHR(mode), found.st_size, found.st_uid, found.st_gid, stat.S_IMODE(mode)
    )


def _account(tree: HostTree, settings: dict[str, str] | None) -> QemuAccount | None:
    """The user of QEMU: that of qemu.conf, or one that libvirt is usually built with."""
    if settings is None:
        return None
    given = settings.get("user", "").strip('"')
    for name in (given,) if given else _USERS:
        try:
            owner = find_owner(tree, name.removeprefix("+"))
        except UsageError:
            continue
        return QemuAccount(name, owner.uid, frozenset(_groups(tree, name, owner.uid)))
    return None


def _groups(tree: HostTree, name: str, uid: int) -> Iterable[int]:
    """The groups of an account, which QEMU keeps (virSecurityManagerPreFork, virGetGroupList)."""
    for line in (text_of(tree, "/etc/passwd") or "").splitlines():
        row = line.split(":")
        if len(row) > _MEMBERS and row[2] == str(uid) and row[3].isdecimal():
            name = row[0]
            yield int(row[3])
    for line in (text_of(tree, "/etc/group") or "").splitlines():
        row = line.split(":")
        if len(row) > _MEMBERS and row[2].isdecimal() and name in row[3].split(","):
            yield int(row[2])


def _device_acl(settings: dict[str, str] | None) -> frozenset[str] | None:
    """The nodes that QEMU may open besides those of its domain; empty for libvirt's default list.

    Unless the controller is left out of `cgroup_controllers` (qemu.conf).
    """
    if settings is None:
        return None
    controllers = settings.get("cgroup_controllers")
    if controllers is not None and "devices" not in _TEXT.findall(controllers):
        return None
    return frozenset(_TEXT.findall(settings.get("cgroup_device_acl", "")))


def _sizes(tree: HostTree) -> tuple[int, ...]:
    words = (text_of(tree, KVMFR_SIZES) or "").strip().split(",")
    return tuple(int(word) for word in words if word.isdecimal())


def _kept(tree: HostTree) -> Iterable[str]:
    """The paths in the second column of tmpfiles.d(5)."""
    directories = ("/etc/tmpfiles.d", "/run/tmpfiles.d", "/usr/lib/tmpfiles.d")
    for place in configuration_files(tree, directories):
        for line in settings_of(tree, place):
            yield from line.split()[1:2]
