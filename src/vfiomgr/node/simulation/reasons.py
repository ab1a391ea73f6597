"""Why the claims of a pod do not fit on a node: the first rule that leaves too few devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.node.simulation.allocator import (
    Allocation,
    SearchTooLong,
    blocking_taint,
    has_capacity,
)
from vfiomgr.node.simulation.model import MOST_RESULTS, ClaimSpec
from vfiomgr.units import counted, size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vfiomgr.node.simulation.allocator import Candidate, Stock
    from vfiomgr.node.simulation.model import DeviceRequest, PodClaim
    from vfiomgr.node.simulation.selectors import Selectors

_MEMORY = "memory"
_AT_ONCE = "too few devices are free for all of them at once"


def why_not(stock: Stock, claims: Sequence[PodClaim], selectors: Selectors) -> str:
    """Why the claims cannot be allocated from what is free.

    Raises:
        SelectorFailed: a selector fails on a device.

    """
    search = Allocation(stock, claims, selectors)
    for claim in claims:
        for request in claim.spec.requests:
            found = [_why_not_alone(search, alternative) for alternative in request]
            if all(found):
                return "; ".join(found)
    for claim in claims:
        if not _fits(search, claim):
            return f"claim {claim.name}: {_why_not_together(search, claim)}"
    return f"claims {', '.join(claim.name for claim in claims)}: {_AT_ONCE}"


def _why_not_alone(search: Allocation, request: DeviceRequest) -> str:
    """Why a request fails, even as the only one; empty if it does not."""
    reason = _why_not_selected(search, request)
    if not reason:
        selected = search.matching(request)
        reason = _why_not_free(search.stock, request, selected)
    return f"request {request.name}: {reason}" if reason else ""


def _why_not_selected(search: Allocation, request: DeviceRequest) -> str:
    """Which selector or capacity leaves too few devices."""
    left = list(search.stock.candidates)
    need = request.count or 1
    if not left:
        return "the node has no devices"
    for selector in request.selectors:
        left = [c for c in left if search.matches(request, selector, c)]
        if len(left) < need:
            return f"{_only(left, need)} of class {request.device_class} matches {selector}"
    left = [c for c in left if has_capacity(request, c)]
    if len(left) < need:
        needs = ", ".join(f"{_amount(name, least)} {name}" for name, least in request.capacity)
        return f"{_only(left, need)} that matches has {needs}"
    if request.count is None and len(left) > MOST_RESULTS:
        return f"{len(left)} devices match; a claim can have {MOST_RESULTS}"
    return ""


def _only(left: Sequence[Candidate], need: int) -> str:
    return f"only {len(left)} of {need} devices" if left else "no device"


def _why_not_free(stock: Stock, request: DeviceRequest, selected: Sequence[Candidate]) -> str:
    """Which taint, use or counter leaves too few of the devices that match."""
    need = len(selected) if request.count is None else request.count
    free = [c for c in selected if stock.is_free(c) and blocking_taint(request, c) is None]
    if len(free) >= need:
        return ""
    found = f"{len(free)} of {counted(len(selected), 'matching device')} free"
    found += f", {need} needed" if need > 1 else ""
    causes = (_cause(stock, request, c) for c in selected)
    return f"{found}: {'; '.join(sorted(set(filter(None, causes))))}"


def _cause(stock: Stock, request: DeviceRequest, candidate: Candidate) -> str:
    """Why a device that matches is not free; empty if it is."""
    if candidate.key in stock.used:
        return "allocated"
    taint = blocking_taint(request, candidate)
    if taint is not None:
        return f"tainted {taint.key}{f'={taint.value}' if taint.value else ''}"
    counter = stock.lacking(candidate)
    if counter is None:
        return ""
    name = counter[2]
    need = dict(candidate.consumes)[counter]
    most = max(stock.counters[key] for key in stock.counters if key[2] == name)
    left = f"at most {_amount(name, most)}" if most else "none"
    return f"needs {_amount(name, need)} {name}, {left} free"


def _amount(name: str, amount: int) -> str:
    return size(amount) if name.rpartition("/")[2] == _MEMORY else str(amount)


def _fits(search: Allocation, claim: PodClaim) -> bool:
    """Whether a claim alone could be allocated; nothing is taken."""
    trial = Allocation(search.stock.copy(), (claim,), search.selectors)
    try:
        return trial.find() is not None
    except SearchTooLong:
        return False


def _why_not_together(search: Allocation, claim: PodClaim) -> str:
    """Why the requests of a claim cannot be allocated together, though each could alone."""
    spec = claim.spec
    for number, constraint in enumerate(spec.constraints):
        others = (*spec.constraints[:number], *spec.constraints[number + 1 :])
        if _fits(search, replace(claim, spec=ClaimSpec(spec.requests, others))):
            return f"no free devices satisfy {constraint.kind} {constraint.attribute}"
    if spec.constraints and _fits(search, replace(claim, spec=ClaimSpec(spec.requests))):
        return "no free devices satisfy all constraints"
    return _AT_ONCE
