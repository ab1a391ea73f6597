"""How a change is made: planned, locked, recorded, carried out by workers, undone, recovered.

`transaction` carries out a request, `run` a plan, and `recovery` handles what was interrupted;
`journal` and its siblings keep the record. The engine does not know the kinds of requests and
steps: `registry` finds the functions of the capabilities for them.
"""

from typing import TYPE_CHECKING

from vfiomgr import importing

if TYPE_CHECKING:
    from vfiomgr.engine.recovery import recover
    from vfiomgr.engine.transaction import (
        ApplyContext,
        Options,
        carry_out,
        prepared,
        slots_with_serials,
        with_further_files,
    )

__all__ = [
    "ApplyContext",
    "Options",
    "carry_out",
    "prepared",
    "recover",
    "slots_with_serials",
    "with_further_files",
]

if not TYPE_CHECKING:
    __getattr__ = importing(
        __name__, dict.fromkeys(__all__, "transaction") | {"recover": "recovery"}
    )
