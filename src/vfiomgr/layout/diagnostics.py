"""What can be wrong with a layout file: rules that never get a device, and wrong values."""

from __future__ import annotations

import difflib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, get_args

from msgspec import Struct, field

from vfiomgr.diagnostic import OVERRIDES, Diagnostic, Position, flaw
from vfiomgr.layout.model import (
    UNKNOWABLE,
    VERSION,
    HostRule,
    Layout,
    LayoutFile,
    OnDemandRule,
    PassthroughRule,
    Selector,
    SriovRule,
    VgpuRequest,
    VgpuRule,
    WrongValue,
)
from vfiomgr.pci.capabilities import RESET_METHODS
from vfiomgr.pci.model import CLASS_ACCELERATOR, CLASS_DISPLAY, PciAddress
from vfiomgr.pci.names import LAYOUT_CLASSES
from vfiomgr.users.model import Monitor

if TYPE_CHECKING:
    from pydantic import BaseModel

    from vfiomgr.documents.text import Located
    from vfiomgr.layout.model import Rule


_WILD = frozenset("*?[")
_MOST_COMPARED = 100
"""Maximum number of rules for one value of an index, which limits the comparisons of a rule."""


def idle_rules(where: str, rules: Iterable[tuple[int, Rule, Located]]) -> Iterator[Diagnostic]:
    """Repeated addresses, and rules whose devices all belong to earlier ones.

    Each rule has its number, from 0, and its selector as written.
    """
    named: dict[PciAddress, int] = {}
    seen = EarlierRules()
    for number, rule, select in rules:
        place = f"{where}, rule {number + 1}"
        twice = list(_repeated(rule.select, named, number))
        written = _addresses(select) if twice else {}
        for address, first in twice:
            what, remedy = f"{address} appears twice", "remove one"
            if first != number:
                what = f"rule {first + 1} already selects {address}, so this rule never gets it"
                remedy = "keep the address in one of the two rules"
            yield flaw(
                "layout-address-twice", written.get(address, select.place), place, what, remedy
            )
        covering = () if twice else seen.before(rule.select)
        for before, earlier in covering:
            if covers(earlier, rule.select):
                what = f"this rule never applies: rule {before + 1} ({earlier}) selects all its "
                remedy = "put the narrower rule first, or remove one of the two"
                yield flaw("layout-rule-idle", select.place, place, f"{what}devices", remedy)
                break
        seen.add(number, rule.select)


