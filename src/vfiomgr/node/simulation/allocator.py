"""Allocates the devices of claims on one node, by the rules of Kubernetes' structured allocator.

Source: k8s.io/dynamic-resource-allocation/structured, internal/incubating/allocator_incubating.go.
Devices are tried in the order in which they are published, and the first solution is taken. If
there is none, the reason is the first rule that leaves too few devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from msgspec import Struct, field
from msgspec.structs import replace

from vfiomgr.node.simulation.model import MOST_RESULTS, ChosenDevice, ClaimSpec
from vfiomgr.node.simulation.selectors import Facts, SelectorError, Selectors, facts_of, qualified
from vfiomgr.units import counted, size

if TYPE_CHECKING:
    from vfiomgr.node.dra.model import Consumption, DraDevice, Pool, Taint
    from vfiomgr.node.simulation.model import (
        Constraint,
        DeviceKey,
        DeviceRequest,
        PodClaim,
        Toleration,
    )

MOST_STEPS = 100_000
"""Devices that are tried for a pod on a node; Kubernetes stops after a time."""
CounterKey = tuple[str, str, str]
"""The pool, the counter set and the name of a counter."""


class Candidate(Struct, frozen=True, eq=False):
    """A device of a node, prepared for many questions."""

    key: DeviceKey
    facts: Facts
    attributes: dict[str, object]
    """By qualified name."""
    capacity: dict[str, int]
    """By qualified name."""
    consumes: tuple[tuple[CounterKey, int], ...]
    groups: tuple[tuple[DeviceKey, frozenset[str]], ...]
    """Its compatibility groups by pool and counter set; empty in pools without such groups."""
    taints: tuple[Taint, ...]
    unit: str


def candidates_of(pools: Iterable[Pool]) -> tuple[Candidate, ...]:
    """The devices of all pools, in the order in which the allocator tries them."""
    ordered = sorted(pools, key=lambda pool: pool.name)
    return tuple(found for pool in ordered for found in _candidates(pool))


def _candidates(pool: Pool) -> Iterator[Candidate]:
    has_groups = any(part.groups for device in pool.devices for part in device.consumes)
    for device in pool.devices:
        yield _candidate(pool, device, device.consumes if has_groups else ())


def counters_of(pools: Iterable[Pool]) -> dict[CounterKey, int]:
    """All counters of the pools."""
    return {
        (pool.name, each.name, name): amount
        for pool in pools
        for each in pool.counter_sets
        for name, amount in each.counters.items()
    }


def _candidate(pool: Pool, device: DraDevice, grouped: Iterable[Consumption]) -> Candidate:
    facts = facts_of(device)
    return Candidate(
        key=(pool.name, device.name),
        facts=facts,
        attributes=dict(facts[0]),
        capacity=dict(facts[1]),
        consumes=tuple(
            ((pool.name, part.counter_set, name), amount)
            for part in device.consumes
            for name, amount in part.counters.items()
        ),
        groups=tuple(((pool.name, part.counter_set), frozenset(part.groups)) for part in grouped),
        taints=tuple(taint for taint in device.taints if taint.effect != "None"),
        unit=device.target.unit,
    )


class Stock(Struct):
    """What is free on a node; an allocation changes it."""

    candidates: tuple[Candidate, ...]
    by_key: dict[DeviceKey, Candidate]
    used: set[DeviceKey]
    counters: dict[CounterKey, int]
    """What is left of each counter."""

    @classmethod
    def of(
        cls,
        candidates: tuple[Candidate, ...],
        counters: dict[CounterKey, int],
        used: Iterable[DeviceKey],
    ) -> Stock:
        """What is left of a node of which some devices are used."""
        by_key = {candidate.key: candidate for candidate in candidates}
        stock = cls(candidates, by_key, set(), dict(counters))
        for key in used:
            stock.take(key)
        return stock

    def copy(self) -> Stock:
        """The same, to be changed without effect on this one."""
        return Stock(self.candidates, self.by_key, set(self.used), dict(self.counters))

    def is_free(self, candidate: Candidate, *, for_admin: bool = False) -> bool:
        """Whether a device can be allocated; for administrators, also if it is used."""
        is_used = candidate.key in self.used and not for_admin
        return not is_used and self.lacking(candidate) is None and self.is_compatible(candidate)

    def is_compatible(self, candidate: Candidate) -> bool:
        """Whether a device has a compatibility group in common with all that share its counters.

        A device without groups is compatible with others without groups.
        """
        for place, groups in candidate.groups:
            used = (self.by_key[key] for key in self.used if key in self.by_key)
            others = [own for each in used for where, own in each.groups if where == place]
            if not groups.intersection(*others) and (groups or any(others)):
                return False
        return True

    def free_at_once(self) -> set[DeviceKey]:
        """The devices that can be allocated at once, those first that take the least."""
        left = self.copy()
        for each in sorted(self.candidates, key=lambda each: sum(n for _, n in each.consumes)):
            if not each.taints and left.is_free(each):
                left.take(each.key)
        return left.used - self.used

    def lacking(self, candidate: Candidate) -> CounterKey | None:
        """The first counter that does not suffice for a device."""
        left = self.counters
        return next((key for key, amount in candidate.consumes if left.get(key, 0) < amount), None)

    def take(self, key: DeviceKey) -> None:
        """Use a device, or a unit that is no device of the DRA driver."""
        self.used.add(key)
        self._consume(key, 1)

    def release(self, key: DeviceKey) -> None:
        """Undo `take`."""
        self.used.remove(key)
        self._consume(key, -1)

    def _consume(self, key: DeviceKey, sign: int) -> None:
        candidate = self.by_key.get(key)
        for counter, amount in candidate.consumes if candidate is not None else ():
            self.counters[counter] = self.counters.get(counter, 0) - sign * amount


class SelectorFailed(ValueError):  # noqa: N818 - what happened, for a person
    """A selector that fails on a device: Kubernetes does not schedule the pod."""


class SearchTooLong(ValueError):  # noqa: N818 - what happened, for a person
    """A search for devices that is given up."""


class _Taken(NamedTuple):
    claim: int
    request: DeviceRequest
    candidate: Candidate


class Allocation(Struct):
    """The search for devices of all claims of a pod on one node."""

    stock: Stock
    claims: Sequence[PodClaim]
    selectors: Selectors
    taken: list[_Taken] = field(default_factory=list)
    steps: int = 0

    def find(self) -> tuple[ChosenDevice, ...] | None:
        """The devices of all claims, which are taken from the stock; None if they do not fit.

        Raises:
            SelectorFailed: a selector fails on a device.
            SearchTooLong: there are too many combinations.
        """
        if not self._request(0, 0):
            return None
        return tuple(
            ChosenDevice(self.claims[each.claim].name, each.request.name, *each.candidate.key)
            for each in self.taken
        )

    def matching(self, request: DeviceRequest) -> tuple[Candidate, ...]:
        """The devices that match the selectors and the capacity of a request."""
        return tuple(c for c in self.stock.candidates if self.selects(request, c))

    def selects(self, request: DeviceRequest, candidate: Candidate) -> bool:
        """Whether a device matches the selectors and the capacity of a request."""
        every = all(self.matches(request, selector, candidate) for selector in request.selectors)
        return every and has_capacity(request, candidate)

    def matches(self, request: DeviceRequest, selector: str, candidate: Candidate) -> bool:
        """Whether a device matches a selector of a request.

        Raises:
            SelectorFailed: the selector fails on the device.
        """
        try:
            return self.selectors.matches(selector, candidate.facts)
        except SelectorError as error:
            where = f"request {request.name}: {selector} fails on {candidate.key[1]}"
            message = f"{where}: {error}"
            raise SelectorFailed(message) from None

    def _request(self, claim: int, number: int) -> bool:
        if claim == len(self.claims):
            return True
        requests = self.claims[claim].spec.requests
        if number == len(requests):
            return self._request(claim + 1, 0)
        return any(self._alternative(claim, number, each) for each in requests[number])

    def _alternative(self, claim: int, number: int, request: DeviceRequest) -> bool:
        place = _Place(claim, number, request)
        every = self.matching(request) if request.count is None else ()
        count = len(every) if request.count is None else request.count
        if not count or count > self._most(claim, number):
            return False
        return self._every(place, every) if every else self._some(place, 0, count)

    def _most(self, claim: int, number: int) -> int:
        """How many devices a request can have, so that the claim has enough for the next ones."""
        results = sum(each.claim == claim for each in self.taken)
        later = self.claims[claim].spec.requests[number + 1 :]
        return MOST_RESULTS - results - sum(min(one.count or 1 for one in each) for each in later)

    def _every(self, place: _Place, devices: Sequence[Candidate]) -> bool:
        """Take all of some devices, then go on with the next request."""
        if not devices:
            return self._request(place.claim, place.number + 1)
        if not self._take(place, devices[0]):
            return False
        return self._every(place, devices[1:]) or self._release()

    def _some(self, place: _Place, start: int, count: int) -> bool:
        """Take as many devices, from a place in their order on: combinations, not permutations."""
        if not count:
            return self._request(place.claim, place.number + 1)
        for index in range(start, len(self.stock.candidates)):
            candidate = self.stock.candidates[index]
            is_used = candidate.key in self.stock.used and not place.request.admin
            if is_used or not self.selects(place.request, candidate):
                continue
            if self._take(place, candidate):
                if self._some(place, index + 1, count - 1):
                    return True
                self._release()
        return False

    def _take(self, place: _Place, candidate: Candidate) -> bool:
        self.steps += 1
        if self.steps > MOST_STEPS:
            message = f"no solution found in {MOST_STEPS} steps"
            raise SearchTooLong(message)
        if not is_available(self.stock, place.request, candidate):
            return False
        if self._is_taken(place, candidate) or self._conflicts(place, candidate):
            return False
        if not place.request.admin:
            self.stock.take(candidate.key)
        self.taken.append(_Taken(place.claim, place.request, candidate))
        return True

    def _is_taken(self, place: _Place, candidate: Candidate) -> bool:
        """Whether the pod has a device already; administrators get one once for each claim."""
        own = (each for each in self.taken if each.candidate is candidate)
        return any(not place.request.admin or each.claim == place.claim for each in own)

    def _release(self) -> Literal[False]:
        taken = self.taken.pop()
        if not taken.request.admin:
            self.stock.release(taken.candidate.key)
        return False

    def _conflicts(self, place: _Place, candidate: Candidate) -> bool:
        """Whether a device breaks a constraint of a claim, beside the devices that are taken."""
        for constraint in self.claims[place.claim].spec.constraints:
            if not constraint.concerns(place.request.name):
                continue
            others = (
                each.candidate
                for each in self.taken
                if each.claim == place.claim and constraint.concerns(each.request.name)
            )
            values = [_values(each, constraint) for each in (candidate, *others)]
            if not (_have_common if constraint.kind == "matchAttribute" else _differ)(values):
                return True
        return False


class _Place(NamedTuple):
    claim: int
    number: int
    request: DeviceRequest


def _values(candidate: Candidate, constraint: Constraint) -> frozenset[tuple[type, object]]:
    """The attribute of a constraint, one value or a list; values of two types differ."""
    value = candidate.attributes.get(constraint.attribute)
    values = value if isinstance(value, tuple) else () if value is None else (value,)
    return frozenset((type(each), each) for each in values)


def _have_common(values: Sequence[frozenset[tuple[type, object]]]) -> bool:
    return bool(frozenset.intersection(*values))


def _differ(values: Sequence[frozenset[tuple[type, object]]]) -> bool:
    return all(values) and len(frozenset.union(*values)) == sum(map(len, values))


def is_available(stock: Stock, request: DeviceRequest, candidate: Candidate) -> bool:
    """Whether a request can have a device that matches it."""
    is_free = stock.is_free(candidate, for_admin=request.admin)
    return is_free and blocking_taint(request, candidate) is None


def has_capacity(request: DeviceRequest, candidate: Candidate) -> bool:
    """Whether a device has all capacity that a request needs."""
    own = candidate.capacity
    return all(own.get(qualified(name), -1) >= least for name, least in request.capacity)


def blocking_taint(request: DeviceRequest, candidate: Candidate) -> Taint | None:
    """The first taint of a device that a request does not tolerate."""
    return next(
        (taint for taint in candidate.taints if not _is_tolerated(taint, request.tolerations)), None
    )


def _is_tolerated(taint: Taint, tolerations: Iterable[Toleration]) -> bool:
    return any(
        toleration.effect in ("", taint.effect)
        and toleration.key in ("", taint.key)
        and (toleration.operator == "Exists" or toleration.value == taint.value)
        for toleration in tolerations
    )


_MEMORY = "memory"
_AT_ONCE = "too few devices are free for all of them at once"


def why_not(stock: Stock, claims: Sequence[PodClaim], selectors: Selectors) -> str:
    """Why the claims cannot be allocated from what is free.

    Raises:
        SelectorFailed: a selector fails on a device.
    """
    search = Allocation(stock, claims, selectors)
    if alone := failing(search):
        return "; ".join(_why_not_alone(search, alternative) for alternative in alone)
    for claim in claims:
        if not _fits(search, claim):
            return f"claim {claim.name}: {_why_not_together(search, claim)}"
    return f"claims {', '.join(claim.name for claim in claims)}: {_AT_ONCE}"


def failing(search: Allocation) -> tuple[DeviceRequest, ...]:
    """The alternatives of the first request that fails even as the only one; empty if none does.

    Raises:
        SelectorFailed: a selector fails on a device.
    """
    requests = (each for claim in search.claims for each in claim.spec.requests)
    return next((each for each in requests if all(_why_not_alone(search, one) for one in each)), ())


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
        needs = ", ".join(f"{amount_of(name, least)} {name}" for name, least in request.capacity)
        return f"{_only(left, need)} that matches has {needs}"
    if request.count is None and len(left) > MOST_RESULTS:
        return f"{len(left)} devices match; a claim can have {MOST_RESULTS}"
    return ""


def _only(left: Sequence[Candidate], need: int) -> str:
    return f"only {len(left)} of {need} devices" if left else "no device"


def _why_not_free(stock: Stock, request: DeviceRequest, selected: Sequence[Candidate]) -> str:
    """Which taint, use or counter leaves too few of the devices that match."""
    need = len(selected) if request.count is None else request.count
    free = [c for c in selected if is_available(stock, request, c)]
    if len(free) >= need:
        return ""
    found = f"{len(free)} of {counted(len(selected), 'matching device')} free"
    found += f", {need} needed" if need > 1 else ""
    causes = (cause_of(stock, request, c) for c in selected)
    return f"{found}: {'; '.join(sorted(set(filter(None, causes))))}"


def cause_of(stock: Stock, request: DeviceRequest, candidate: Candidate) -> str:
    """Why a device that matches is not free; empty if it is."""
    if candidate.key in stock.used and not request.admin:
        return "allocated"
    taint = blocking_taint(request, candidate)
    if taint is not None:
        return f"tainted {taint.key}{f'={taint.value}' if taint.value else ''}"
    counter = stock.lacking(candidate)
    if counter is None:
        return "" if stock.is_compatible(candidate) else "its GPU has vGPUs of another size"
    name = counter[2]
    need = dict(candidate.consumes)[counter]
    most = max(stock.counters[key] for key in stock.counters if key[2] == name)
    left = f"at most {amount_of(name, most)}" if most else "none"
    return f"needs {amount_of(name, need)} {name}, {left} free"


def amount_of(name: str, amount: int) -> str:
    """An amount of a counter or a capacity for people; memory with its unit."""
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
