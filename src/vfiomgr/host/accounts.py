"""Owners of device nodes."""

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
"""The defaults of devtmpfs for a node of VFIO."""


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
_NUMBER = re.compile(r"-?[0-9]+")
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