class EarlierRules(Struct):
    """Earlier selectors, indexed by the values of one criterion that covered selectors share."""

    by_value: dict[tuple[str, object], list[tuple[int, Selector]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    equal: dict[str, tuple[int, Selector]] = field(default_factory=dict)
    """All rules by their text."""

    def add(self, number: int, select: Selector) -> None:
        """Add a checked rule to the index value with the fewest rules."""
        self.equal.setdefault(str(select), (number, select))
        choices = (list(_values(name, select)) for name in select.criteria)
        places = min(choices, key=lambda keys: max(len(self.by_value[key]) for key in keys))
        for key in dict.fromkeys(places):
            if len(self.by_value[key]) < _MOST_COMPARED:
                self.by_value[key].append((number, select))

    def before(self, select: Selector) -> Iterator[tuple[int, Selector]]:
        """Earlier rules that may cover a selector, in order."""
        found = {number: rule for key in _sought(select) for number, rule in self.by_value[key]}
        if (same := self.equal.get(str(select))) is not None:
            found[same[0]] = same[1]
        yield from sorted(found.items(), key=lambda pair: pair[0])


def _values(name: str, select: Selector) -> Iterator[tuple[str, object]]:
    """Keys of a criterion; each covered selector has one of them in `_sought`."""
    match name:
        case "all":
            yield name, True
        case "classes":
            yield from ((name, prefix) for prefix in select.class_prefixes)
        case "name":
            for pattern in select.name:
                yield name, "*" if _WILD & set(pattern) else pattern.lower()
        case _:
            yield from ((name, value) for value in getattr(select, name))


def _sought(select: Selector) -> Iterator[tuple[str, object]]:
    """The keys of selectors that may cover this one: for each criterion, those of one value."""
    yield "all", True
    for name in select.criteria:
        key, value = next(_values(name, select))
        yield key, value
        match name:
            case "classes":
                yield from ((key, str(value)[:length]) for length in range(1, len(str(value))))
            case "id":
                yield key, f"{str(value)[:5]}*"
            case "name":
                yield key, "*"


def _repeated(
    select: Selector, named: dict[PciAddress, int], number: int
) -> Iterator[tuple[PciAddress, int]]:
    """Addresses that were named before and are not narrowed by other criteria."""
    for address in select.address if select.criteria == ("address",) else ():
        if address in named:
            yield address, named[address]
        else:
            named[address] = number


def _addresses(select: Located) -> dict[PciAddress, Position]:
    """The addresses in a selector, as last written."""
    texts = ((part.text.strip(), part.place) for part in select.descendants())
    return {PciAddress.parse(text): at for text, at in texts if ":" in text and "." in text}


def items_of(part: Located, key: str) -> tuple[Located, ...]:
    """The items of the list below a key; none if it is something else."""
    child = part.child(key)
    return () if child is None else child.items or ()


def repeated_uuids(where: str, layout: Located) -> Iterator[Diagnostic]:
    """UUIDs that are given to two vGPUs of a layout."""
    seen: dict[str, int] = {}
    for number, rule in enumerate(items_of(layout, "devices"), start=1):
        requests = items_of(rule, "vgpus")
        for part in (part for request in requests for part in items_of(request, "uuids")):
            key = part.text.lower()
            if key in seen:
                what = f"a second vGPU has the UUID {part.text}"
                remedy = f"line {seen[key]} already uses it: give each its own"
                yield flaw("layout-uuid-twice", part.place, f"{where}, rule {number}", what, remedy)
            seen.setdefault(key, part.place.line)


def covers(earlier: Selector, later: Selector) -> bool:
    """Whether `earlier` selects every device that `later` selects, on any host.

    Only its address selects the console's display, so no other criterion covers an address.
    """
    if bool(earlier.address) is not bool(later.address):
        return False
    if bool(earlier.physical_function) is not bool(later.physical_function):
        return False  # virtual functions are selected only so
    return all(_is_implied(name, earlier, later) for name in earlier.criteria)


def _is_implied(name: str, earlier: Selector, later: Selector) -> bool:
    match name:
        case "all":
            return later.all is True or _within(
                later.class_prefixes, (CLASS_DISPLAY, CLASS_ACCELERATOR)
            )
        case "classes":
            return _within(later.class_prefixes, earlier.class_prefixes)
        case "id":
            return _all(later.id, lambda one: one in earlier.id or f"{one[:5]}*" in earlier.id)
        case "name":
            return _all(later.name, lambda one: _is_named(one.lower(), earlier.name))
    wanted, given = getattr(later, name), getattr(earlier, name)
    return bool(wanted) and set(wanted) <= set(given)


def _is_named(pattern: str, others: Iterable[str]) -> bool:
    """Whether another pattern is the same, or matches a name without wildcards."""
    is_plain = not _WILD & set(pattern)
    lowered = [other.lower() for other in others]
    return any(o in (pattern, "*") or (is_plain and fnmatchcase(pattern, o)) for o in lowered)


def _within(prefixes: Iterable[str], wider: tuple[str, ...]) -> bool:
    return _all(prefixes, lambda one: one.startswith(wider))


def _all(values: Iterable[str], test: Callable[[str], bool]) -> bool:
    """Whether there are any, and all pass."""
    listed = list(values)
    return bool(listed) and all(map(test, listed))


RULES: dict[str, type[BaseModel]] = {
    "host": HostRule,
    "passthrough": PassthroughRule,
    "on-demand": OnDemandRule,
    "sriov": SriovRule,
    "vgpu": VgpuRule,
}
"""The kinds of rules by their state."""
_STATES = "host, passthrough, on-demand, sriov or vgpu"
_NUMBER = "use a whole number"
_TRUTH = "use true or false"
_ADDRESS = "use PCI addresses of the form domain:bus:device.function, e.g. 0000:41:00.0"
_REMEDIES = {
    "version": f"write version: {VERSION}",
    "layouts": "write layouts by name, e.g. layouts: {gpus: {devices: […]}}",
    "description": "write a text, in quotes if it looks like another type",
    "devices": "write a list of rules, e.g. devices: [{select: all, state: passthrough}]",
    "select": 'use all, or criteria, e.g. select: {class: "0302"}',
    "sticky": _TRUTH,
    "stop": f"use some of {', '.join(get_args(Monitor))}",
    "state": f"write {_STATES}",
    "at_least": "use a whole number from 0, e.g. at_least: 8",
    "allow": f"use some of {', '.join(a for a in OVERRIDES if a not in UNKNOWABLE)}",
    "address": _ADDRESS,
    "physical_function": _ADDRESS,
    "id": "use vendor:device with four hexadecimal digits each, e.g. 10de:2235 or 10de:*",
    "class": f'use its first digits in quotes, e.g. "0302", or one of {", ".join(LAYOUT_CLASSES)}',
    "name": 'write a model name in quotes, with * and ?, e.g. "*A40*"',
    "numa_node": "use the number of a node, e.g. numa_node: 0",
    "serial": 'write a serial number in quotes, e.g. "1322621053171"',
    "parent": "use the name of a device, e.g. parent: mtty",
    "all": "use all: true, or remove the key",
    "driver": "use the name of a VFIO driver, e.g. driver: vfio-pci",
    "reset_method": f"use one of {', '.join(RESET_METHODS)}",
    "d3cold": "use d3cold: false, or remove the key",
    "owner": "use USER or USER:GROUP, names or quoted numbers, e.g. libvirt-qemu:kvm",
    "only": _TRUTH,
    "with_group": _TRUTH,
    "heterogeneous": _TRUTH,
    "mig": _TRUTH,
    "vgpus": "write a list, e.g. vgpus: [{type: A40-4Q, per_gpu: 4}]",
    "strategy": "use pack or spread",
    "resource": "use auto, NAME or DOMAIN/NAME, e.g. resource: training",
    "consumer": "use default, kata, kubevirt or container",
    "reset": _TRUTH,
    "type": 'use a name or an identifier, numbers in quotes, e.g. A40-4Q, nvidia-558 or "1148"',
    "framebuffer": "use a size, e.g. 512M, 6G or a number of MiB",
    "series": "use A, B, C or Q",
    "heads": f"{_NUMBER} from 1",
    "per_gpu": f"{_NUMBER} from 1, e.g. per_gpu: 4",
    "uuids": "write a list of UUIDs, e.g. f715f63c-0d00-4007-9c5a-b07b0c6c05de",
    "parameters": "write names and values, e.g. parameters: {frame_rate_limiter: 0}",
    "a layout": "write e.g. {devices: [{select: all, state: passthrough}]}",
    "a rule": "write e.g. {select: all, state: passthrough}",
    "an entry of vgpus": "write e.g. {type: A40-4Q, per_gpu: 4}",
}
_NEEDED = frozenset({"version", "layouts", "devices", "select", "state"})
_OF_STATE = {
    ("sriov", "count"): "use a whole number from 0, or max, e.g. count: 4",
    ("sriov", "functions"): "use any, passthrough or host",
    ("sriov", "vf_msix"): "use a whole number from 1 to 2048, e.g. vf_msix: 64",
    ("vgpu", "count"): f"{_NUMBER} from 1, e.g. count: 4",
    ("vgpu", "functions"): f"{_NUMBER} from 1, e.g. functions: 16",
}
"""Keys that mean something else in each state."""
_CHOICES = {
    "state": tuple(RULES),
    "allow": OVERRIDES,
    "stop": get_args(Monitor),
    "strategy": ("pack", "spread"),
    "resource": ("auto",),
    "consumer": ("default", "kata", "kubevirt", "container"),
    "reset_method": RESET_METHODS,
    "functions": ("any", "passthrough", "host"),
    "class": tuple(LAYOUT_CLASSES),
    "version": (VERSION,),
    "select": ("all",),
    "count": ("max",),
}
_MOST_SHOWN = 40
_OFTEN_MEANT = {
    "drivers": "driver",
    "vendor": "id",
    "model": "name",
    "pci": "address",
    "addresses": "address",
    "classes": "class",
    "numa": "numa_node",
    "user": "owner",
    "mode": "state",
    "min": "at_least",
}


def keys_of(model: type[BaseModel]) -> tuple[str, ...]:
    """The keys of a part of the document, as written."""
    return tuple(field.alias or name for name, field in model.model_fields.items())


ANY_RULE = tuple(dict.fromkeys(key for rule in RULES.values() for key in keys_of(rule)))
"""The keys of a rule without a known state."""


def remedy_for(key: str, state: str | None) -> str:
    """The expected value of a key, as a remedy."""
    return _OF_STATE.get((state or "", key)) or _REMEDIES.get(key, "write a text")


def shown(value: Located) -> str:
    """A value in recognizable form."""
    if value.items is not None:
        return "a list" if value.items else "an empty list"
    if value.members is not None:
        return "a mapping" if value.members else "an empty mapping"
    text = json.dumps(value.scalar, ensure_ascii=False, default=str)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


def unknown_key(key: str, model: type[BaseModel] | None, known: tuple[str, ...]) -> tuple[str, str]:
    """The error for an unknown key; a key of another part is sent there.

    Without a model, it belongs to a rule without a known state.
    """
    what = f"unknown key {key!r}"
    near = _nearest(key, known)
    if near is None and (home := _home(key, model)) is not None:
        return f"{what} here", home
    if near is not None:
        return what, f"did you mean {near}?"
    return what, f"valid keys: {', '.join(known)}"


def _home(key: str, model: type[BaseModel] | None) -> str | None:
    """Where a key belongs that is valid elsewhere."""
    states = [state for state, rule in RULES.items() if key in keys_of(rule)]
    own = next((state for state, rule in RULES.items() if rule is model), None)
    if own is not None and states:
        return f"{key} belongs to state: {' or '.join(states)}, but this rule has {own}"
    for other, place in (
        (Selector, "write it in select"),
        (VgpuRequest, "write it in an entry of vgpus"),
        (Layout, "write it in a layout" if model is LayoutFile else "write it beside devices"),
        (LayoutFile, "write it at the top of the file"),
    ):
        if other is not model and key in keys_of(other):
            return place
    if states:
        return "write it in a rule" if key == "select" else "write it in a rule, beside select"
    return None


def _nearest(text: str, known: Iterable[str]) -> str | None:
    """The known word that was most likely meant."""
    words = tuple(known)
    lowered = text.lower().replace("-", "_")
    if lowered in words:
        return lowered
    if _OFTEN_MEANT.get(lowered) in words:
        return _OFTEN_MEANT[lowered]
    return next(iter(difflib.get_close_matches(lowered, words, 1, 0.7)), None)


def no_value(key: str, state: str | None) -> tuple[str, str]:
    """The error for a key without a value."""
    remedy = remedy_for(key, state)
    return f"{key} has no value", remedy if key in _NEEDED else f"{remedy}, or remove the key"


def wrong_value(
    key: str, value: Located, state: str | None, error: dict[str, Any]
) -> tuple[str, str]:
    """The error for a wrong value, by pydantic's kind of error."""
    kind, remedy = str(error["type"]), remedy_for(key, state)
    if isinstance(value.scalar, str):
        choices = {word.replace("-", "_"): word for word in _CHOICES.get(key, ())}
        choice = choices.get(_nearest(value.scalar, choices) or "")
        if choice is not None and choice != value.scalar:
            return f"{key} is {shown(value)}", f"did you mean {choice}? {remedy}"
    if kind == "value_error":
        refused = error["ctx"]["error"]
        if not isinstance(refused, WrongValue):
            return str(refused), remedy
        return refused.what or f"{key} cannot be {shown(value)}", refused.remedy or remedy
    if kind == "string_type" and value.scalar is not None:
        written = json.dumps(value.text, ensure_ascii=False)
        is_truth = isinstance(value.scalar, bool)
        found = f"boolean {str(value.scalar).lower()}" if is_truth else f"number {value.scalar}"
        what = f"{key} is {value.text}, which YAML reads as the {found}"
        return what, f"quote it: {key}: {written}"
    if kind in ("int_type", "int_parsing", "bool_type", "bool_parsing") and value.text:
        kinds = "a whole number" if kind.startswith("int") else "true or false"
        return f"{key} is {shown(value)}, which is not {kinds}", remedy
    return f"{key} cannot be {shown(value)}", remedy
