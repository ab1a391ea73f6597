"""Owners: of device nodes, and of paths that only root may change.

Recovery acts as root on what it reads. A link, a FIFO or a file that another user may write is not
a record, whatever it contains.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from typing import TYPE_CHECKING

from vfiomgr.errors import UsageError
from vfiomgr.expressions import expression
from vfiomgr.host.inside import MOST_LINKS
from vfiomgr.paths import HostPath
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree


class NodeAccess(Value):
    """Owner, group and permission bits of a device node."""

    uid: int
    gid: int
    mode: int

    def __str__(self) -> str:
        """`1000:0 0600`."""
        return f"{self.uid}:{self.gid} {self.mode:04o}"


ROOT_ONLY = NodeAccess(0, 0, 0o600)
"""The defaults of devtmpfs for a node of VFIO."""


class NodeFact(Value):
    """A node of VFIO, with its owner and mode."""

    path: str
    access: NodeAccess


class NodeOwner(Value):
    """The owner of a function's nodes; `name` is as typed by the user."""

    name: str
    uid: int
    gid: int | None = None

    @property
    def access(self) -> NodeAccess:
        """Access for the group only if one was named."""
        return NodeAccess(self.uid, self.gid or 0, 0o600 if self.gid is None else 0o660)


_TABLES = {"user": HostPath("/etc/passwd"), "group": HostPath("/etc/group")}
_HIGHEST = 0xFFFFFFFE
"""The number above means `unchanged` to chown(2)."""
_NUMBER = expression(r"-?[0-9]+")
_DIGITS = 10
"""Digits of the highest number."""
_FORM = "use USER or USER:GROUP, by name or number, e.g. libvirt-qemu:kvm"


def find_owner(tree: HostTree | None, text: str) -> NodeOwner:
    """The account of USER or USER:GROUP, names or numbers; without a tree only numbers.

    Raises:
        UsageError: a part is empty or out of range, or the user or group does not exist.
    """
    user, colon, group = text.partition(":")
    for part, kind in ((user, "user"), (group or not colon, "group")):
        if not part:
            message = f"the owner {text!r} has no {kind}"
            raise UsageError(message, _FORM)
    uid = _identifier(tree, "user", user)
    return NodeOwner(text, uid, _identifier(tree, "group", group) if colon else None)


def _identifier(tree: HostTree | None, kind: str, name: str) -> int:
    if _NUMBER.fullmatch(name):
        return _in_range(kind, name)
    if tree is None:
        message = f"cannot look up the {kind} {name!r}: a snapshot contains no accounts"
        raise UsageError(message, f"use the number of the {kind}")
    text = tree.read_text(_TABLES[kind])
    if text is None:
        message = (
            f"cannot look up the {kind} {name!r}: cannot read {_TABLES[kind]} below {tree.root}"
        )
        raise UsageError(message, f"use the number of the {kind}")
    for line in text.splitlines():
        fields = line.split(":")
        if fields[0] == name and len(fields) > 2 and fields[2].isdecimal():  # noqa: PLR2004
            return int(fields[2])
    message = f"no such {kind}: {name!r} (not in {_TABLES[kind]})"
    raise UsageError(message, "use the number, which also works for accounts of a directory")


def _in_range(kind: str, digits: str) -> int:
    shown = digits.lstrip("0") or "0"
    if len(shown) > _DIGITS or not 0 <= int(shown) <= _HIGHEST:
        message = f"{digits} is not a {kind} number: the range is 0 to {_HIGHEST}"
        raise UsageError(message, _FORM)
    return int(shown)


_ROOT = 0


def weakness(tree: HostTree, path: str, *, owner: int = _ROOT) -> str | None:
    """Why others than root could change what is at a path; None if they cannot.

    Each directory and link on the path counts, including those that links lead to. The path may end
    in a directory that is searched for programs: nobody else may add to it. Before that, others may
    add to a directory with the sticky bit, since they cannot replace root's files there.
    """
    visited = list(_visited(tree, path))
    for number, (place, status) in enumerate(visited, start=1):
        is_last = number == len(visited)
        why = _why(status, owner, is_shared_fine=not is_last)
        if why:
            return f"{place} {why}"
    return None


def _why(status: os.stat_result, owner: int, *, is_shared_fine: bool) -> str:
    mode = status.st_mode
    if status.st_uid not in (_ROOT, owner):
        return f"is owned by user {status.st_uid}, not by root"
    if stat.S_ISLNK(mode) or (is_shared_fine and mode & stat.S_ISVTX):
        return ""
    if mode & stat.S_IWOTH:
        return "is writable by everyone"
    if mode & stat.S_IWGRP and status.st_gid != _ROOT:
        return f"is writable by group {status.st_gid}"
    return ""


def _visited(tree: HostTree, path: str) -> Iterator[tuple[str, os.stat_result]]:
    """Every directory, link and file on a path, as far as it exists."""
    place, names, links = "/", path.split("/"), MOST_LINKS
    root = tree.status(HostPath("/."))
    if root is not None:
        yield place, root
    while names and links:
        name = names.pop(0)
        if name in ("", "."):
            continue
        if name == "..":
            place = os.path.dirname(place)
            continue
        here = os.path.join(place, name)
        status = tree.status(HostPath(here))
        if status is None:
            return
        yield here, status
        target = tree.link(HostPath(here)) if stat.S_ISLNK(status.st_mode) else None
        if target is None:
            place = here
            continue
        links -= 1
        place = "/" if target.startswith("/") else place
        names = [*target.split("/"), *names]


MOST_BYTES = 64 << 20
"""Far more than the largest record; longer files are not read into memory."""
_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class NotARecord(Exception):  # noqa: N818 - it says what the file is
    """A file in vfiomgr's own directories that is not a record; the text says why."""


def open_own(tree: HostTree, file: HostPath) -> int:
    """Open a record for reading; never waits and never opens a device.

    Raises:
        FileNotFoundError: it does not exist.
        PermissionError: this user may not read it.
        NotARecord: it is not a regular file, or others may write it.
    """
    name = tree.locate(file)
    _require_regular(os.lstat(name))
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(name, flags)
    try:
        found = os.fstat(descriptor)
        _require_regular(found)
        _require_ours(tree, found)
    except NotARecord:
        os.close(descriptor)
        raise
    return descriptor


def read_own(tree: HostTree, file: HostPath, limit: int = MOST_BYTES) -> bytes:
    """All bytes of a record.

    Raises:
        OSError: it does not exist, or cannot be read.
        NotARecord: it is not a regular file, others may write it, or it is too large.
    """
    with os.fdopen(open_own(tree, file), "rb") as source:
        data = source.read(limit + 1)
    if len(data) > limit:
        message = f"it is larger than {limit} bytes"
        raise NotARecord(message)
    return data


def _require_regular(found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "not a regular file")
        message = f"it is {kind}"
        raise NotARecord(message)


_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFBLK: "a block device",
    stat.S_IFCHR: "a character device",
}


def _require_ours(tree: HostTree, found: os.stat_result) -> None:
    """Check owner and mode; a recorded host may belong to anyone, since it is not changed."""
    if not tree.is_live:
        return
    if found.st_uid not in (0, os.geteuid()):
        message = f"its owner is user {found.st_uid}, not root"
        raise NotARecord(message)
    if found.st_mode & _BY_OTHERS:
        message = f"others may write it (mode {stat.S_IMODE(found.st_mode):04o})"
        raise NotARecord(message)
