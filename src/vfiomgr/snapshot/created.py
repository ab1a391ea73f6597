"""When, where and by which version a snapshot was created: in its document, not among its facts.

Plans depend on facts only, so two snapshots of a host that differ in their time are equal.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from vfiomgr import __version__
from vfiomgr.paths import HOSTNAME
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree

FORM = "%Y-%m-%dT%H:%M:%SZ"


class Created(Value):
    """The creation of a snapshot; None for what is unknown."""

    time: str | None = None
    """UTC, e.g. `2026-11-29T08:00:00Z`; None for a recorded host, which may be of any time."""
    host_name: str | None = None
    vfiomgr_version: str | None = None


UNKNOWN = Created()
"""Of snapshots of the first versions, which did not have it."""


def created_now(tree: HostTree) -> Created:
    """The creation of a snapshot of this host at this moment."""
    now = time.strftime(FORM, time.gmtime()) if tree.is_live else None
    return Created(now, tree.read(HOSTNAME), __version__)
