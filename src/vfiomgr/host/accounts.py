"""Users and groups of the host: its own /etc/passwd and /etc/group, not this machine's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.errors import UsageError
from vfiomgr.model.path import HostPath
from vfiomgr.model.persistence import NodeOwner

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree

_TABLES = {"user": HostPath("/etc/passwd"), "group": HostPath("/etc/group")}
_MAX_ID = 0xFFFFFFFE
"""The highest one means `leave it` to chown(2)."""


def find_owner(tree: HostTree, text: str) -> NodeOwner:
    """Who is meant by USER or USER:GROUP, names or numbers.

    Raises:
        UsageError: the host has no such user or group.

    """
    user, colon, group = text.partition(":")
    uid = _number(tree, "user", user)
    return NodeOwner(text, uid, _number(tree, "group", group) if colon else None)


def _number(tree: HostTree, kind: str, name: str) -> int:
    if name.isascii() and name.isdecimal() and int(name) < _MAX_ID:
        return int(name)
    for line in (tree.read_text(_TABLES[kind]) or "").splitlines():
        fields = line.split(":")
        if fields[0] == name and len(fields) > 2 and fields[2].isdecimal():  # noqa: PLR2004
            return int(fields[2])
    message = f"{_TABLES[kind]} knows no {kind} {name!r}"
    raise UsageError(message, "give the number, which also holds for accounts of a directory")
