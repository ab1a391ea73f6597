"""Who may open a device node."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from vfiomgr.errors import UsageError
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
"""What devtmpfs gives to a node of VFIO."""


class NodeOwner(Value):
    """Who may open a function's nodes; `name` is what the user typed, for people."""

    name: str
    uid: int
    gid: int | None = None

    @property
    def access(self) -> NodeAccess:
        """The group gets in only where one was named."""
        return NodeAccess(self.uid, self.gid or 0, 0o600 if self.gid is None else 0o660)


_TABLES = {"user": HostPath("/etc/passwd"), "group": HostPath("/etc/group")}
_HIGHEST = 0xFFFFFFFE
"""The one above it means `leave it` to chown(2)."""
_NUMBER = re.compile(r"-?[0-9]+")
_DIGITS = 10
"""Of the highest number."""
_FORM = "write USER or USER:GROUP, by name or number, e.g. libvirt-qemu:kvm"


def find_owner(tree: HostTree | None, text: str) -> NodeOwner:
    """Who is meant by USER or USER:GROUP, names or numbers; without a tree numbers alone.

    Raises:
        UsageError: a part is empty or out of range, or the host has no such user or group.

    """
    user, colon, group = text.partition(":")
    for part, kind in ((user, "user"), (group or not colon, "group")):
        if not part:
            message = f"the owner {text!r} names no {kind}"
            raise UsageError(message, _FORM)
    uid = _identifier(tree, "user", user)
    return NodeOwner(text, uid, _identifier(tree, "group", group) if colon else None)


def _identifier(tree: HostTree | None, kind: str, name: str) -> int:
    if _NUMBER.fullmatch(name):
        return _in_range(kind, name)
    if tree is None:
        message = f"a snapshot holds no accounts, so nothing tells who the {kind} {name!r} is"
        raise UsageError(message, f"give the number of the {kind}")
    text = tree.read_text(_TABLES[kind])
    if text is None:
        message = f"{_TABLES[kind]} cannot be read below {tree.root}, to look up {kind} {name!r}"
        raise UsageError(message, f"give the number of the {kind}")
    for line in text.splitlines():
        fields = line.split(":")
        if fields[0] == name and len(fields) > 2 and fields[2].isdecimal():  # noqa: PLR2004
            return int(fields[2])
    message = f"{_TABLES[kind]} knows no {kind} {name!r}"
    raise UsageError(message, "give the number, which also holds for accounts of a directory")


def _in_range(kind: str, digits: str) -> int:
    shown = digits.lstrip("0") or "0"
    if len(shown) > _DIGITS or not 0 <= int(shown) <= _HIGHEST:
        message = f"{digits} is no number of a {kind}: they go from 0 to {_HIGHEST}"
        raise UsageError(message, _FORM)
    return int(shown)
