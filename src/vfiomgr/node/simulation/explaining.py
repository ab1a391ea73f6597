"""Why the ResourceClaims of pods get devices of a host, or do not, device by device: `check pod`.

The devices are those that the agent of the host publishes, or would publish. GPUs that match a
request and are not published are named too, with what prevents it.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from vfiomgr.errors import VfiomgrError
from vfiomgr.expressions import expression
from vfiomgr.kata.explain.context import ClaimVerdict, chain_break
from vfiomgr.kata.explain.resources import AGENT_LOG
from vfiomgr.listing import listed
from vfiomgr.node.dra.model import DRIVER, Pool
from vfiomgr.node.dra.plan import pools, unit_device
from vfiomgr.node.health import HealthContext
from vfiomgr.node.model import NodeSettings, NodeUnit, OnDemand
from vfiomgr.node.on_demand import on_demand_units
from vfiomgr.node.plan import inventory
from vfiomgr.node.simulation.allocator import (
    Allocation,
    SearchTooLong,
    SelectorFailed,
    amount_of,
    candidates_of,
    cause_of,
    failing,
    has_capacity,
    is_available,
    why_not,
)
from vfiomgr.node.simulation.objects import (
    CLASSES,
    PARAMETERS,
    UNKNOWN_CLASS,
    read_workloads,
)
from vfiomgr.node.simulation.scheduler import template_of
from vfiomgr.node.simulation.selectors import SelectorError, Selectors, qualified
from vfiomgr.persistence.installed_layout import FILE as INSTALLED_LAYOUT
from vfiomgr.units import counted
from vfiomgr.users.node_agent import NodeStatus

if TYPE_CHECKING:
    from vfiomgr.diagnostic import Diagnostic
    from vfiomgr.host.tree import HostTree
    from vfiomgr.node.simulation.allocator import Candidate, Stock
    from vfiomgr.node.simulation.model import ChosenDevice, DeviceKey, DeviceRequest, PodClaim
    from vfiomgr.pci.model import PciAddress
    from vfiomgr.snapshot.model import HostSnapshot

_NODE = "node"
"""The name of the node; it begins the names of all pools."""
_NAMED = 3
_FALSE = " is false"
_NAMED_VALUE = expression(r"(attributes|capacity)\[[\"']([^\"']+)[\"']\]\.(\w+)")
"""What a selector reads: `device.attributes["vfiomgr.io"].model`."""
_NO_AGENT = NodeStatus(0, "", has_kubelet=False)
_ANOTHER_NODE = "use another node"
_SELECT = "select by what devices have: kubectl get resourceslices -o yaml"
_ON_DEMAND = "let claims bind it: state: on-demand in the layout of the node"


class _Node(Struct, frozen=True, eq=False):
    """The devices of a host for claims."""

    host: HostSnapshot
    stock: Stock
    units: dict[str, NodeUnit]
    """By their IDs."""
    unpublished: tuple[Candidate, ...]
    """Devices that are not published."""


def verdicts(
    host: HostSnapshot, tree: HostTree | None, text: str, source: str, layout: str | None
) -> tuple[ClaimVerdict | None, ...]:
    """What each pod of a text gets of this host; None for pods without claims for vfiomgr.

    `layout` is a file with the layout of the node; otherwise it is the one installed in `tree`.

    Raises:
        InvalidDocument: the text or the layout is malformed, or the text has no pod.
        UsageError: the file with the layout cannot be read.
    """
    selectors = Selectors()
    objects, flaws = read_workloads(text, source, selectors, is_placed=False)
    refused = tuple(_refused(flaw, source) for flaw in flaws if flaw.rule == PARAMETERS)
    unread = next((flaw for flaw in flaws if flaw.rule != PARAMETERS), None)
    if any(flaw.rule == UNKNOWN_CLASS for flaw in flaws):
        return tuple(None for _ in objects.workloads)
    if unread is not None:
        parts = (f"not checked: {source}:{unread.line}: {unread.summary}",)
        return tuple(ClaimVerdict((), parts, refused) for _ in objects.workloads)
    served = tuple(_not_served(host))
    node = _node(host, _settings(host, tree, layout))
    found = []
    for workload in objects.workloads:
        verdict = None
        if workload.claims and all(map(_is_own, workload.claims)):
            verdict = _verdict(node, workload.claims, selectors)
            breaks = (*served, *verdict.breaks, *refused)
            verdict = replace(verdict, breaks=breaks, is_known=verdict.is_known and not breaks)
        found.append(verdict)
    return tuple(found)


def _settings(host: HostSnapshot, tree: HostTree | None, file: str | None) -> NodeSettings:
    if file is None and (tree is None or not tree.exists(INSTALLED_LAYOUT)):
        return NodeSettings()
    layouts = import_module("vfiomgr.node.layouts")  # pydantic is slow
    layout = layouts.installed_layout(tree, None) if file is None else layouts.named_layout(file)
    found: NodeSettings = layouts.with_layout(host, NodeSettings(), layout)
    return found


def _refused(flaw: Diagnostic, source: str) -> Diagnostic:
    place = f"{source}:{flaw.line}"
    return chain_break("claim-refused", place, f"{place}: {flaw.summary}", *flaw.remedies)


def _not_served(host: HostSnapshot) -> Iterator[Diagnostic]:
    """An agent without claims, or one that the kubelet does not know."""
    agent = host.users.running_agent
    if agent is not None and agent.is_dra_registered is None:
        what, remedy = "the node agent serves no claims", "run it with --dra"
        yield chain_break("claim-not-served", "vfiomgr-node", what, remedy)
    elif agent is not None and not agent.is_dra_registered:
        what = "the DRA driver of the node agent is not registered with the kubelet"
        yield chain_break("claim-not-served", "vfiomgr-node", what, AGENT_LOG)


def _node(host: HostSnapshot, settings: NodeSettings) -> _Node:
    """The node as its agent reports it, or else as the host is."""
    agent = host.users.running_agent or _NO_AGENT
    devices = (*(d for r in agent.resources for d in r.devices), *agent.on_demand)
    known = HealthContext(
        held=agent.pods,
        claims=agent.claimed,
        quarantine={each.id: each.reasons[0] for each in devices if each.reasons},
    )
    reported = {each.id: OnDemand() for each in agent.on_demand}
    settings = replace(settings, on_demand={**reported, **settings.on_demand})
    found = inventory(host, settings, known)
    healthy = {each.id for each in devices if each.is_healthy}
    on_demand = (replace(u, reasons=()) if u.id in healthy else u for u in found.on_demand)
    found = replace(found, on_demand=tuple(on_demand))

    def publish(allocated: frozenset[DeviceKey]) -> tuple[Pool, ...]:
        return pools(host, found, _NODE, allocated=allocated)

    template = template_of(publish, found, _NODE, {})
    units = {unit.id: unit for unit in found.units}
    given = {address for unit in units.values() for address in unit.addresses}
    more = tuple(_unpublished(host, given))
    return _Node(
        host=host,
        stock=template.stock(template.used),
        units={**{unit.id: unit for unit in more}, **units},
        unpublished=candidates_of([Pool("-", tuple(unit_device(host, unit) for unit in more))]),
    )


def _unpublished(host: HostSnapshot, given: set[PciAddress]) -> Iterator[NodeUnit]:
    """GPUs and accelerators that no claim can get, with the reasons why none can be bound now."""
    for device in host.devices:
        if device.is_bridge or not device.is_graphics_or_accelerator or device.address in given:
            continue
        bound = NodeSettings(on_demand={str(device.address): OnDemand()})
        try:
            units = on_demand_units(host, bound, lambda unit: unit)
        except VfiomgrError:  # it cannot be bound at all
            continue
        yield from (unit for unit in units if given.isdisjoint(unit.addresses))


def _is_own(claim: PodClaim) -> bool:
    """Whether a claim is for devices of vfiomgr, as far as its classes and selectors show."""
    return all(
        one.device_class in CLASSES or any(DRIVER in text for text in one.selectors)
        for each in claim.spec.requests
        for one in each
    )


def _verdict(node: _Node, claims: tuple[PodClaim, ...], selectors: Selectors) -> ClaimVerdict:
    names = tuple(claim.name for claim in claims)
    search = Allocation(node.stock.copy(), claims, selectors)
    try:
        devices = search.find()
        why = "" if devices is not None else why_not(node.stock, claims, selectors)
    except SelectorFailed as error:
        return ClaimVerdict(names, (), (_failed(", ".join(names), str(error)),))
    except SearchTooLong as error:
        return ClaimVerdict(names, (f"not checked: claim {', '.join(names)}: {error}",))
    if devices is None:
        told = f"claim {', '.join(names)} gets no device of this host"
        return ClaimVerdict(names, (told,), (_no_device(node, claims, selectors, why),))
    unknown = tuple(_unknown(node.host))
    parts = (*(f"claim {each.claim}: {_unit(node, each)}" for each in devices), *unknown)
    admin = [r.name for claim in claims for each in claim.spec.requests for r in each if r.admin]
    return ClaimVerdict(names, parts, tuple(map(_of_admin, admin)), is_known=not unknown)


def _unknown(host: HostSnapshot) -> Iterator[str]:
    if host.users.running_agent is None:
        yield "no node agent answers on this host: unknown whether it offers them"
    if host.users.processes is None:
        yield "unknown which devices are in use (requires root)"


def _unit(node: _Node, chosen: ChosenDevice) -> str:
    return node.stock.by_key[chosen.pool, chosen.device].unit or chosen.device


def _failed(claim: str, why: str) -> Diagnostic:
    return chain_break(
        "claim-no-device",
        claim,
        f"{why}; Kubernetes then schedules the pod on no node",
        "test first whether a device has what the selector reads: has(device.attributes[…].NAME)",
    )


def _of_admin(request: str) -> Diagnostic:
    return chain_break(
        "claim-refused",
        request,
        f"request {request}: vfiomgr refuses claims with adminAccess: a VFIO device cannot be "
        "shared with an administrator",
        "request the device without adminAccess",
    )


def _no_device(
    node: _Node, claims: tuple[PodClaim, ...], selectors: Selectors, why: str
) -> Diagnostic:
    """One problem for all claims, with what is against each device as evidence."""
    search = Allocation(node.stock, claims, selectors)
    against: dict[str, list[str]] = {}
    remedies: dict[str, str] = {}
    requests = failing(search)
    found: list[str] = []
    for request in requests:
        for candidate in (*node.stock.candidates, *node.unpublished):
            text, *more = _against(node, search, request, candidate)
            if text:
                read = _read(text, candidate) if text.endswith(_FALSE) else ""
                against.setdefault(text, []).append(f"{candidate.unit or candidate.key[1]}{read}")
                remedies = {**{each.partition(":")[0]: each for each in more}, **remedies}
        free = [c for c in search.matching(request) if is_available(node.stock, request, c)]
        found.append(_short_of(request, len(free)))
    for text, name in () if requests else _compared(search, claims):
        against.setdefault(text, []).append(name)
    evidence = (f"{listed([*dict.fromkeys(own)], _NAMED)}: {text}" for text, own in against.items())
    subject = ", ".join(claim.name for claim in claims)
    ways = (*remedies.values(), _ANOTHER_NODE)
    what = "; ".join(found) or why
    return chain_break("claim-no-device", subject, what, *ways, evidence=tuple(evidence))


def _short_of(request: DeviceRequest, free: int) -> str:
    of_class = f"of class {request.device_class}"
    if request.count is None:
        return f"request {request.name}: not all devices {of_class} that match are available"
    asked = counted(request.count, "device")
    left = f"{free or 'none'} {'are' if free > 1 else 'is'} available"
    return f"request {request.name}: {asked} {of_class} requested, {left}"


def _compared(search: Allocation, claims: tuple[PodClaim, ...]) -> Iterator[tuple[str, str]]:
    """The attributes of constraints of all devices that match the requests of claims."""
    for claim in claims:
        for constraint in claim.spec.constraints:
            for request in (one for each in claim.spec.requests for one in each):
                found = search.matching(request) if constraint.concerns(request.name) else ()
                for candidate in found:
                    value = candidate.attributes.get(constraint.attribute)
                    yield _shown(constraint.attribute, value), candidate.unit or candidate.key[1]


def _against(
    node: _Node, search: Allocation, request: DeviceRequest, candidate: Candidate
) -> tuple[str, ...]:
    """What is against a device for a request, and its remedies; an empty text for nothing."""
    unit = node.units.get(candidate.unit)
    is_published = candidate.key in node.stock.by_key
    mismatch = _mismatch(search, request, candidate)
    if mismatch is not None:
        return (mismatch, _SELECT) if mismatch and is_published else ("",)
    if unit is not None and not is_published:
        return _not_offered(node, unit)
    cause = cause_of(node.stock, request, candidate)
    if unit is None or not cause:
        return (cause,)
    if candidate.key in node.stock.used and unit.used_by:
        user = f"pod {unit.pod}" if unit.pod else unit.used_by
        return (f"in use by {user}{_origin(node, unit)}", f"wait until {user} ends")
    for reason in unit.reasons:
        return (_without_name(node, unit, reason), *filter(None, (reason.hint,)))
    return (cause,)


def _without_name(node: _Node, unit: NodeUnit, reason: Diagnostic) -> str:
    """A reason without the device that it begins with, so that those with the same are one line."""
    return reason.summary.removeprefix(f"{node.host.device_named(unit.id)} ")


def _mismatch(search: Allocation, request: DeviceRequest, candidate: Candidate) -> str | None:
    """Which selector or capacity a device does not match; None if it matches.

    Empty for a device of another class: nothing is said of vGPUs to a request for a function.
    """
    for selector in request.selectors:
        try:
            is_matching = search.selectors.matches(selector, candidate.facts)
        except SelectorError as error:
            return f"{_short(selector)} fails: {error}"
        if not is_matching and selector in CLASSES.get(request.device_class, ()):
            return ""
        if not is_matching:
            return f"{_short(selector)}{_FALSE}"
    if has_capacity(request, candidate):
        return None
    names = [qualified(name) for name, _ in request.capacity]
    own = ", ".join(_shown(name, candidate.capacity.get(name)) for name in names)
    return f"too small: {own}"


def _read(selector: str, candidate: Candidate) -> str:
    """What a selector reads of a device: ` (model is A40)`."""
    found = []
    for kind, domain, name in dict.fromkeys(_NAMED_VALUE.findall(selector)):
        values = candidate.attributes if kind == "attributes" else candidate.capacity
        found.append(_shown(f"{domain}/{name}", values.get(f"{domain}/{name}")))
    return f" ({', '.join(found)})" if found else ""


def _shown(name: str, value: object) -> str:
    own = name.removeprefix(f"{DRIVER}/")
    if isinstance(value, int) and not isinstance(value, bool):
        value = amount_of(name, value)
    text = str(value).lower() if isinstance(value, bool) else value
    return f"no {own}" if value is None else f"{own} is {text}"


def _short(selector: str) -> str:
    return " ".join(selector.split())


def _origin(node: _Node, unit: NodeUnit) -> str:
    """Since when a claim has a device, and what its end does."""
    agent = node.host.users.running_agent or _NO_AGENT
    found = next((each.origin for each in agent.claims if each.device == unit.id), "")
    return f" ({found})" if found else ""


def _not_offered(node: _Node, unit: NodeUnit) -> tuple[str, ...]:
    """Why a device that matches is not published, and how it becomes so."""
    device = node.host.device_named(unit.id)
    why = f"on {(device and device.driver) or 'no driver'}, and not offered to claims"
    for reason in unit.reasons:
        return (f"{why}: {_without_name(node, unit, reason)}", *filter(None, (reason.hint,)))
    return (why, f"bind it: vfiomgr bind {unit.id}", _ON_DEMAND)
