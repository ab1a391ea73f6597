"""Where `--output` of `kata config` leads: a file of the host that the session is about."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from vfiomgr.errors import UsageError
from vfiomgr.model.path import HostPath

if TYPE_CHECKING:
    from vfiomgr.cli.session import Session

_MACHINE = "/"


def output_path(session: Session, typed: str) -> str:
    """The file on this machine; below --root a path from / on is the host's, and stays below it.

    Raises:
        UsageError: it is no file of that host.
        OSError: the links in it go round in a circle.

    """
    session.require_live(
        "a snapshot holds no files: there is nothing that --output could write",
        "leave --output out, and redirect what is printed: > FILE",
    )
    root = os.path.realpath(session.root)
    if root == _MACHINE:
        return os.path.abspath(typed)
    whole = os.path.abspath(typed)
    if _is_below(whole, root):
        return _located(session, whole[len(root) :])
    if not typed.startswith("/"):
        message = f"--output {typed} is no file of the host below --root {session.root}"
        raise UsageError(
            message, f"name it from / on, as that host does; or redirect what is printed: > {typed}"
        )
    return _located(session, whole)


def _located(session: Session, path: str) -> str:
    """Where a path of the host lies, all links followed as on that host."""
    from vfiomgr.host.runtimes import followed  # noqa: PLC0415 - printing needs none

    tree = session.tree
    return tree.locate(followed(tree, HostPath(path)))


def _is_below(path: str, root: str) -> bool:
    return path.startswith(f"{root}/")
