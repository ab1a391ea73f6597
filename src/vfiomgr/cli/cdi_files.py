"""Specifications as users name them, and what of the host they are about."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from vfiomgr.model.path import HostPath

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vfiomgr.cli.session import Session
    from vfiomgr.model.cdi import CdiFile
    from vfiomgr.model.snapshot import HostSnapshot


def present_nodes(
    session: Session, host: HostSnapshot, files: Iterable[CdiFile]
) -> dict[str, bool] | None:
    """Which nodes that are not VFIO's exist; None where there is no host to look at."""
    from vfiomgr.planner.cdi.check import other_nodes  # noqa: PLC0415 - not for help

    if session.snapshot is not None or host.pci_unlisted is not None:
        return None
    names = sorted(other_nodes(files))
    return {name: session.tree.exists(HostPath(os.path.normpath(name))) for name in names}


def named_file(path: str) -> CdiFile:
    """A file of this machine that a user named; - is taken for JSON.

    Raises:
        UsageError: it cannot be read.
        InvalidDocument: it is no text.

    """
    from vfiomgr.cli.layout_files import (  # noqa: PLC0415 - not for help
        STANDARD_INPUT,
        text_of,
    )
    from vfiomgr.model.cdi import CdiFile  # noqa: PLC0415

    name = "<stdin>.json" if path == STANDARD_INPUT else path
    return CdiFile(name, text_of(path, "a CDI specification"))
