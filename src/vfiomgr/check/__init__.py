"""Check whether a host is ready for passthrough.

`facts` reads a `Readiness`; the modules of rules turn it and the snapshot into findings with
evidence. A rule reports only what it can prove.
"""

from typing import TYPE_CHECKING

from vfiomgr import importing

if TYPE_CHECKING:
    from vfiomgr.check.console_rules import check_console
    from vfiomgr.check.plan import RULES, check

__all__ = ["RULES", "check", "check_console"]

if not TYPE_CHECKING:
    __getattr__ = importing(
        __name__,
        {"RULES": "plan", "check": "plan", "check_console": "console_rules"},
    )
