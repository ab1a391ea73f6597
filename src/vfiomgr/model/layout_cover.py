"""Rules of a layout that never have a device, because rules before them have it."""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from vfiomgr.model.layout import Selector
from vfiomgr.model.located import Flaw
from vfiomgr.model.pci import CLASS_ACCELERATOR, CLASS_DISPLAY, PciAddress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from vfiomgr.model.layout import Rule
    from vfiomgr.model.located import Located

_WILD = frozenset("*?[")


def idle_rules(
    where: str, rules: Sequence[Rule | None], selects: Mapping[int, Located]
) -> Iterator[Flaw]:
    """Addresses that are named twice, and rules of whose devices none is left; None is unread."""
    named: dict[PciAddress, int] = {}
    seen = _Seen()
    for number, rule in enumerate(rules):
        if rule is None:
            continue
        place = f"{where}, rule {number + 1}"
        twice = list(_repeated(rule.select, named, number))
        for address, first in twice:
            yield _named_twice(place, selects[number], address, first, number)
        if not twice:
            yield from _covered(place, selects[number], seen.before(rule.select), rule)
        seen.add(number, rule.select)


@dataclass(slots=True)
class _Seen:
    """The selectors of earlier rules; those with addresses by address, for there may be many."""

    others: list[tuple[int, Selector]] = field(default_factory=list)
    by_address: dict[PciAddress, list[tuple[int, Selector]]] = field(default_factory=dict)

    def add(self, number: int, select: Selector) -> None:
        """A rule that was looked at."""
        if not select.address:
            self.others.append((number, select))
        for address in select.address:
            self.by_address.setdefault(address, []).append((number, select))

    def before(self, select: Selector) -> list[tuple[int, Selector]]:
        """Those that might cover a selector."""
        return self.by_address.get(select.address[0], []) if select.address else self.others


def _covered(
    where: str, select: Located, before: Iterable[tuple[int, Selector]], rule: Rule
) -> Iterator[Flaw]:
    for number, earlier in before:
        if covers(earlier, rule.select):
            what = f"this rule never applies: rule {number + 1} ({earlier}) has all that it selects"
            remedy = "put the narrower rule first, or take one of the two out"
            yield Flaw(select.place, where, what, remedy)
            return


def _repeated(
    select: Selector, named: dict[PciAddress, int], number: int
) -> Iterator[tuple[PciAddress, int]]:
    """Addresses that stand alone and were named before; what narrows them may tell them apart."""
    for address in select.address if select.criteria == ("address",) else ():
        if address in named:
            yield address, named[address]
        else:
            named[address] = number


def _named_twice(where: str, select: Located, address: PciAddress, first: int, number: int) -> Flaw:
    written = [part for part in select.descendants() if _is_address(part, address)]
    place = written[-1].place if written else select.place
    if first == number:
        return Flaw(place, where, f"{address} stands here twice", "take one out")
    what = f"rule {first + 1} has {address} already, so that this one never has it"
    return Flaw(place, where, what, "keep the address in one of the two rules")


def _is_address(part: Located, address: PciAddress) -> bool:
    text = part.text.strip()
    return ":" in text and "." in text and PciAddress.parse(text) == address


def repeated_uuids(where: str, layout: Located) -> Iterator[Flaw]:
    """UUIDs that two vGPUs of a layout are to have."""
    seen: dict[str, int] = {}
    devices = layout.child("devices")
    for number, rule in enumerate(() if devices is None else devices.items or ()):
        wishes = rule.child("vgpus")
        for wish in () if wishes is None else wishes.items or ():
            uuids = wish.child("uuids")
            for part in () if uuids is None else uuids.items or ():
                key = part.text.lower()
                if key in seen:
                    what = f"a second vGPU with the UUID {part.text}"
                    remedy = f"the one in line {seen[key]} has it: give each its own"
                    yield Flaw(part.place, f"{where}, rule {number + 1}", what, remedy)
                seen.setdefault(key, part.place.line)


def covers(earlier: Selector, later: Selector) -> bool:
    """Whether each device that `later` selects is one that `earlier` selects, on any host.

    The console's display is selected by its address alone, so that no other criterion covers one.
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
    """Whether another pattern is the same, or means a name that has no wildcards itself."""
    is_plain = not _WILD & set(pattern)
    lowered = [other.lower() for other in others]
    return any(o in (pattern, "*") or (is_plain and fnmatchcase(pattern, o)) for o in lowered)


def _within(prefixes: Iterable[str], wider: tuple[str, ...]) -> bool:
    return _all(prefixes, lambda one: one.startswith(wider))


def _all(values: Iterable[str], test: Callable[[str], bool]) -> bool:
    """Whether there are some, and each passes."""
    listed = list(values)
    return bool(listed) and all(map(test, listed))
