"""Applies a layout part by part: a failed part does not prevent the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.diagnostic import refusal
from vfiomgr.engine.privileges import require_rights
from vfiomgr.engine.transaction import apply, scan_for
from vfiomgr.errors import StillDiffers, VfiomgrError
from vfiomgr.layout.compare import compare
from vfiomgr.layout.watch import LayoutWatch, follow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from vfiomgr.engine.run import Outcome
    from vfiomgr.engine.transaction import ApplyContext
    from vfiomgr.layout.compare import Comparison
    from vfiomgr.layout.requests import ApplyLayout
    from vfiomgr.layout.watch import Changes, LayoutSource, WatchEvent
    from vfiomgr.library import Host

    Result = Outcome | VfiomgrError


def apply_parts(request: ApplyLayout, work: ApplyContext) -> tuple[tuple[str, Result], ...]:
    """Each device that differs, with the result; a missing device has no name.

    Parts that a guest can only have together (an IOMMU group of several rules) are changed
    together.
    """
    results: dict[str, Result] = {}
    while True:
        compared = compare(work.scan(request), request)
        due = [names for names in compared.bundles if _is_due(names, request, results)]
        if not due:
            break
        for names in due:  # and functions that one of them makes are there the next time
            results |= dict.fromkeys(names, _result(replace(request, only=names), work))
    missing = (("", refusal([o])) for o in compared.diagnostics)
    return (*missing, *((name, _judged(name, results[name], compared)) for name in results))


def _is_due(names: tuple[str, ...], request: ApplyLayout, tried: Iterable[str]) -> bool:
    """Whether parts that are changed together were requested and not tried yet."""
    wanted = (name for name in names if not request.only or name in request.only)
    return any(name not in tried for name in wanted)


def _judged(name: str, result: Result, compared: Comparison) -> Result:
    """The result for a device, judged by its final state."""
    left = compared.left_of(name)
    if not left or isinstance(result, VfiomgrError):
        return result
    message = f"it was changed but still differs: {'; '.join(left)}"
    return StillDiffers(message, "find out what moves it: vfiomgr show, journalctl, dmesg")


def _result(request: ApplyLayout, work: ApplyContext) -> Result:
    try:
        return apply(request, work)
    except VfiomgrError as error:
        if isinstance(error.__cause__, KeyboardInterrupt):
            raise
        return error


def watch_layout(
    host: Host,
    source: LayoutSource,
    changes: Changes,
    *,
    tell: Callable[[WatchEvent], None],
    enforce: bool = False,
) -> None:
    """Report drift from a layout until the process is interrupted.

    With `enforce`, correct it as `Host.apply_each` does.

    Raises:
        NeedsRoot: with `enforce`, the process may not change the host.
        RolledBack, RollbackIncomplete: a correction was interrupted.

    """

    def compared(request: ApplyLayout) -> Comparison:
        # Looked at after every event: no disk is opened for it, which could disturb a mount.
        return compare(scan_for(request, host.tree, host.machine, with_claims=False), request)

    def correct(request: ApplyLayout, name: str) -> Result | None:
        return dict(host.apply_each(replace(request, only=(name,)))).get(name)

    if enforce:
        require_rights(host.tree)
    follow(LayoutWatch(source, compared, tell, correct if enforce else None), changes)
