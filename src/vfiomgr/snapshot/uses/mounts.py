"""Mounts in the mount namespace of the host and in those of all processes."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

from vfiomgr.paths import HostPath
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.host.tree import HostTree

PROC = HostPath("/proc")
_OCTAL = re.compile(r"\\([0-7]{3})")
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
    texts = (tree.read_text(place / name) for place in (PROC / "1", PROC))
    return next((text for text in texts if text is not None), "").splitlines()


def remote_places(tree: HostTree) -> tuple[str, ...]:
    """Mount points, with a trailing slash, whose server may never answer; not `/`."""
    found = []
    for line in host_lines(tree, "mountinfo"):
        fields, _, others = line.partition(f" {_SEPARATOR} ")
        row, kind = fields.split(), others.partition(" ")[0]
        if len(row) > _MOUNT_POINT and kind.partition(".")[0] in _REMOTE:
            found.append(f"{_unescape(row[_MOUNT_POINT]).rstrip('/')}/")
    return tuple(place for place in found if place != "/")


def read_mounts(tree: HostTree, *, everywhere: bool) -> Iterator[Mount]:
    """The host's own mounts; `everywhere` adds devices mounted only in other namespaces.

    A device can be mounted in a separate namespace (containers, `unshare -m`, services with
    PrivateMounts): PID 1 does not show it, but the kernel uses it.
    """
    own = tuple(_own_mounts(tree))
    yield from own
    if everywhere:
        seen = {mount.number for mount in own}
        for mount in _other_mounts(tree):
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


def _other_mounts(tree: HostTree) -> Iterator[Mount]:
    """The mounts of all other namespaces, one table for each namespace."""
    seen = {tree.link(PROC / "1/ns/mnt")}
    if None in seen:
        return  # a recording, or a user who may not see it
    for pid in filter(str.isdecimal, tree.children(PROC)):
        namespace = tree.link(PROC / pid / "ns/mnt")
        if namespace is None or namespace in seen:
            continue
        table = tree.read_text(PROC / pid / "mountinfo")
        if table:  # else it ended meanwhile; the next process may have the same namespace
            seen.add(namespace)
            yield from _mounts_of(table, int(pid), tree.read(PROC / pid / "comm") or "?")


def _mounts_of(table: str, pid: int, command: str) -> Iterator[Mount]:
    for line in table.splitlines():
        fields, _, others = line.partition(f" {_SEPARATOR} ")
        row, (_, source, *_) = fields.split(), (*others.split(), "", "")
        if len(row) > _MOUNT_POINT and source:
            yield Mount(source, _unescape(row[_MOUNT_POINT]), row[_NUMBER], pid, command)


def _unescape(field: str) -> str:
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), field)
