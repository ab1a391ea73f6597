"""Whether only root can change what is at a path: a service must not run other users' files."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from vfiomgr.paths import HostPath

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.host.tree import HostTree

_MOST_LINKS = 40
"""The kernel's limit (include/linux/namei.h, MAXSYMLINKS)."""
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
    place, names, links = "/", path.split("/"), _MOST_LINKS
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
