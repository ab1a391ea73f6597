"""Whether a host is ready to give devices to guests.

`facts` reads a `Readiness`, and the rules in `rules/` make findings of it and the snapshot, each
with its evidence. A rule says only what it can show.
"""

from typing import TYPE_CHECKING

from vfiomgr.public import importing

if TYPE_CHECKING:
    from vfiomgr.check.plan import check

__all__ = ["check"]

if not TYPE_CHECKING:
    __getattr__ = importing(__name__, {"check": "plan"})
