"""Differences of texts by lines, with a limit on the time that they take.

difflib compares each pair of equal lines, in the worst case once for each line. If that would take
too long, only the lines between the first and the last difference are compared.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Opcode = tuple[str, int, int, int, int]

_MOST_WORK = 100_000_000
"""Pairs that are looked at in the worst case; configurations have some ten thousand."""
_CONTEXT = 3
_FEW = 200
"""Lines from which on difflib ignores those that are more than a hundredth of a text."""


def unified(
    before: Sequence[str], after: Sequence[str], old: str, new: str, end: str = "\n"
) -> Iterator[str]:
    """The lines of `diff -u`; of texts that would take too long, one hunk with all changes."""
    if _is_affordable(before, after, ignoring=True):
        yield from difflib.unified_diff(before, after, old, new, lineterm=end)
        return
    head, tail = _common(before, after)
    one, other = len(before) - tail, len(after) - tail
    if head == one == other:
        return
    first, more = max(0, head - _CONTEXT), min(_CONTEXT, tail)
    yield f"--- {old}{end}"
    yield f"+++ {new}{end}"
    yield f"@@ -{_range(first, one + more)} +{_range(first, other + more)} @@{end}"
    yield from (f" {line}" for line in before[first:head])
    yield from (f"-{line}" for line in before[head:one])
    yield from (f"+{line}" for line in after[head:other])
    yield from (f" {line}" for line in before[one : one + more])


def opcodes(one: Sequence[str], other: Sequence[str]) -> list[Opcode]:
    """The changes, as those of difflib's SequenceMatcher; one if they would take too long."""
    if _is_affordable(one, other, ignoring=False):
        return [*difflib.SequenceMatcher(None, one, other, autojunk=False).get_opcodes()]
    head, tail = _common(one, other)
    ends = len(one) - tail, len(other) - tail
    made = (
        ("equal", 0, head, 0, head),
        ("replace", head, ends[0], head, ends[1]),
        ("equal", ends[0], len(one), ends[1], len(other)),
    )
    return [code for code in made if code[1] < code[2] or code[3] < code[4]]


def _is_affordable(one: Sequence[str], other: Sequence[str], *, ignoring: bool) -> bool:
    counts = Counter(other)
    most = len(other) // 100 + 1 if ignoring and len(other) >= _FEW else len(other)
    pairs = sum(count for count in map(counts.__getitem__, one) if count <= most)
    return min(len(one), len(other)) * (len(one) + pairs) <= _MOST_WORK


def _common(one: Sequence[str], other: Sequence[str]) -> tuple[int, int]:
    """How many lines two texts have in common at their beginnings, and after that at their ends."""
    head = _equal(zip(one, other, strict=False))
    left = min(len(one), len(other)) - head
    return head, min(left, _equal(zip(reversed(one), reversed(other), strict=False)))


def _equal(pairs: Iterable[tuple[str, str]]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _range(start: int, stop: int) -> str:
    """The lines of a hunk; an empty range is named by the line before it."""
    length = stop - start
    return str(stop) if length == 1 else f"{start + bool(length)},{length}"
